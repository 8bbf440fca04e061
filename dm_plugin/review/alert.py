"""Which layers of a running job are past a line, from its newest probed step.

A line is MEASURE=VALUE, crossed when the measure of a layer exceeds VALUE. Without any the lines of verdict.py are used: the median row
residual before the cast at 1e-3, and the key-column ratio at 1e-2 for layers whose backend gives no row sums.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dm_plugin.dump import DumpError
from dm_plugin.review.collect import collect
from dm_plugin.review.measure import MEASURES, resolve
from dm_plugin.review.runs import discover
from dm_plugin.review.verdict import KEY_BAD, PRE_BAD

ROWS, KEYS = "row_sum_pre.median", "key_col_sum.ratio"


@dataclass(frozen=True)
class Crossing:
    """One layer past one line."""

    arm: str
    site: str
    step: int
    measure: str
    value: float
    limit: float


def lines(texts: Sequence[str]) -> dict[str, float]:
    """["max_logit=100", ...] -> {measure key: value}. Raises ValueError naming the text that is wrong."""
    out = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            value = float(number) if equals else float("nan")
        except ValueError:
            value = float("nan")
        if not np.isfinite(value):
            raise ValueError(f"line {text!r} must look like max_logit=100 (a probe or measure, and a number)")
        out[resolve(name)] = value
    return out


def crossings(run: Path, limits: dict[str, float]) -> list[Crossing]:
    """Crossed lines at the newest step of each arm, worst first by value / limit. No dump yet: none. Raises DumpError for a missing folder."""
    if not run.is_dir():
        raise DumpError(f"{run} is not a folder; give the run folder of the job")
    try:
        arms = discover([run], [])
    except DumpError:  # nothing written yet
        return []
    wanted = limits or {ROWS: PRE_BAD, KEYS: KEY_BAD}
    found = []
    for arm in arms:
        if not arm.files:
            continue
        newest = max(f.step for f in arm.files)
        data = collect(arm, [MEASURES[key] for key in {*wanted, ROWS}], steps=lambda s, newest=newest: s == newest)  # type: ignore[misc]
        for i, site in enumerate(data.sites):
            seen = {key: float(data.values[key][-1, i]) for key in data.values}
            for key, limit in wanted.items():
                if not limits and key == KEYS and np.isfinite(seen[ROWS]):
                    continue  # rows say it better
                if np.isfinite(seen[key]) and seen[key] > limit:
                    found.append(Crossing(arm.name, site, newest, key, seen[key], limit))
    return sorted(found, key=lambda c: -c.value / c.limit if c.limit > 0 else -np.inf)


def tell(command: str, crossing: Crossing) -> int:
    """Run a shell command with the crossing in DM_ARM, DM_SITE, DM_STEP, DM_MEASURE, DM_VALUE, DM_LIMIT; its exit code."""
    about = {f"DM_{name.upper()}": str(value) for name, value in vars(crossing).items()}
    return subprocess.run(command, shell=True, env=os.environ | about, check=False).returncode
