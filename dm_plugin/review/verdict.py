"""One sentence per layer, worst first, from its latest quarter of probed steps.

With row sums (tap):  median row ratio before the cast   <= 1e-5 matches | < 1e-3 drifts | >= 1e-3 does not match
Without (any backend): key-column ratio                   < 3e-3 as small as a cast leaves | < 1e-2 drifts | >= 1e-2 large
NaN or Inf in an operand, or more than 1e-2 of an operand at the largest code, is named whatever the ratio says.
The lines between levels are the published medians (matched 1.4e-7, consistent 2.5e-3, stale 1.1e-2), not laws.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from dm_plugin.review.collect import Collected, measured
from dm_plugin.review.measure import CODES, MEASURES

LEVELS = ("bad", "watch", "ok", "blind")
WORDS = {"bad": "mismatch", "watch": "watch", "ok": "matches", "blind": "no data"}
PRE_OK, PRE_BAD = 1e-5, 1e-3
KEY_OK, KEY_BAD = 3e-3, 1e-2
SATURATED = 1e-2  # a block scale alone puts one element of each block, about 1e-3 of all, at the largest code
NAMES = {"do": "dO", "ds": "dS"}


@dataclass(frozen=True)
class Verdict:
    """level: bad | watch | ok | blind; score: the ratio it rests on (0 if none); text: one sentence."""

    site: str
    level: str
    score: float
    text: str
    trend: float  # latest quarter / first quarter of the same ratio; NaN if unknown


def verdicts(data: Collected) -> list[Verdict]:
    """Worst first: by level, then by the ratio behind it."""
    wanted = ("row_sum_pre.median", "row_sum_post.median", "key_col_sum.ratio")
    recent = {k: measured(data.recent, data.sites, MEASURES[k]) for k in wanted}
    early = {k: measured(data.early, data.sites, MEASURES[k]) for k in wanted}
    faults = code_faults(data)
    out = []
    for i, site in enumerate(data.sites):
        pre, post, key = (float(recent[k][i]) for k in wanted)
        basis = wanted[0] if np.isfinite(pre) else wanted[2]
        level, score, text = judge(pre, post, key)
        if faults[i]:
            level, text = "bad", f"{faults[i]}; {text}"
        before = float(early[basis][i])
        trend = score / before if before > 0 and score > 0 else float("nan")
        out.append(Verdict(site, level, score, text, trend))
    return sorted(out, key=lambda v: (LEVELS.index(v.level), -v.score))


def judge(pre: float, post: float, key: float) -> tuple[str, float, str]:
    """(level, score, sentence) from the two row medians and the key-column ratio; NaN = not recorded."""
    if np.isfinite(pre):
        rest = f"; after the cast {sci(post)}" if np.isfinite(post) else ""
        if pre <= PRE_OK:
            why = f"delta matches: rows cancel to {small(pre)} of their size before the cast"
            return (
                "ok",
                pre,
                why + (f"; the {sci(post)} left after it is the cast's own rounding" if np.isfinite(post) else ""),
            )
        if pre < PRE_BAD:
            return (
                "watch",
                pre,
                f"rows cancel only to {sci(pre)} of their size before the cast{rest}; round-off would be below 1e-5",
            )
        return "bad", pre, f"delta does not match: rows sum to {sci(pre)} of their size before any cast{rest}"
    if np.isfinite(key):
        head = f"no row sums from this backend; key columns cancel to {sci(key)} of their size"
        if key < KEY_OK:
            return "ok", key, f"{head}, no more than a cast leaves"
        if key < KEY_BAD:
            return "watch", key, f"{head}, more than a cast alone leaves at short lengths"
        return "bad", key, f"{head}: a spurious term reaches dK"
    return "blind", 0.0, "nothing recorded for this layer in the latest steps"


def code_faults(data: Collected) -> list[str]:
    """Per site: operands with NaN/Inf or too many saturated codes, as text ("" when there are none)."""
    out = [""] * len(data.sites)
    for kind, limit, word in (("nonfinite", 0.0, "NaN or Inf in"), ("saturated", SATURATED, "saturated codes in")):
        for code in CODES:
            share = measured(data.recent, data.sites, MEASURES[f"codes.{code}.{kind}"])
            for i in np.flatnonzero(share > limit):
                text = f"{word} {NAMES.get(code, code)} ({sci(share[i])} of elements)"
                out[i] = f"{out[i]}, {text}" if out[i] else text
    return out


def sci(x: float) -> str:
    """Two digits as people write them: 1.4e-7, 0.018."""
    if x >= 1e-2:
        return f"{x:.2g}"
    mantissa, _, exponent = f"{x:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def small(x: float) -> str:
    return "less than 1e-10" if x <= 1e-10 else sci(x)


def short_site(site: str) -> str:
    """A name people say: "layer 12" for decoder.layers.12.self_attention.core_attention, the site itself otherwise."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.self_attention\.core_attention", site)
    if match:
        return f"layer {match[1]}"
    return re.sub(r"\.self_attention\.core_attention$", "", site)
