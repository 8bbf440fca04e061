"""Probe dumps: one safetensors file a rank and step, written so that a file under its final name is always whole.

    <out>/iter_0000100/rank_00003.safetensors        keys {site}/{probe}.{field}, metadata dm_plugin.*

Writing goes to a temporary file in the same folder, is synced, and then linked to its name; an existing dump is never replaced: the same
step written again (a restart) becomes rank_00003.1, .2, ..., and readers take the highest. Numpy only. See docs/dump-format.md.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as build_safetensors

log = logging.getLogger("dm_plugin")
SCHEMA = "1"
_FILE = re.compile(r"rank_(\d+)(?:\.(\d+))?\.safetensors")
_STEP = re.compile(r"iter_(\d+)")


class DumpError(ValueError):
    """A dump cannot be read."""


class TruncatedDump(DumpError):
    """The file ends early."""


class ForeignDump(DumpError):
    """The file is not a dump of this project."""


class NewerSchema(DumpError):
    """The file was written by a newer version."""


class DumpFile(NamedTuple):
    """Where one rank's record of one step lies."""

    step: int
    rank: int
    path: Path


def rule(name: str) -> str:
    """How values of a field combine over microbatches, ranks and steps: "max", "last" or "add"."""
    if name.rpartition(".")[2] in ("max", "amax"):
        return "max"
    return "last" if name.startswith("gain_share.") else "add"


