"""One row of the softmax backward, by hand: eight keys, three deltas, and where the residual comes from.

    python examples/worked_row.py                      the typical row
    python examples/worked_row.py --row lopsided       a row like the published one (--row sharp, --row offset)
    python examples/worked_row.py --survey 6000        how typical is it? the same split over many random rows

The row sum of dS splits exactly into the rounding of P, the rounding of dO and the storing of O (numpy, FP64 with FP32 roundings where
the kernel has them; the same arithmetic as the page's widget, dm_plugin/review/worked_row.py).
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _table import save, table

from dm_plugin.review.worked_row import MODES, PRESETS, Choice, compare_modes, make_row, preset_row, work

PUBLISHED_RATIO = 71.0  # probability rounding over gradient rounding in the article's row


def show(name: str) -> dict[str, Any]:
    preset = next(p for p in PRESETS if p.key == name)
    row = preset_row(name)
    results = compare_modes(row, Choice())
    first = results["stale"]
    table(
        ["key", "logit", "P", "P-hat", "dP-hat", *(f"dS {m}" for m in MODES)],
        [
            [j + 1, row.logits[j], first.p[j], first.p_hat[j], first.dp_hat[j], *(results[m].ds[j] for m in MODES)]
            for j in range(row.logits.size)
        ],
        f"{preset.label}. {preset.note}",
    )
    table(
        [
            "delta",
            "value",
            "row sum of dS",
            "of its size",
            "after the cast",
            "P rounding",
            "dO rounding",
            "storing O",
            "FP32 round-off",
        ],
        [
            [m, r.delta, r.row_sum, r.ratio, r.ratio_cast, r.probability, r.gradient, r.storage, r.round_off]
            for m, r in results.items()
        ],
        "three deltas on the same operands (the last four columns add up to the row sum)",
    )
    ratio = abs(first.probability / first.gradient)
    print(f"\nP rounding / dO rounding: {ratio:.3g} here; the article's row has {PUBLISHED_RATIO:.0f}")
    return {
        "row": name,
        "ratio": ratio,
        **{m: {"delta": r.delta, "row_sum": r.row_sum, "ratio": r.ratio} for m, r in results.items()},
    }


def survey(rows: int) -> dict[str, Any]:
    """Medians over random rows, and how rare the published ratio is."""
    results = [work(make_row(seed), Choice()) for seed in range(rows)]
    pairs = [(abs(r.probability), abs(r.gradient)) for r in results if r.probability and r.gradient]
    median = {
        "P rounding / dO rounding": statistics.median(p / g for p, g in pairs),
        "dO rounding / P rounding": statistics.median(g / p for p, g in pairs),
        "the larger / the smaller": statistics.median(max(p / g, g / p) for p, g in pairs),
    }
    like_published = sum(p >= PUBLISHED_RATIO * g for p, g in pairs) / len(pairs)
    either = sum(max(p / g, g / p) >= PUBLISHED_RATIO for p, g in pairs) / len(pairs)
    table(
        ["quantity over random rows", "published", "ours"],
        [
            *([f"median of {name}", None, value] for name, value in median.items()),
            ["median ratio of the two terms (direction not stated there)", 1.35, None],
            [f"share of rows with P rounding at least {PUBLISHED_RATIO:.0f} times dO rounding", None, like_published],
            ["share with such a ratio in either direction", 0.02, either],
            ["median |row sum| / size, stale", None, statistics.median(r.ratio for r in results)],
        ],
        f"{rows} random rows (logits, dO, V Gaussian; 8 keys, 16 channels)",
    )
    return {"rows": rows, "median_ratio": median, "share_like_published": like_published, "share_lopsided": either}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--row", choices=[x.key for x in PRESETS], default="typical")
    p.add_argument("--survey", type=int, default=0, metavar="N", help="also look at N random rows")
    p.add_argument("--json", default=None, metavar="PATH")
    args = p.parse_args()
    body = show(args.row)
    if args.survey:
        body["survey"] = survey(args.survey)
    save(args.json, "worked_row", body)


if __name__ == "__main__":
    main()
