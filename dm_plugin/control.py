"""Ask a running job to start or stop probing, through one small file that each rank looks at between steps.

    <run>/probe_request.json    {"schema": 1, "id": ..., "action": "start" | "stop", "start_step", "steps", "layers", "probes"}
    <run>/probe_status/rank_00003.json    what each rank made of it

The request is written atomically; a rank spends one stat() a step on it and opens it only when it changed. Ranks agree through the step
numbers in the request, without a collective. A request that does not parse is ignored with one warning: it never stops a job.
"""

import json
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ON_REQUEST, PROBES, are_probes

log = logging.getLogger("dm_plugin")
SCHEMA = 1
REQUEST = "probe_request.json"
STATUS = "probe_status"
_ACTIONS = ("start", "stop")
_MAX_LAYER = 99_999
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Request:
    """Probe steps start_step .. start_step + steps - 1 (open at either end when None), of some layers (global, from 0; None: all)."""

    id: str
    action: str
    start_step: int | None = None
    steps: int | None = None
    layers: frozenset[int] | None = None
    probes: frozenset[str] = frozenset(PROBES)


def parse_layers(text: str | None) -> frozenset[int] | None:
    """ "0-3,7" -> {0, 1, 2, 3, 7}; None or "all" -> None. Raises ValueError naming the part that is wrong."""
    if text is None or text.strip() in ("", "all"):
        return None
    out: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match and first > last:
            raise ValueError(f"layers={text!r}: {part.strip()!r} runs backwards; write it like {last}-{first}")
        if first > last or last > _MAX_LAYER:
            raise ValueError(
                f"layers={text!r}: {part.strip()!r} is neither a layer number nor a range of 0 to {_MAX_LAYER}; write it like 0-3,7"
            )
        out |= set(range(first, last + 1))
    return frozenset(out)


def send(
    run: Path | str,
    action: str,
    *,
    start_step: int | None = None,
    steps: int | None = None,
    layers: str | None = None,
    probes: Iterable[str] | None = None,
) -> Request:
    """Write a request into a run folder, atomically. Raises ValueError for bad values, OSError if the folder refuses."""
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "id": uuid.uuid4().hex[:12],
        "action": action,
        "start_step": start_step,
        "steps": steps,
        "layers": layers,
        "probes": sorted(probes) if probes is not None else None,
    }
    request = parse(body)
    _write_json(Path(run) / REQUEST, body)
    return request


def parse(body: Any) -> Request:
    """Check a request. Raises ValueError naming the key, what came and what is wanted."""
    if not isinstance(body, dict):
        raise ValueError(f"a probe request must be a JSON object, got {type(body).__name__}")
    if body.get("schema") != SCHEMA:
        raise ValueError(
            f"probe request schema={body.get('schema')!r} is not {SCHEMA}; use the dm-plugin of the running job's version"
        )
    if body.get("action") not in _ACTIONS:
        raise ValueError(f"probe request action={body.get('action')!r} must be one of {', '.join(_ACTIONS)}")
    for key, low in (("start_step", 0), ("steps", 1)):
        value = body.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
            raise ValueError(f"probe request {key}={value!r} must be a whole number of at least {low}, or null")
    probes = body.get("probes")
    if probes is not None and not are_probes(probes):
        raise ValueError(
            f"probe request probes={probes!r} must be a list from {', '.join(PROBES + ON_REQUEST)}, or null"
        )
    layers = body.get("layers")
    if layers is not None and not isinstance(layers, str):
        raise ValueError(f"probe request layers={layers!r} must be text like '0-3,7', or null")
    return Request(
        str(body.get("id", "")),
        body["action"],
        body.get("start_step"),
        body.get("steps"),
        parse_layers(layers),
        frozenset(PROBES if probes is None else probes),
    )


class Watcher:
    """The running job's side: `poll(step)` returns the request that covers this step, or None."""

    def __init__(self, run: Path | str, rank: int = 0) -> None:
        self.run, self.rank = Path(run), rank
        self.request: Request | None = None
        self._path = str(self.run / REQUEST)
        self._seen: tuple[int, int, int] | None = None
        self._first_step: int | None = None

    def poll(self, step: int) -> Request | None:
        """One stat(); reads the file only when it changed. Never raises."""
        found: os.stat_result | None = None
        now: tuple[int, int, int] | None = None
        try:
            found = os.stat(self._path)
            now = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            pass
        if now != self._seen:
            self._seen = now
            self._load(step, found)
        return self.request if self.request is not None and self.covers(step) else None

    def covers(self, step: int) -> bool:
        """Does the current request ask for this step?"""
        request = self.request
        if request is None or request.action != "start":
            return False
        first = request.start_step if request.start_step is not None else self._first_step
        return first is not None and first <= step and (request.steps is None or step < first + request.steps)

    def over(self, step: int) -> bool:
        """Has the current request run its course at this step?"""
        request = self.request
        if request is None or request.action != "start" or request.steps is None:
            return False
        first = request.start_step if request.start_step is not None else self._first_step
        return first is not None and step >= first + request.steps

    def _load(self, step: int, found: os.stat_result | None) -> None:
        self.request = None
        if found is None:
            return
        try:
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:  # a pipe would hold the job up
                raise ValueError(f"it is no regular file of at most {_MAX_BYTES} bytes")
            self.request = parse(json.loads(Path(self._path).read_text()))
            self._first_step = step
        except Exception as error:  # whatever somebody wrote there, the job goes on
            log.warning("the probe request %s is ignored: %s", self._path, error)

    def report(self, step: int, state: str, written: int, lost: int, queued: int = 0) -> None:
        """Write this rank's status file (call it off the training thread)."""
        request = self.request.id if self.request is not None else None
        body = {
            "rank": self.rank,
            "step": step,
            "state": state,
            "request": request,
            "queued": queued,
            "written": written,
            "lost": lost,
            "time": time.time(),
        }
        _write_json(self.run / STATUS / f"rank_{self.rank:05d}.json", body)


def status(run: Path | str) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """(the request as written, every rank's last report) of a run folder; unreadable reports are left out."""
    out = []
    for path in sorted((Path(run) / STATUS).glob("rank_*.json")):
        try:
            out.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    try:
        request = json.loads((Path(run) / REQUEST).read_text())
    except (OSError, ValueError):
        request = None
    return request, out


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(body))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
