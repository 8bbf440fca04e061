"""Two arms side by side: the same measure at the same site and step, and their ratio.

    factor = median over common steps of B / A       steps and sites that only one of them has are counted, never guessed
A threshold PROBE=FACTOR is crossed where the factor of some site exceeds FACTOR (or B has a residual where A's is zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dm_plugin.dump import DumpError
from dm_plugin.review.collect import Collected, collect
from dm_plugin.review.measure import MEASURES, PRIMARY, Measure, resolve
from dm_plugin.review.runs import Arm

SHOWN = (
    "row_sum_pre.median",
    "row_sum_post.median",
    "key_col_sum.ratio",
    "delta_gap.ratio",
    "gain_share.top1",
    "max_logit.max",
    "entropy.mean",
)


@dataclass(frozen=True)
class Line:
    """One site and measure: medians over the common steps of A, B and of their ratio B / A."""

    site: str
    measure: Measure
    a: float
    b: float
    factor: float


@dataclass(frozen=True)
class Comparison:
    """Lines plus what could not be aligned."""

    lines: list[Line]
    steps: list[int]
    only_a: list[str]
    only_b: list[str]


def thresholds(texts: Sequence[str]) -> dict[str, float]:
    """["row_sum_pre=2", ...] -> {measure key: factor}. Raises ValueError naming the text that is wrong."""
    out = {}
    for text in texts:
        name, _, factor = text.partition("=")
        try:
            limit = float(factor)
        except ValueError:
            limit = float("nan")
        if not limit > 0:
            raise ValueError(
                f"threshold {text!r} must look like row_sum_pre=2 (probe or measure = largest allowed factor B / A)"
            )
        out[resolve(name.strip())] = limit
    return out


def compare(a: Arm, b: Arm, keys: Sequence[str] = SHOWN, strict: bool = True) -> Comparison:
    """Align two arms. Raises DumpError when they share no site or no step."""
    measures = [MEASURES[k] for k in keys]
    left, right = (collect(arm, measures, strict=strict) for arm in (a, b))
    sites = [s for s in left.sites if s in right.sites]
    steps = sorted(set(left.first) & set(right.first))
    if not sites or not steps:
        what = "site" if not sites else "step"
        raise DumpError(
            f"{a.path} and {b.path} have no {what} in common; compare runs of one model probed at the same steps"
        )
    lines = []
    for m in measures:
        x, y = (pick(data, m, sites, steps) for data in (left, right))
        for i, site in enumerate(sites):
            both = np.isfinite(x[:, i]) & np.isfinite(y[:, i])
            if both.any():
                xs, ys = x[both, i], y[both, i]
                lines.append(
                    Line(site, m, float(np.median(xs)), float(np.median(ys)), float(np.median(factors(xs, ys))))
                )
    return Comparison(
        lines, steps, [s for s in left.sites if s not in sites], [s for s in right.sites if s not in sites]
    )


def pick(data: Collected, measure: Measure, sites: list[str], steps: list[int]) -> NDArray[np.float64]:
    """[steps, sites] of one measure."""
    rows = [data.first.index(s) for s in steps]
    columns = [data.sites.index(s) for s in sites]
    return data.values[measure.key][np.ix_(rows, columns)]


def factors(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """b / a; 1 where both are zero, inf where only a is."""
    out = np.divide(b, a, out=np.full_like(b, np.inf), where=a != 0)
    return np.where((a == 0) & (b == 0), 1.0, out)


def crossed(result: Comparison, limits: dict[str, float]) -> list[tuple[Line, float]]:
    """Lines beyond their threshold, worst first."""
    found = [(line, limits[line.measure.key]) for line in result.lines if line.measure.key in limits]
    return sorted(((line, limit) for line, limit in found if line.factor > limit), key=lambda x: -x[0].factor)


def keys_for(limits: dict[str, float]) -> list[str]:
    """The measures shown, and those with a threshold."""
    return list(dict.fromkeys([*SHOWN, *limits]))


__all__ = ["PRIMARY", "Comparison", "Line", "compare", "crossed", "keys_for", "thresholds"]
