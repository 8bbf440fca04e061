"""One self-contained HTML page from one or more arms: data as embedded JSON, charts drawn by the page's own script.

No network, no library: page.html.j2 holds the text, page.css the looks, page_*.js the charts and the worked row.
Series carry at most 400 points (neighbouring steps merged by addition, losses by mean), 3 significant digits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dm_plugin import __version__
from dm_plugin.dump import DumpError
from dm_plugin.review import worked_row
from dm_plugin.review.collect import Collected, collect, measured, top_p_medians
from dm_plugin.review.measure import CODES, MEASURES, TOP_P_LABELS, ratio
from dm_plugin.review.runs import Arm, Curve
from dm_plugin.review.verdict import WORDS, short_site, verdicts

MAX_POINTS = 400
POINT_BUDGET = 40_000  # points per measure over all arms and sites
MAX_CHANNELS = 256
TOP_GAINS = 8
HERE = Path(__file__).parent
SCRIPTS = ("page_math.js", "page_chart.js", "page_main.js", "page_detail.js", "page_row.js")
SERIES = (
    "row_sum_pre.median",
    "row_sum_pre.p10",
    "row_sum_pre.p90",
    "row_sum_post.median",
    "key_col_sum.ratio",
    "delta_gap.ratio",
    "max_logit.max",
    "entropy.mean",
    "gain_share.top1",
    "row_sum_signed.sharpened",
)
# fixed colours for the arms people compare; others take the free ones in order (Okabe-Ito numbers)
COLOURS = {"bf16": 0, "exact": 0, "matched": 1, "stale": 2, "stock": 3, "consistent": 4, "stock_current": 5}


def build_payload(
    arms: Sequence[Arm],
    problems: list[DumpError],
    *,
    title: str,
    strict: bool = False,
    tick: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Read all arms and form everything the page shows; refused files are appended to `problems`."""
    points = frame_budget(arms)
    out = []
    for arm in arms:
        data = collect(arm, max_frames=points, buckets=True, strict=strict, tick=tick)
        problems += data.reader.problems
        out.append(arm_payload(data))
    for item, colour in zip(out, arm_colours([a["name"] for a in out]), strict=True):
        item["colour"] = colour
    return {
        "title": title,
        "version": __version__,
        "arms": out,
        "problems": [str(p) for p in problems],
        "measures": {k: {"label": m.label, "definition": m.definition, "log": m.log} for k, m in MEASURES.items()},
        "topLabels": list(TOP_P_LABELS),
        "codes": list(CODES),
        "words": WORDS,
        "rows": row_payload(),
    }


