"""A/B: run the arms of a comparison as commands, watch their progress, then print one table and write one page.

An arm is any training command that writes {arm}/train.jsonl (one JSON object a step: step, loss, ...) and, if it is probed, dumps under
{arm}/dumps. In the YAML, {python}, {here} (the YAML's folder), {arm}, {steps} and {text} are filled in; --text FILE and --resume are added when asked for:

    out: runs/tiny
    steps: 160
    parallel: 2
    probe: {after_step: 20}                      # asked of each running arm through its control file
    command: ["{python}", "{here}/../megatron_tiny.py", "--out", "{arm}", "--steps", "{steps}"]
    arms:
      matched: {label: ..., description: ..., args: ["--attention", "matched"]}

Neither torch nor Megatron is imported here: arms live in their own processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from . import control
from .config import PROBES

_TOP = {"out", "steps", "parallel", "probe", "command", "arms", "text", "title", "env"}
_ARM = {"label", "description", "args", "command", "env"}
_PROBE = {"after_step", "steps", "layers", "probes"}


@dataclass
class Arm:
    """One command and where it writes."""

    name: str
    folder: Path
    command: list[str]
    about: dict[str, Any]
    env: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    asked: bool = False
    began: float = 0.0
    code: int | None = None
    last: dict[str, Any] = field(default_factory=dict)
    _offset: int = 0

    @property
    def done(self) -> int:
        return int(self.last.get("step", -1)) + 1

    def poll(self) -> None:
        """Read new lines of train.jsonl and the exit code."""
        path = self.folder / "train.jsonl"
        if path.exists():
            if path.stat().st_size < self._offset:  # a resumed arm dropped the lines of steps that it runs again
                self._offset, self.last = 0, {}
            with open(path, "rb") as file:
                file.seek(self._offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                try:
                    self.last = json.loads(line)
                except ValueError:
                    continue
        if self.process is not None and self.code is None:
            self.code = self.process.poll()


@dataclass(frozen=True)
class Plan:
    """A checked config."""

    out: Path
    title: str
    steps: int
    parallel: int
    probe: dict[str, Any] | None
    arms: list[Arm]


def load(
    path: Path | str,
    out: Path | None = None,
    text: Path | None = None,
    only: Sequence[str] | None = None,
    resume: bool = False,
) -> Plan:
    """Read and check a config. Raises ValueError naming the file and key, OSError if it cannot be read."""
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("arms"), dict) or not tree["arms"]:
        raise ValueError(f"{path}: arms must be a mapping of arm names to {{label, description, args}}")
    _known(tree, _TOP, str(path))
    steps = tree.get("steps", 100)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{path}: steps={steps!r} must be a whole number of training steps, 1 or more")
    parallel = tree.get("parallel", 1)
    if not isinstance(parallel, int) or parallel < 1:
        raise ValueError(f"{path}: parallel={parallel!r} must be a whole number of arms to run at once, 1 or more")
    probe = tree.get("probe")
    if probe is not None:
        if not isinstance(probe, dict):
            raise ValueError(f"{path}: probe={probe!r} must be a mapping such as {{after_step: 20}}")
        _known(probe, _PROBE, f"{path}: probe")
        control.parse({"schema": 1, "action": "start", **{k: probe.get(k) for k in ("steps", "layers", "probes")}})
    folder = Path(out) if out is not None else Path(tree.get("out", f"runs/{path.stem}"))
    missing = sorted(set(only or ()) - set(tree["arms"]))
    if missing:
        raise ValueError(f"{path} has no arm {missing[0]!r}; its arms are {', '.join(tree['arms'])}")
    words = {
        "python": sys.executable,
        "here": str(path.resolve().parent),
        "steps": str(steps),
        "text": str(text or tree.get("text") or ""),
    }
    arms = []
    for order, (name, body) in enumerate(tree["arms"].items()):
        label = f"{path}: arm {name}"
        if not isinstance(body, dict):
            raise ValueError(f"{label} is {body!r}; it must be a mapping with {', '.join(sorted(_ARM))}")
        _known(body, _ARM, label)
        base = list(body.get("command") or tree.get("command") or [])
        command = base + list(body.get("args") or [])
        if not base or not all(isinstance(x, (str, int, float)) for x in command):
            raise ValueError(f"{label} has no command; give `command` at the top or in the arm, a list of words")
        if only and name not in only:
            continue
        here = {**words, "arm": str(folder / name)}
        filled = [_fill(str(x), here, label) for x in command]
        if words["text"]:
            filled += ["--text", words["text"]]
        if resume:
            filled.append("--resume")
        about = {
            "name": name,
            "label": body.get("label", name),
            "description": body.get("description", ""),
            "steps": steps,
            "order": order,
        }
        env = {str(k): str(v) for k, v in {**(tree.get("env") or {}), **(body.get("env") or {})}.items()}
        arms.append(Arm(name, folder / name, filled, about, env))
    return Plan(folder, str(tree.get("title", f"A/B {path.stem}")), steps, parallel, probe, arms)


def run(
    config: Path | str,
    out: Path | None = None,
    text: Path | None = None,
    only: Sequence[str] | None = None,
    resume: bool = False,
) -> int:
    """Run all arms, print the table, write <out>/page.html. Exit code: 0, 1 if an arm failed, 130 when interrupted.

    Raises ValueError for a bad config or an <out> that already holds a run (without `resume`).
    """
    if text is not None and not Path(text).is_file():
        raise ValueError(f"text {text} is not a file; give a file to train on")
    plan = load(config, out, text, only, resume)
    for arm in plan.arms:
        if not resume and (arm.folder / "train.jsonl").exists():
            raise ValueError(f"{arm.folder} already holds a run; pass --resume to go on, or -o for another folder")
    # a terminate request (a batch system, a closed terminal) ends the run as Ctrl-C does
    before = [(s, signal.signal(s, signal.default_int_handler)) for s in (signal.SIGTERM, signal.SIGHUP)]
    try:
        interrupted = _execute(plan)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    failed = [arm for arm in plan.arms if arm.code not in (0, None) and not interrupted]
    for arm in failed:
        tail = (arm.folder / "log.txt").read_text(errors="replace").splitlines()[-8:]
        print(
            f"arm {arm.name} failed (exit code {arm.code}); the end of {arm.folder / 'log.txt'}:\n  "
            + "\n  ".join(tail),
            file=sys.stderr,
        )
    if interrupted:
        print(f"interrupted; dumps and checkpoints in {plan.out} are whole, and --resume goes on", file=sys.stderr)
    _summarise(plan)
    return 130 if interrupted else 1 if failed else 0


def _execute(plan: Plan) -> bool:
    """Run the arms, `parallel` at a time; True when interrupted by the user."""
    from .ab_progress import progress

    waiting = list(plan.arms)
    running: list[Arm] = []
    with progress(plan.arms, plan.steps) as show:
        try:
            while waiting or running:
                while waiting and len(running) < plan.parallel:
                    arm = waiting.pop(0)
                    _start(arm)
                    running.append(arm)
                time.sleep(0.2)
                for arm in running:
                    arm.poll()
                    if plan.probe is not None and not arm.asked and arm.done >= plan.probe.get("after_step", 0):
                        _ask(arm, plan.probe)
                show(plan.arms)
                running = [arm for arm in running if arm.code is None]
        except KeyboardInterrupt:
            _stop(running)
            return True
        show(plan.arms)
    return False


def _stop(running: Sequence[Arm]) -> None:
    """Ask the arms to save and leave, and wait for them; a second Ctrl-C ends them at once."""
    processes = [arm.process for arm in running if arm.process is not None]
    for process in processes:
        process.send_signal(signal.SIGINT)
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
            process.wait()
    for arm in running:
        arm.poll()


def _start(arm: Arm) -> None:
    arm.folder.mkdir(parents=True, exist_ok=True)
    (arm.folder / "arm.json").write_text(json.dumps(arm.about, indent=1))
    env = {**os.environ, **arm.env}
    with open(arm.folder / "log.txt", "ab") as log:
        # its own process group: Ctrl-C reaches it through us, once
        arm.process = subprocess.Popen(
            arm.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
    arm.began = time.monotonic()


def _ask(arm: Arm, probe: dict[str, Any]) -> None:
    control.send(
        arm.folder,
        "start",
        steps=probe.get("steps"),
        layers=probe.get("layers"),
        probes=probe.get("probes") or list(PROBES),
    )
    arm.asked = True


def _summarise(plan: Plan) -> None:
    """The table and the page from what lies on disk."""
    from .ab_progress import print_table
    from .review.report import build_payload, render, write_page
    from .review.runs import discover

    problems: list[Any] = []
    arms = discover([arm.folder for arm in plan.arms if (arm.folder / "train.jsonl").exists()], problems)
    if not arms:
        return
    payload = build_payload(arms, problems, title=plan.title)
    page = plan.out / "page.html"
    write_page(page, render(payload))
    rows = print_table(payload, arms)
    (plan.out / "table.json").write_text(json.dumps({"title": plan.title, "arms": rows}, indent=1) + "\n")
    print(f"\npage: {page}")
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)


def _fill(text: str, words: dict[str, str], label: str) -> str:
    for key, value in words.items():
        text = text.replace("{" + key + "}", value)
    if "{" in text and "}" in text:
        raise ValueError(
            f"{label}: {text!r} has a placeholder that is not known; known are {', '.join('{' + k + '}' for k in words)}"
        )
    return text


def _known(body: dict[str, Any], keys: set[str], label: str) -> None:
    unknown = sorted(str(k) for k in set(body) - keys)
    if unknown:
        raise ValueError(f"{label}: unknown key {unknown[0]!r}; known keys are {', '.join(sorted(keys))}")
