"""Tables that put the published figure beside ours, and the JSON record of a run. Shared by the examples."""

import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dm_plugin


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print aligned columns; floats as 3 significant digits."""
    cells = [[str(h) for h in head], *([cell(x) for x in row] for row in rows)]
    widths = [max(len(r[i]) for r in cells) for i in range(len(head))]
    if title:
        print(f"\n{title}")
    for i, row in enumerate(cells):
        print("  ".join(c.ljust(w) if j == 0 else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))))
        if i == 0:
            print("  ".join("-" * w for w in widths))


def cell(x: Any) -> str:
    if isinstance(x, float):
        return "-" if math.isnan(x) else f"{x:.3g}" if x == 0 or 1e-3 <= abs(x) < 1e4 else f"{x:.2e}"
    return "-" if x is None else str(x)


def verdict(ours: float, published: float | None, tolerance: float) -> str:
    """`ok` within the tolerance (relative), else by how much it is off."""
    if published is None:
        return "-"
    off = ours / published - 1
    return "ok" if abs(off) <= tolerance else f"off {off:+.0%}"


class Progress:
    """One line with the share done and the time left, on a terminal only."""

    def __init__(self, total: int, word: str) -> None:
        self.total, self.word, self.done, self.began = total, word, 0, time.monotonic()

    def step(self, note: str = "") -> None:
        self.done += 1
        if sys.stderr.isatty():
            left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
            end = "\n" if self.done == self.total else ""
            print(
                f"\r{self.word} {self.done}/{self.total}, {left:.0f} s left {note:40}",
                end=end,
                file=sys.stderr,
                flush=True,
            )


def save(path: str | None, what: str, body: dict[str, Any], backend: str = "CPU simulation (reference)") -> None:
    """Write a result with what is needed to run it again."""
    if path is None:
        return
    record = {
        "what": what,
        "command": " ".join(["python", *sys.argv]),
        "backend": backend,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine(),
        "versions": {
            "dm_plugin": dm_plugin.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        **body,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwrote {path}")