def frame_budget(arms: Sequence[Arm]) -> int:
    """Points per series so that arms x layers x points stays small; layers are guessed from file sizes never read here."""
    layers = max((int(_layers(arm)) for arm in arms), default=1)
    return max(60, min(MAX_POINTS, POINT_BUDGET // max(1, len(arms) * layers)))


def _layers(arm: Arm) -> int:
    if not arm.files:
        return 1
    try:
        data = collect(Arm(arm.name, arm.path, arm.files[:1]), [MEASURES["key_col_sum.ratio"]])
    except DumpError:
        return 1
    return max(1, len(data.sites)) * max(
        1, len({f.rank for f in arm.files}) // max(1, len(data.reader.ranks)) if data.sites else 1
    )


def arm_payload(data: Collected) -> dict[str, Any]:
    sites, recent = data.sites, data.recent
    judged = verdicts(data)
    now = {k: numbers(measured(recent, sites, m)) for k, m in MEASURES.items() if not k.endswith(("p10", "p90"))}
    return {
        "name": data.arm.name,
        "label": data.arm.label,
        "description": str(data.arm.about.get("description", "")),
        "backend": data.backend,
        "implReason": data.reader.impl_reason,
        "model": data.reader.model,
        "files": data.reader.files,
        "megabytes": round(sum(f.path.stat().st_size for f in data.arm.files if f.path.exists()) / 2**20, 1),
        "ranks": len(data.reader.ranks),
        "lost": data.reader.lost,
        "reasons": [
            {"probe": p, "reason": r, "site": s} for p, by in data.reader.reasons.items() for r, s in by.items()
        ],
        "sites": sites,
        "names": [short_site(s) for s in sites],
        "first": data.first,
        "last": data.last,
        "recentSteps": [recent.first, recent.last] if recent else [],
        "verdicts": [clean(asdict(v) | {"site": sites.index(v.site)}) for v in judged],
        "series": {k: numbers(data.values[k].T) for k in SERIES if np.isfinite(data.values[k]).any()},
        "now": {k: v for k, v in now.items() if any(x is not None for x in v)},
        "overall": overall(data),
        **distributions(data),
        "curve": curve_payload(data.arm.curve),
    }


def overall(data: Collected) -> dict[str, Any]:
    """Whole-model numbers of the latest steps: fields added over layers first, then the same ratios and quantiles."""
    if data.recent is None:
        return {}
    out = {}
    for key, m in MEASURES.items():
        if any(n not in data.recent.fields for n in m.needs):
            continue
        if key.startswith("gain_share") or key.endswith((".max", ".amax")):
            finite = measured(data.recent, data.sites, m)
            value = float(np.nanmax(finite)) if np.isfinite(finite).any() else float("nan")
        else:
            value = float(m.form({n: data.recent.fields[n].sum(axis=0, keepdims=True) for n in m.needs})[0])
        out[key] = value
    return clean(out)


def distributions(data: Collected) -> dict[str, Any]:
    """Histograms, bucket medians, heads and channels of the latest steps."""
    out: dict[str, Any] = {"hist": {}, "topP": {}, "topPSeries": {}, "heads": {}, "channels": [], "gains": []}
    if data.recent is None:
        return out
    fields, order = (
        data.recent.fields,
        [data.recent.sites.index(s) if s in data.recent.sites else -1 for s in data.sites],
    )
    for probe in ("row_sum_pre", "row_sum_post"):
        if f"{probe}.hist" in fields:
            out["hist"][probe] = [trim(fields[f"{probe}.hist"][i]) if i >= 0 else None for i in order]
        if f"{probe}.num" in fields and f"{probe}.den" in fields:
            out["heads"][probe] = rows_of(ratio(fields[f"{probe}.num"], fields[f"{probe}.den"]), order)
        if f"{probe}.hist_top_p" in fields:
            out["topP"][probe] = rows_of(top_p_medians(fields, len(data.recent.sites))[probe], order)
            out["topPSeries"][probe] = numbers(np.moveaxis(data.top_p[probe], 0, -1))  # [S, 5, F']
    out["topPSteps"] = [data.last[f] for f in data.top_p_frames]
    if "key_col_sum.num" in fields and "key_col_sum.den" in fields:  # key heads summed, channels kept: [S, D]
        value = ratio(fields["key_col_sum.num"].sum(1), fields["key_col_sum.den"].sum(1))
        out["channels"] = rows_of(value[:, :MAX_CHANNELS], order)
    if "gain_share.q" in fields and "gain_share.k" in fields:
        energy = np.square(fields["gain_share.q"] * fields["gain_share.k"])
        share = ratio(energy, np.broadcast_to(energy.sum(-1, keepdims=True), energy.shape))
        out["gains"] = [top_channels(share[i]) if i >= 0 else [] for i in order]
        out["gainDim"] = int(share.shape[-1])
    return out


def top_channels(share: NDArray[np.float64]) -> list[list[float]]:
    """[channel, share] of the largest channels."""
    best = np.argsort(-np.nan_to_num(share), kind="stable")[:TOP_GAINS]
    return [[int(c), float(f"{share[c]:.3g}")] for c in best if np.isfinite(share[c])]


def trim(hist: NDArray) -> dict[str, Any]:
    """Histogram at 10 bins a decade without empty ends: {"from": first bin, "n": counts, "under", "over"}."""
    pairs = hist[1:-1].reshape(-1, 2).sum(1)
    used = np.flatnonzero(pairs)
    low, high = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
    return {"from": low, "n": [int(x) for x in pairs[low:high]], "under": int(hist[0]), "over": int(hist[-1])}


def curve_payload(curve: Curve | None) -> dict[str, Any] | None:
    """Loss and gradient norm, at most 400 points: means over neighbouring steps, the last step of each group."""
    if curve is None:
        return None
    size = -(-len(curve.step) // MAX_POINTS)
    starts = np.arange(0, len(curve.step), size)
    ends = np.minimum(starts + size, len(curve.step)) - 1
    count = ends - starts + 1
    tail = curve.loss[-max(1, len(curve.loss) // 20) :]
    return {
        "step": [int(s) for s in curve.step[ends]],
        "loss": numbers(np.add.reduceat(curve.loss, starts) / count, 4),
        "gradNorm": numbers(np.add.reduceat(curve.grad_norm, starts) / count),
        "merged": int(size),
        "tail": clean(float(np.median(tail))),
        "tailSteps": len(tail),
    }


def row_payload() -> list[dict[str, Any]]:
    out = []
    for preset in worked_row.PRESETS:
        row = worked_row.preset_row(preset.key)
        item = {"key": preset.key, "label": preset.label, "note": preset.note, "seed": preset.seed}
        out.append(item | {"logits": row.logits.tolist(), "do": row.do.tolist(), "v": row.v.tolist()})
    return out


def arm_colours(names: Sequence[str]) -> list[int]:
    """A colour number per arm: fixed ones for known names, then the unused ones, then around again."""
    wanted = [COLOURS.get(name.rsplit("/", 1)[-1]) for name in names]
    taken: set[int] = set()
    for i, colour in enumerate(wanted):
        if colour in taken:
            wanted[i] = None
        elif colour is not None:
            taken.add(colour)
    free = [c for c in (1, 2, 4, 3, 5, 6, 0) if c not in taken]
    return [c if c is not None else (free.pop(0) if free else i % 7) for i, c in enumerate(wanted)]


def rows_of(table: NDArray[np.float64], order: list[int]) -> list[Any]:
    listed = numbers(table)
    return [listed[i] if i >= 0 else None for i in order]


def numbers(x: NDArray[np.float64], digits: int = 3) -> Any:
    """Nested lists with `digits` significant digits; NaN and Inf become null, as JSON has neither."""
    if x.ndim > 1:
        return [numbers(row, digits) for row in x]
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in x.tolist()]


def clean(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: clean(v) for k, v in x.items()}
    return (float(f"{x:.4g}") if math.isfinite(x) else None) if isinstance(x, float) else x


def render(payload: dict[str, Any]) -> str:
    """The page as one string. ModuleNotFoundError when jinja2 is missing (extra `review`)."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return env.get_template("page.html.j2").render(p=payload, data=data, script=script, style=style)


def write_page(path: Path, text: str) -> None:
    """Write the page through a temporary file in the same folder, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
