"""What each number of a review means, and how it is formed from the additive fields of a dump.

A frame holds merged fields with a leading site axis, e.g. row_sum_pre.num [S, H]. With rows i and keys j,
    row ratio_i  = |sum_j dS_ij| / sum_j |dS_ij|           median and quantiles over rows come from hist
    hist         = 242 counts: [0] ratio < 1e-10, [1..240] 20 bins a decade from 1e-10 to 1e2, [241] above / non-finite
    quantile(q)  = 10^(edge + (q n - rows below the bin) / rows in the bin / 20)      log10-linear inside a bin
Ratios of sums are sum(num) / sum(den) over heads (and channels), never means of ratios. Absent data is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HIST_BINS = 242
HIST_LOW, HIST_PER_DECADE = -10, 20
TOP_P_LABELS = ("< 0.5", "0.5-0.9", "0.9-0.99", "0.99-0.999", "> 0.999")
CODES = ("q", "k", "v", "p", "do", "ds")

Array = NDArray[np.float64]
Fields = dict[str, NDArray]  # "probe.field" -> [S, ...]


def hist_quantile(hist: NDArray, q: float) -> Array:
    """Quantile q of the ratios counted in hist [..., 242]; 1e-10 stands for "below 1e-10", inf for above 1e2, NaN for no rows.

    Raises ValueError when the last axis is not 242 long or q is outside [0, 1].
    """
    if hist.shape[-1:] != (HIST_BINS,):
        raise ValueError(
            f"hist has shape {hist.shape}; its last axis must be {HIST_BINS} (240 bins, under- and overflow)"
        )
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile q={q} must lie in [0, 1]")
    cum = np.cumsum(hist, axis=-1, dtype=np.float64)
    total = cum[..., -1]
    target = np.maximum(q * total, np.where(total > 0, 1e-12, 0.0))
    index = np.argmax(cum >= target[..., None], axis=-1)  # first bin that reaches the target
    inside = np.take_along_axis(hist, index[..., None], -1)[..., 0].astype(np.float64)
    below = np.take_along_axis(cum, index[..., None], -1)[..., 0] - inside
    part = np.divide(target - below, inside, out=np.zeros_like(total), where=inside > 0)
    value = 10.0 ** (HIST_LOW + (index - 1 + part) / HIST_PER_DECADE)
    value = np.where(index == 0, 10.0**HIST_LOW, np.where(index == HIST_BINS - 1, np.inf, value))
    return np.where(total > 0, value, np.nan)


def ratio(num: NDArray, den: NDArray) -> Array:
    """num / den elementwise; NaN where den is not positive (never a division warning)."""
    num, den = np.asarray(num, np.float64), np.asarray(den, np.float64)
    return np.divide(num, den, out=np.full(np.broadcast(num, den).shape, np.nan), where=den > 0)


def sum_sites(x: NDArray) -> Array:
    """Sum over every axis but the site axis: [S, ...] -> [S]."""
    return x.reshape(len(x), -1).sum(axis=1, dtype=np.float64)


def max_sites(x: NDArray) -> Array:
    """Maximum over every axis but the site axis; NaN padding of shorter sites is ignored."""
    flat = np.asarray(x, np.float64).reshape(len(x), -1)
    best = np.where(np.isnan(flat), -np.inf, flat).max(axis=1)
    return np.where(np.isnan(flat).all(axis=1), np.nan, best)


def top_gain(q: NDArray, k: NDArray, top: int) -> Array:
    """Share of sum_c (g_q,c g_k,c)^2 held by the `top` largest channels: two [S, D] -> [S]."""
    energy = np.sort(np.square(np.nan_to_num(q) * np.nan_to_num(k)), axis=-1)
    return ratio(energy[:, -top:].sum(-1), energy.sum(-1))


@dataclass(frozen=True)
class Measure:
    """One number per site: its key, short heading, definition, the fields it needs and how it is formed."""

    key: str
    label: str
    definition: str
    needs: tuple[str, ...]
    form: Callable[[Fields], Array]
    log: bool = True  # drawn on a log axis
    merged: bool = False  # means something over several merged steps only

    @property
    def probe(self) -> str:
        return self.key.split(".")[0]


def _quantile(probe: str, q: float) -> Callable[[Fields], Array]:
    return lambda f: hist_quantile(f[f"{probe}.hist"], q)


def _share(num: str, *others: str) -> Callable[[Fields], Array]:
    """sum(num) / (sum(num) + sum(others))."""
    return lambda f: ratio(sum_sites(f[num]), sum_sites(f[num]) + sum((sum_sites(f[o]) for o in others), np.float64(0)))


def _over(num: str, den: str) -> Callable[[Fields], Array]:
    return lambda f: ratio(sum_sites(f[num]), sum_sites(f[den]))


def _row_measures(probe: str, when: str) -> list[Measure]:
    row = f"|sum_j dS_ij| / sum_j |dS_ij| of a row, {when} the cast of dS to FP8"
    names = (("median", 0.5), ("p10", 0.1), ("p90", 0.9))
    out = [
        Measure(
            f"{probe}.{n}",
            f"row {when} {n}",
            f"{n} over rows and heads of {row}",
            (f"{probe}.hist",),
            _quantile(probe, q),
        )
        for n, q in names
    ]
    text = f"sum over rows and heads of |sum_j dS_ij| / sum of sum_j |dS_ij|, {when} the cast"
    out.append(
        Measure(
            f"{probe}.ratio",
            f"row {when} ratio",
            text,
            (f"{probe}.num", f"{probe}.den"),
            _over(f"{probe}.num", f"{probe}.den"),
        )
    )
    text = f"rows left out because sum_j |dS_ij| = 0, {when} the cast, as a share of all rows"
    needs = (f"{probe}.excluded", f"{probe}.count")
    out.append(Measure(f"{probe}.excluded", f"row {when} excluded", text, needs, _share(*needs), log=False))
    return out


def _code_measures(code: str) -> list[Measure]:
    name = {"do": "dO", "ds": "dS"}.get(code, code)
    what = {"saturated": "at the largest code", "underflowed": "non-zero but coded as zero", "nonfinite": "NaN or Inf"}
    out = [
        Measure(
            f"codes.{code}.{field}",
            f"{name} {field}",
            f"elements of {name} {text} / all elements of {name} quantised",
            (f"codes.{code}.{field}", f"codes.{code}.count"),
            _over(f"codes.{code}.{field}", f"codes.{code}.count"),
        )
        for field, text in what.items()
    ]
    needs = (f"codes.{code}.amax",)
    text = f"largest |{name}| before quantising"
    out.append(Measure(f"codes.{code}.amax", f"{name} amax", text, needs, lambda f: max_sites(f[needs[0]])))
    return out


REPLAY_ARMS = ("stale", "consistent", "matched", "stock")


def _replay_measures(arm: str) -> list[Measure]:
    probe = f"replay_{arm}"
    what = "Transformer Engine's FP8 casts" if arm == "stock" else f"the sm90 kernel's casts, {arm} delta"
    of = f"(captured operands replayed with {what}; CPU simulation)"
    rows = f"median over rows and heads of |sum_j dS_ij| / sum_j |dS_ij| before the cast of dS {of}"
    gap = f"sum over rows of |delta - delta_matched| / sum of |delta| {of}"
    column = f"|sum_j dK_jc| / sum_j |dK_jc| {of}"
    out = [
        Measure(f"{probe}.median", f"{arm}: row", rows, (f"{probe}.hist",), _quantile(probe, 0.5)),
        Measure(f"{probe}.gap", f"{arm}: delta gap", gap, (f"{probe}.gap_num", f"{probe}.gap_den"), _over(f"{probe}.gap_num", f"{probe}.gap_den")),
        Measure(f"{probe}.col", f"{arm}: key column", column, (f"{probe}.col_num", f"{probe}.col_den"), _over(f"{probe}.col_num", f"{probe}.col_den")),
    ]  # fmt: skip
    for name, symbol in (("dq", "dQ"), ("dk", "dK"), ("dv", "dV")):
        needs = (f"{probe}.{name}_num", f"{probe}.{name}_den")
        text = f"relative L2 error of {symbol} against FP64 attention on the same operands {of}"
        out.append(Measure(f"{probe}.{name}", f"{arm}: {symbol} error", text, needs, _root_over(*needs)))
    needs = (f"{probe}.push", f"{probe}.push_abs")
    text = (
        "sum over channels of |sum over steps of push_c| / sum of |push_c|, push_c being the effect of the row residual on the log of key gain c: "
        f"1 when every step pushes every gain the same way, near 0 when the signs are chance {of}"
    )
    out.append(
        Measure(
            f"{probe}.push_consistency",
            f"{arm}: push consistency",
            text,
            needs,
            _consistency(*needs),
            log=False,
            merged=True,
        )
    )
    needs = (f"{probe}.push_sharpened", f"{probe}.push")
    text = (
        f"share of the push of the row residual on log key gains, sum_c |push_c|, that comes from rows it sharpens {of}"
    )
    out.append(
        Measure(f"{probe}.push_sharpened", f"{arm}: push sharpened", text, needs, _push_share(*needs), log=False)
    )
    return out


def _root_over(num: str, den: str) -> Callable[[Fields], Array]:
    return lambda f: np.sqrt(ratio(sum_sites(f[num]), sum_sites(f[den])))


def _consistency(push: str, absolute: str) -> Callable[[Fields], Array]:
    return lambda f: ratio(sum_sites(np.abs(f[push])), sum_sites(f[absolute]))


def _push_share(sharpened: str, push: str) -> Callable[[Fields], Array]:
    """sum_c |sharpened_c| / (sum_c |sharpened_c| + sum_c |push_c - sharpened_c|)."""

    def form(f: Fields) -> Array:
        part, rest = np.abs(f[sharpened]), np.abs(f[push] - f[sharpened])
        return ratio(sum_sites(part), sum_sites(part) + sum_sites(rest))

    return form


_GAINS = ("gain_share.q", "gain_share.k")
_COL = "|sum_j dK_jc| / sum_j |dK_jc|, both summed over sequences, key heads and channels"
_SIGNED = "row_sum_signed"
MEASURES: dict[str, Measure] = {
    m.key: m
    for m in (
        *_row_measures("row_sum_pre", "before"),
        *_row_measures("row_sum_post", "after"),
        Measure("key_col_sum.ratio", "key column", _COL, ("key_col_sum.num", "key_col_sum.den"), _over("key_col_sum.num", "key_col_sum.den")),
        Measure("delta_gap.median", "delta gap median", "median over rows of |delta_used - delta_matched| / |delta_used|", ("delta_gap.hist",), _quantile("delta_gap", 0.5)),
        Measure("delta_gap.ratio", "delta gap", "sum over rows and heads of |delta_used - delta_matched| / sum of |delta_used|", ("delta_gap.num", "delta_gap.den"), _over("delta_gap.num", "delta_gap.den")),
        Measure(f"{_SIGNED}.sharpened", "rows sharpened", "rows with sum_j dS_ij < 0 / rows with a non-zero sum; about 0.5 when the residual is round-off", (f"{_SIGNED}.sharpened", f"{_SIGNED}.flattened"), _share(f"{_SIGNED}.sharpened", f"{_SIGNED}.flattened"), log=False),
        Measure(f"{_SIGNED}.entropy_sharpened", "entropy sharpened", "mean entropy (nats) of the rows with sum_j dS_ij < 0", (f"{_SIGNED}.entropy_sharpened", f"{_SIGNED}.sharpened"), _over(f"{_SIGNED}.entropy_sharpened", f"{_SIGNED}.sharpened"), log=False),
        Measure(f"{_SIGNED}.entropy_flattened", "entropy flattened", "mean entropy (nats) of the rows with sum_j dS_ij > 0", (f"{_SIGNED}.entropy_flattened", f"{_SIGNED}.flattened"), _over(f"{_SIGNED}.entropy_flattened", f"{_SIGNED}.flattened"), log=False),
        Measure("gain_share.top1", "top-1 gain share", "share of sum_c (g_q,c g_k,c)^2 held by the largest channel; 1/D when all gains are equal", _GAINS, lambda f: top_gain(f[_GAINS[0]], f[_GAINS[1]], 1)),
        Measure("gain_share.top4", "top-4 gain share", "share of sum_c (g_q,c g_k,c)^2 held by the four largest channels", _GAINS, lambda f: top_gain(f[_GAINS[0]], f[_GAINS[1]], 4)),
        Measure("max_logit.max", "max logit", "largest scaled logit S over rows, keys and heads (natural units)", ("max_logit.max",), lambda f: max_sites(f["max_logit.max"])),
        Measure("entropy.mean", "entropy", "mean over rows and heads of the softmax entropy (nats)", ("entropy.num", "entropy.count"), _over("entropy.num", "entropy.count"), log=False),
        *(m for code in CODES for m in _code_measures(code)),
        *(m for arm in REPLAY_ARMS for m in _replay_measures(arm)),
    )
}  # fmt: skip

# the measure that stands for a probe when only the probe is named
PRIMARY = {
    "row_sum_pre": "row_sum_pre.median",
    "row_sum_post": "row_sum_post.median",
    "row_sum": "row_sum_pre.median",
    "row_sum_signed": "row_sum_signed.sharpened",
    "key_col_sum": "key_col_sum.ratio",
    "delta_gap": "delta_gap.ratio",
    "gain_share": "gain_share.top1",
    "max_logit": "max_logit.max",
    "entropy": "entropy.mean",
    **{f"codes.{c}": f"codes.{c}.saturated" for c in CODES},
    **{f"replay_{arm}": f"replay_{arm}.median" for arm in REPLAY_ARMS},
}


def resolve(name: str) -> str:
    """Measure key of a probe or measure name; ValueError names the choices."""
    if name in MEASURES:
        return name
    if name in PRIMARY:
        return PRIMARY[name]
    raise ValueError(f"{name!r} is no probe; choose one of {', '.join(PRIMARY)} or a measure such as row_sum_pre.p90")


def select(probe: str | None) -> list[Measure]:
    """Measures of one probe that a single step has (all of them for None, a single one for a full measure key)."""
    if probe in MEASURES:
        return [MEASURES[probe]]
    single = [m for m in MEASURES.values() if not m.merged]
    if probe is None:
        return single
    found = [m for m in single if m.key.startswith(f"{probe}.") or m.probe.startswith(f"{probe}_")]
    if not found:
        resolve(probe)  # raises with the choices
    return found


def needed_fields(measures: list[Measure]) -> frozenset[str]:
    return frozenset(field for m in measures for field in m.needs)


def form(measure: Measure, fields: Fields, sites: int) -> Array:
    """The measure for each site, NaN where its fields were not recorded."""
    if any(name not in fields for name in measure.needs):
        return np.full(sites, np.nan)
    return measure.form(fields)
