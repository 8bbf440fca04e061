"""What a person sees of an A/B run: bars with time left on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .ab import Arm

QUIET_SECONDS = 20.0  # between plain lines of one run
COLUMNS = (
    (
        "row before cast",
        "row_sum_pre.median",
        "median over rows of |sum_j dS_ij| / sum_j |dS_ij| before the FP8 cast of dS",
    ),
    ("row after cast", "row_sum_post.median", "the same after the cast"),
    ("key column", "key_col_sum.ratio", "sum_c |sum_j dK_jc| / sum_jc |dK_jc|, all layers"),
    ("top gain", "gain_share.top1", "largest share that one channel holds of sum_c (g_q,c g_k,c)^2 in any layer"),
    ("max logit", "max_logit.max", "largest scaled logit in any layer"),
)


@contextmanager
def progress(arms: Sequence[Arm], steps: int) -> Iterator[Callable[[Sequence[Arm]], None]]:
    """Yields show(arms), to be called often."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if not Console().is_terminal:
        yield _plain(steps)
        return
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bars:
        tasks = {arm.name: bars.add_task(arm.name, total=steps, loss="", start=False) for arm in arms}

        def show(now: Sequence[Arm]) -> None:
            for arm in now:
                if arm.process is not None:
                    bars.start_task(tasks[arm.name])
                    loss = arm.last.get("loss")
                    words = f"loss {loss:.3f}" if loss is not None else "starting"
                    bars.update(tasks[arm.name], completed=arm.done, loss=words)
                    if arm.code is not None:
                        bars.stop_task(tasks[arm.name])

        yield show


def _plain(steps: int) -> Callable[[Sequence[Arm]], None]:
    said: dict[str, object] = {}
    last = [time.monotonic()]

    def show(arms: Sequence[Arm]) -> None:
        for arm in arms:
            state = (
                "finished"
                if arm.code == 0
                else "failed"
                if arm.code
                else "started"
                if arm.process is not None
                else None
            )
            if state is not None and said.get(arm.name) != state:
                said[arm.name] = state
                print(f"{arm.name}: {state}", flush=True)
        if time.monotonic() - last[0] >= QUIET_SECONDS:
            last[0] = time.monotonic()
            parts = [
                f"{a.name} {a.done}/{steps}{_left(a, steps)}" for a in arms if a.process is not None and a.code is None
            ]
            print("  ".join(parts), flush=True)

    return show


def _left(arm: Arm, steps: int) -> str:
    spent = time.monotonic() - arm.began
    return f" ({spent / arm.done * (steps - arm.done):.0f} s left)" if arm.done > 2 else ""


COSTS = ("ms/step", "tokens/s", "peak MiB")


def print_table(payload: dict[str, Any], arms: Sequence[Any]) -> list[dict[str, str]]:
    """One row an arm from the report's payload and the arms' training curves, returned too; every column is defined below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    base = arms[0]
    gap_name = f"gap to {base.name}"
    table = Table(
        "arm",
        "loss",
        gap_name,
        "grad norm",
        *(name for name, _, _ in COLUMNS),
        *COSTS,
        title=payload["title"],
        title_justify="left",
    )
    rows = []
    for shown, arm in zip(payload["arms"], arms, strict=True):
        loss = f"{np.mean(arm.curve.loss[-_tail(arm.curve) :]):.4f}" if arm.curve is not None else "-"
        values = [shown["overall"].get(key) for _, key, _ in COLUMNS]
        gap = "-" if arm is base else _gap(arm.curve, base.curve)
        norm = _number(float(np.median(arm.curve.grad_norm[-_tail(arm.curve) :]))) if arm.curve is not None else "-"
        rows.append([shown["label"], loss, gap, norm, *map(_number, values), *_costs(arm.curve)])
        table.add_row(*rows[-1])
    console.print(table)
    n = _tail(base.curve) if base.curve is not None else 0
    console.print(f"loss: mean of the last {n} steps (a quarter of the run)")
    console.print(
        f"{gap_name}: mean over those steps of the loss minus that of {base.name} on the same batch, and its standard error; "
        "one seed, so a gap of a few errors can still be chance"
    )
    for name, _, definition in COLUMNS:
        console.print(f"{name}: {definition}; latest quarter of the probed steps")
    console.print("grad norm: median over the last quarter of the run, before clipping")
    console.print(
        "ms/step: median over the steps that were not probed, the first five left out; tokens/s from it; peak MiB: allocated on the GPU. On a "
        "CPU the casts are simulated, so its step time is no measure of any kernel"
    )
    names = [str(column.header) for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _costs(curve: Any) -> list[str]:
    """ms/step, tokens/s, peak MiB; "-" where the run does not say."""
    if curve is None:
        return ["-"] * len(COSTS)
    plain = curve.time[5:][~curve.probed[5:]]
    seconds = float(np.median(plain if len(plain) else curve.time))
    tokens, peak = (x[np.isfinite(x)].max(initial=0.0) for x in (curve.tokens, curve.peak_mib))
    return [f"{1e3 * seconds:.3g}", *(f"{x:,.0f}" if x else "-" for x in (tokens / seconds, peak))]


def _tail(curve: Any) -> int:
    return max(1, len(curve.step) // 4)


def _gap(curve: Any, base: Any) -> str:
    """Paired difference over the base's last quarter of steps."""
    if curve is None or base is None:
        return "-"
    _, mine, theirs = np.intersect1d(curve.step, base.step[-_tail(base) :], return_indices=True)
    if not len(mine):
        return "-"
    difference = curve.loss[mine] - base.loss[-_tail(base) :][theirs]
    return f"{difference.mean():+.4f} ± {difference.std() / max(1, len(difference) - 1) ** 0.5:.4f}"


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:.1e}" if 0 < abs(x) < 1e-2 else f"{x:.3g}"
