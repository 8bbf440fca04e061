"""What the commands share: the two consoles, the ways to stop, and how numbers, steps and sites are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def discover(paths: Sequence[Path]) -> tuple[list[Any], list[Any]]:
    from .dump import DumpError
    from .review.runs import discover

    problems: list[Any] = []
    try:
        return discover(paths, problems), problems
    except DumpError as error:
        stop(str(error))


def stop(text: str) -> NoReturn:
    err.print(f"dm-plugin: {text}", soft_wrap=True, markup=False)
    raise typer.Exit(2)


def finish(problems: Sequence[Any], skip_bad: bool) -> None:
    for problem in problems:
        err.print(f"left out: {problem}", soft_wrap=True, markup=False)
    if problems and not skip_bad:
        raise typer.Exit(2)


def show_table(
    label: str, backend: str, steps: list[int], sites: list[str], measures: Sequence[Any], rows: dict[str, list[float]]
) -> None:
    kept = [m for m in measures if any(math.isfinite(x) for x in rows[m.key])]
    if not steps:
        out.print(f"{label}: no dumps; ask a running job for them with `dm-plugin probe start`", soft_wrap=True)
        return
    out.print(
        f"{label}: {backend or 'backend not stated'}, {len(steps)} probed steps {span(steps)}",
        style="bold",
        soft_wrap=True,
    )
    for part in _that_fit(kept, max((len(site_name(site)) for site in sites), default=4), rows):
        table = Table("site")
        for m in part:
            table.add_column(m.label, no_wrap=False, min_width=_digits(rows[m.key]))
        for i, site in enumerate(sites):
            table.add_row(site_name(site), *(fmt(rows[m.key][i]) for m in part))
        out.print(table)
    for m in kept:
        out.print(f"  [bold]{m.label}[/]: median over steps of {m.definition}", soft_wrap=True)


def _digits(values: Sequence[float]) -> int:
    return max((len(fmt(x)) for x in values), default=1)


def _that_fit(measures: Sequence[Any], first: int, rows: dict[str, list[float]]) -> list[list[Any]]:
    """Measures in groups whose tables fit the terminal: a number that is cut off is worse than a second table."""
    groups: list[list[Any]] = [[]]
    room = out.width - first - 4
    for m in measures:
        width = 3 + max(_digits(rows[m.key]), *(len(word) for word in m.label.split()))
        if groups[-1] and width > room:
            groups.append([])
            room = out.width - first - 4
        groups[-1].append(m)
        room -= width
    return groups


def median(values: Any, columns: list[int]) -> list[float]:
    import numpy as np

    picked = values[:, columns]
    return [float(np.median(c[np.isfinite(c)])) if np.isfinite(c).any() else math.nan for c in picked.T]


def number(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


def fmt(x: float) -> str:
    if not math.isfinite(x):
        return "-" if math.isnan(x) else "inf"
    return "0" if x == 0 else f"{x:.2e}" if abs(x) < 1e-2 or abs(x) >= 1e5 else f"{x:.3g}"


def span(steps: Iterable[int]) -> str:
    known = sorted(set(steps))
    return f"{known[0]}-{known[-1]}" if known else "none"


def listed(steps: Iterable[int]) -> str:
    """All of a few steps; of many, the first, the last and their number."""
    known = sorted(set(steps))
    return (
        ", ".join(map(str, known)) if len(known) <= 12 else f"{known[0]}, {known[1]}, ..., {known[-1]} ({len(known)})"
    )


def site_name(name: str) -> str:
    from .review.verdict import short_site

    return short_site(name)
