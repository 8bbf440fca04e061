"""Keeping dumps: one file a step out of many ranks', fewer steps, and tables for other tools.

merge    the files of a step by the rules of dump.py (sums add, maxima, heads of tensor-parallel ranks side by side) -> rank_00000
prune    keeps every n-th probed step, the first and the last; deletes the rest
export   one row a step and site, one column a measure: CSV, or Parquet where pyarrow is installed
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dm_plugin.dump import DumpError, DumpFile, find_dumps, write_step
from dm_plugin.review.collect import collect
from dm_plugin.review.measure import Measure
from dm_plugin.review.read import Merger, Reader, tensor_rank
from dm_plugin.review.runs import Arm


def merge(files: list[DumpFile], out: Path) -> int:
    """Write one file a step into `out`; returns how many. Raises DumpError for a file that cannot be read, ValueError if out holds dumps."""
    if find_dumps(out):
        raise ValueError(f"{out} already holds dumps; give an empty or new folder")
    steps: dict[int, list[DumpFile]] = {}
    for file in files:
        steps.setdefault(file.step, []).append(file)
    for step, parts in sorted(steps.items()):
        reader, merger = Reader(strict=True), Merger()
        metadata: dict[str, str] = {}
        reasons: dict[str, dict[str, str]] = {}
        backends: set[str] = set()
        for file in parts:
            head, arrays = reader.read(file.path)
            merger.add(step, tensor_rank(head), arrays)
            metadata = metadata or head
            backends |= {b for b in head.get("dm_plugin.backend", "").split(",") if b}
            for site, why in json.loads(head.get("dm_plugin.reasons", "{}")).items():
                reasons.setdefault(site, {}).update(why)
        frame = merger.frame()
        tensors = {
            f"{site}/{name}": value[i]
            for name, value in frame.fields.items()
            for i, site in enumerate(frame.sites)
            if frame.has[name][i]
        }
        kept = {
            key: x
            for key, x in metadata.items()
            if key.startswith("dm_plugin.") and not key.endswith((".schema", ".step", ".rank"))
        }
        kept |= {
            "dm_plugin.world": "{}",
            "dm_plugin.merged": str(len(parts)),
            "dm_plugin.backend": ",".join(sorted(backends)),
        }
        write_step(out, step, 0, tensors, kept | {"dm_plugin.reasons": json.dumps(reasons)})
    return len(steps)


def surplus(out: Path, keep: int) -> list[Path]:
    """The step folders that keeping every `keep`-th probed step, the first and the last would delete. Raises ValueError, DumpError."""
    if keep < 2:
        raise ValueError(f"--keep {keep} keeps everything; give 2 or more")
    steps = sorted({f.step for f in find_dumps(out)})
    if not steps:
        raise DumpError(f"{out} holds no dumps; expected iter_*/rank_*.safetensors")
    gone = [step for i, step in enumerate(steps) if i % keep and step != steps[-1]]
    return [out / f"iter_{step:07d}" for step in gone]


def delete(folders: list[Path]) -> None:
    """Delete step folders, each at once: it is renamed first, so that no reader sees half of one."""
    for folder in folders:
        doomed = folder.with_name(f".{folder.name}.deleted")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def export(arms: list[Arm], measures: list[Measure], path: Path) -> int:
    """Write the table and return its number of rows. Raises ValueError for a format that cannot be written here."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise ValueError(f"{path}: the name must end in .csv or .parquet")
    columns: dict[str, list[Any]] = {"arm": [], "step": [], "site": [], **{m.key: [] for m in measures}}
    for arm in arms:
        data = collect(arm, measures, strict=True)
        for f, step in enumerate(data.first):
            for s, site in enumerate(data.sites):
                values = [float(data.values[m.key][f, s]) for m in measures]
                if all(np.isnan(values)):
                    continue
                for key, x in zip(columns, [arm.name, step, site, *values], strict=True):
                    columns[key].append(x)
    if kind == ".parquet":
        _parquet(columns, path)
    else:
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            for name, step, site, *values in zip(*columns.values(), strict=True):
                writer.writerow([name, step, site, *("" if np.isnan(x) else x for x in values)])
    return len(columns["step"])


def _parquet(columns: dict[str, list[Any]], path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed; pip install pyarrow, or write a .csv"
        ) from None
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
