"""Where a review's data lie: arms, their dumps and their training curves.

An argument may be one dump file, a folder of iter_*/rank_*.safetensors, an arm folder (arm.json, train.jsonl, dumps/),
or a run folder whose children are arms. Nothing here opens a dump.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dm_plugin.dump import DumpError, DumpFile, ForeignDump, find_dumps, parse_name


@dataclass(frozen=True)
class Curve:
    """train.jsonl as arrays over steps; NaN where a line lacks the value."""

    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    grad_norm: NDArray[np.float64]
    time: NDArray[np.float64]
    tokens: NDArray[np.float64]
    peak_mib: NDArray[np.float64]
    probed: NDArray[np.bool_]


@dataclass(frozen=True)
class Arm:
    """One thing under comparison: a name, its dump files and, if it has one, its training curve."""

    name: str
    path: Path
    files: list[DumpFile]
    curve: Curve | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return str(self.about.get("label") or self.name)


def discover(paths: Sequence[Path], problems: list[DumpError]) -> list[Arm]:
    """Arms of all arguments, names made unique. Unreadable side files go to `problems`; no dump at all is a DumpError."""
    arms = [arm for path in paths for arm in _arms(path, problems)]
    if len({arm.name for arm in arms}) < len(arms):
        arms = [
            Arm(_long_name(arm), arm.path, arm.files, arm.curve, arm.about | {"label": _long_name(arm)}) for arm in arms
        ]
    return arms


def _long_name(arm: Arm) -> str:
    folder = arm.path.parent if arm.path.name == "dumps" else arm.path
    return f"{folder.parent.name}/{folder.name}"


def _arms(path: Path, problems: list[DumpError]) -> list[Arm]:
    if path.is_file():
        return [Arm(path.stem, path, [dump_file(path)])]
    if not path.is_dir():
        raise DumpError(f"{path} does not exist; give a dump file, a dumps folder, an arm folder or a run folder")
    if is_arm(path):
        return [_arm(path, problems)]
    files = find_dumps(path)
    if files:
        home = path.parent if path.name == "dumps" and is_arm(path.parent) else path
        about = _about(home, problems)
        return [Arm(str(about.get("name") or home.name), path, files, _curve(home, problems), about)]
    children = [_arm(child, problems) for child in sorted(path.iterdir()) if child.is_dir() and is_arm(child)]
    if not children:
        raise DumpError(
            f"{path} holds no dumps; expected iter_*/rank_*.safetensors, or arm folders with dumps/ and train.jsonl"
        )
    return sorted(children, key=lambda arm: (arm.about.get("order", 0), 0))


def is_arm(path: Path) -> bool:
    return any((path / name).exists() for name in ("arm.json", "dumps", "train.jsonl"))


def _arm(path: Path, problems: list[DumpError]) -> Arm:
    about = _about(path, problems)
    dumps = path / "dumps"
    files = find_dumps(dumps) if dumps.is_dir() else find_dumps(path)
    return Arm(str(about.get("name") or path.name), path, files, _curve(path, problems), about)


def dump_file(path: Path) -> DumpFile:
    """Step and rank of one file from its path; a file under another name counts as step 0, rank 0."""
    if path.suffix != ".safetensors":
        raise ForeignDump(f"{path} is no dump; expected a rank_*.safetensors file")
    step, rank, _ = parse_name(path.absolute()) or (0, 0, 0)
    return DumpFile(step, rank, path)


def _about(path: Path, problems: list[DumpError]) -> dict[str, Any]:
    file = path / "arm.json"
    if not file.exists():
        return {}
    try:
        about = json.loads(file.read_text())
        if not isinstance(about, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        problems.append(DumpError(f"{file} cannot be used ({error}); the folder name stands in for the arm's name"))
        return {}
    return about


def _curve(path: Path, problems: list[DumpError]) -> Curve | None:
    """The training curve; a step logged twice (a resumed run) counts once, last value wins; a cut last line is normal."""
    file = path / "train.jsonl"
    if not file.exists():
        return None
    rows: dict[int, tuple[float, ...]] = {}
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError as error:
        problems.append(DumpError(f"{file} cannot be read ({error.strerror}); the loss curve of this arm is left out"))
        return None
    bad = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            rows[int(entry["step"])] = tuple(_number(entry.get(k)) for k in _COLUMNS)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the last line of a killed run may be cut
                bad.append(number)
    if bad:
        problems.append(
            DumpError(
                f"{file}: {len(bad)} lines are not {{step, loss, ...}} records (first: line {bad[0]}); they are left out"
            )
        )
    if not rows:
        return None
    steps = sorted(rows)
    table = np.array([rows[s] for s in steps], np.float64)
    *numbers, probed = table.T
    return Curve(np.array(steps, np.int64), *numbers, probed == 1)  # type: ignore[call-arg]


_COLUMNS = ("loss", "grad_norm", "time", "tokens", "peak_mib", "probed")


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