def write_step(
    out: Path | str, step: int, rank: int, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> Path:
    """Write one file atomically and return its path.

    Arrays of any layout, views and 0-d included. Raises OSError when the file system refuses, ValueError for a dtype that numpy cannot
    store; in both cases nothing is left under a final name.
    """
    folder = Path(out) / f"iter_{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {key: np.array(x, order="C") for key, x in tensors.items()}
    head = {"format": "pt", "dm_plugin.schema": SCHEMA, "dm_plugin.step": str(step), "dm_plugin.rank": str(rank)}
    blob = build_safetensors(arrays, metadata={**head, **metadata})
    temporary = folder / f".rank_{rank:05d}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        target = _publish(temporary, folder, f"rank_{rank:05d}")
        _sync_folder(folder)
        return target
    finally:
        # The folder may be gone by now. What was published is whole all the same, and what failed keeps its own error.
        with contextlib.suppress(OSError):
            temporary.unlink()


def _publish(temporary: Path, folder: Path, stem: str) -> Path:
    """Give the file the first free name; link fails if the name is taken, so no dump is ever replaced."""
    attempt = 0
    while True:
        target = folder / (f"{stem}.safetensors" if attempt == 0 else f"{stem}.{attempt}.safetensors")
        try:
            os.link(temporary, target)
            return target
        except FileExistsError:
            attempt += 1
        except OSError:  # a file system without hard links
            if not target.exists():
                os.rename(temporary, target)
                return target
            attempt += 1


def _sync_folder(folder: Path) -> None:
    """Make the new name itself last through a power cut, where the file system can."""
    try:
        place = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(place)
    except OSError:
        pass
    finally:
        os.close(place)


def find_dumps(out: Path | str) -> list[DumpFile]:
    """The dumps below a folder in order of step and rank, the newest attempt of each."""
    best: dict[tuple[int, int], tuple[int, Path]] = {}
    for path in Path(out).glob("iter_*/rank_*.safetensors"):
        name = parse_name(path)
        if name is not None and name[2] >= best.get(name[:2], (-1, path))[0]:
            best[name[:2]] = name[2], path
    return [DumpFile(step, rank, path) for (step, rank), (_, path) in sorted(best.items())]


def parse_name(path: Path) -> tuple[int, int, int] | None:
    """(step, rank, attempt) of .../iter_0000100/rank_00003[.1].safetensors, None for another name."""
    step, file = _STEP.fullmatch(path.parent.name), _FILE.fullmatch(path.name)
    return (int(step[1]), int(file[1]), int(file[2] or 0)) if step and file else None


def read_file(path: Path | str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """(metadata, arrays) of one dump, checked whole before anything is returned. Raises DumpError kinds that name the file."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DumpError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    if len(raw) < 8:
        raise TruncatedDump(f"{path} is truncated: {len(raw)} bytes, not even a header length; delete it")
    length = int.from_bytes(raw[:8], "little")
    if length > 100 << 20:
        raise ForeignDump(f"{path} is no safetensors file: its header claims {length} bytes; point at a dm_plugin dump")
    if 8 + length > len(raw):
        raise TruncatedDump(f"{path} is truncated: header of {length} bytes, file of {len(raw)}; delete it")
    try:
        header = json.loads(raw[8 : 8 + length])
        metadata = dict(header.pop("__metadata__", {}))
        size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ForeignDump(
            f"{path} is no safetensors file: its header does not parse; point at a dm_plugin dump"
        ) from error
    check_metadata(path, metadata)
    if len(raw) - 8 - length < size:
        raise TruncatedDump(f"{path} is truncated: {len(raw) - 8 - length} bytes of data, {size} expected; delete it")
    try:
        return metadata, parse_safetensors(raw)
    except Exception as error:
        raise ForeignDump(f"{path} is corrupt ({error}); delete it") from error


def check_metadata(path: Path | str, metadata: Mapping[str, str]) -> None:
    """Raise ForeignDump or NewerSchema unless the metadata is of a schema that this version reads."""
    schema = metadata.get("dm_plugin.schema")
    if schema is None:
        raise ForeignDump(f"{path} has no dm_plugin.schema in its metadata; it is not a dm_plugin dump")
    major = str(schema).split(".")[0]
    if not major.isdigit():
        raise ForeignDump(f"{path} has schema {schema!r}; it is not a dm_plugin dump")
    if int(major) > int(SCHEMA):
        raise NewerSchema(f"{path} has schema {schema}, this version reads {SCHEMA}; update dm_plugin")


class DumpWriter:
    """Writes dumps off the training thread. `submit` never blocks and never raises.

    When the queue is full, or the file system refuses, the record is lost: it is counted, one warning a cause is logged, and the next
    dump that succeeds carries the count in dm_plugin.lost. A job that ends without close() waits at exit for what is queued.
    """

    def __init__(self, out: Path | str, rank: int = 0, depth: int = 4) -> None:
        self.out, self.rank = Path(out), rank
        self.written = 0
        self.lost_total = 0
        self._lost = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(depth)
        self._thread: threading.Thread | None = None

    def submit(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, str],
        late: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ) -> bool:
        """Queue one record; False when the queue is full and the record is lost. late: more tensors, made on the writer thread."""
        return self.call(lambda: self._write(step, tensors, metadata, late), record=True)

    @property
    def queued(self) -> int:
        """Jobs that wait for the writer thread."""
        return self._queue.qsize()

    def call(self, work: Callable[[], None], record: bool = False) -> bool:
        """Run a small job on the writer thread, in order with the dumps."""
        if self._thread is None or not self._thread.is_alive():  # also after a fork
            self._thread = threading.Thread(target=self._run, name="dm_plugin-dump", daemon=True)
            self._thread.start()
            atexit.unregister(self.close)
            atexit.register(self.close)
        try:
            self._queue.put_nowait(work)
            return True
        except queue.Full:
            if record:
                self.lose(
                    "queue",
                    f"dumps are written too slowly to {self.out}: a probe record was dropped; lower the frequency",
                )
            return False

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Wait until everything queued so far is written."""
        done = threading.Event()
        if self._thread is None:
            return True
        try:
            self._queue.put(done.set, timeout=timeout)
        except queue.Full:
            return False
        return done.wait(timeout)

    def close(self, timeout: float | None = 30.0) -> None:
        """Write what is queued and end the thread."""
        atexit.unregister(self.close)
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():  # the thread of the parent process, after a fork
            return
        try:
            self._queue.put(None, timeout=timeout)
            thread.join(timeout)
        except queue.Full:
            log.warning("the dump writer did not finish within %s s; records in its queue are lost", timeout)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # nothing that a probe does may end a training job
                self._warn(f"job:{type(error).__name__}", f"a probe job failed ({error}); training goes on")

    def _write(
        self,
        step: int,
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, str],
        late: Callable[[], Mapping[str, np.ndarray]] | None = None,
    ) -> None:
        with self._lock:
            lost = self._lost
        if late is not None:
            try:
                tensors = {**tensors, **late()}
            except Exception as error:  # the record itself is still good
                self._warn(
                    f"late:{type(error).__name__}", f"a replay of step {step} failed ({error}); training goes on"
                )
        try:
            write_step(self.out, step, self.rank, tensors, {**metadata, "dm_plugin.lost": str(lost)})
        except OSError as error:
            name = error.strerror or str(error)
            self.lose(
                f"os:{error.errno}", f"a probe dump could not be written to {self.out} ({name}); training goes on"
            )
        except Exception as error:
            self.lose(
                f"value:{type(error).__name__}",
                f"a probe dump of step {step} could not be built ({error}); training goes on",
            )
        else:
            self.written += 1
            with self._lock:
                self._lost -= lost

    def lose(self, cause: str, text: str) -> None:
        """Count a record that will not be written; `text` is logged once a cause."""
        with self._lock:
            self._lost += 1
            self.lost_total += 1
        self._warn(cause, text)

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning(text)
