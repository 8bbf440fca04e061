"""Lazy reading of many dump files: only the wanted fields of each file, summed into frames of one or more steps.

Files of a job repeat one header, so its offsets are parsed once per distinct layout and a file then costs one read
and one gather per field ([sites, n] at once). Memory is one file and one frame, whatever the number of steps.
Merging is dump.py's rule: `max` and `amax` by maximum, `gain_share.*` by last value, everything else by addition;
per-head fields of tensor-parallel ranks are joined along the head axis.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dm_plugin.dump import DumpError, DumpFile, ForeignDump, TruncatedDump, check_metadata, rule

DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
MAX_HEADER = 100 << 20
WHOLE_FILE = 0.5  # read the whole file when more than this share of it is wanted
GAP = 16 << 10  # join wanted ranges that lie closer than this

Fields = dict[str, NDArray]
Want = frozenset[str] | None  # field names such as "row_sum_pre.hist"; None = all


@dataclass(frozen=True)
class Block:
    """One field of many sites with equal dtype and shape: where its values lie in the data section."""

    name: str
    sites: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    index: NDArray[np.int64]  # [S, n] element numbers


@dataclass(frozen=True)
class Layout:
    """Parsed header: blocks of wanted fields, byte ranges to read, size of the data section."""

    blocks: tuple[Block, ...]
    ranges: tuple[tuple[int, int], ...]
    size: int


@dataclass
class Frame:
    """Merged fields of the steps first..last: fields[name] is [S, ...] over `sites`."""

    first: int
    last: int
    sites: list[str]
    fields: Fields
    has: dict[str, NDArray[np.bool_]]  # [S]: the site has this field


@dataclass
class Reader:
    """Reads dump files one after another; remembers layouts, metadata of interest and the files it had to refuse."""

    want: Want = None
    strict: bool = False  # True: raise on the first bad file
    problems: list[DumpError] = field(default_factory=list)
    backends: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)  # probe -> reason -> "n sites"
    model: dict[str, Any] = field(default_factory=dict)
    impl_reason: str = ""
    lost: int = 0
    ranks: set[int] = field(default_factory=set)
    files: int = 0
    bytes: int = 0
    _layouts: dict[str, Layout] = field(default_factory=dict)
    _buffer: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def frames(self, files: Sequence[DumpFile], max_frames: int | None = None) -> Iterator[Frame]:
        """Frames in step order; with max_frames, neighbouring steps are merged so that no more than that come out."""
        steps = sorted({f.step for f in files})
        size = 1 if not max_frames else -(-len(steps) // max_frames)
        place = {step: i // max(size, 1) for i, step in enumerate(steps)}
        current, merger = -1, Merger()
        for file in sorted(files, key=lambda f: (f.step, f.rank)):
            if place[file.step] != current and merger.parts:
                yield merger.frame()
                merger = Merger()
            current = place[file.step]
            self._add(file, merger)
        if merger.parts:
            yield merger.frame()

    def _add(self, file: DumpFile, merger: Merger) -> None:
        try:
            metadata, arrays = self.read(file.path)
            if metadata.get("dm_plugin.step", str(file.step)) != str(file.step):
                raise ForeignDump(
                    f"{file.path} holds step {metadata['dm_plugin.step']} but lies in the folder of step {file.step}; "
                    "move it back or delete it"
                )
        except DumpError as error:
            if self.strict:
                raise
            self.problems.append(error)
            return
        self._note(metadata, file)
        merger.add(file.step, tensor_rank(metadata), arrays)

    def _note(self, metadata: dict[str, str], file: DumpFile) -> None:
        self.files += 1
        self.ranks.add(file.rank)
        backend = metadata.get("dm_plugin.backend", "")
        self.backends[backend] = self.backends.get(backend, 0) + 1
        self.model = self.model or _json(metadata.get("dm_plugin.model"))
        self.impl_reason = self.impl_reason or metadata.get("dm_plugin.impl_reason", "")
        lost = metadata.get("dm_plugin.lost", "0")
        self.lost += int(lost) if lost.isdigit() else 0
        text = metadata.get("dm_plugin.reasons", "{}")
        if text != "{}":
            for site, refused in _json(text).items():
                for probe, reason in refused.items():
                    self.reasons.setdefault(probe, {}).setdefault(str(reason), site)

    def read(self, path: Path) -> tuple[dict[str, str], list[tuple[Block, NDArray]]]:
        """Metadata and wanted blocks of one file, fully checked before anything is returned. Raises DumpError kinds."""
        try:
            with open(path, "rb") as file:
                return self._read(path, file.fileno())
        except OSError as error:
            raise DumpError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error

    def _read(self, path: Path, fd: int) -> tuple[dict[str, str], list[tuple[Block, NDArray]]]:
        size = os.fstat(fd).st_size
        if size < 8:
            raise TruncatedDump(f"{path} is truncated: {size} bytes, not even a header length; delete it")
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > MAX_HEADER:
            raise ForeignDump(
                f"{path} is no safetensors file: its header claims {length} bytes; point at a dm_plugin dump"
            )
        if 8 + length > size:
            raise TruncatedDump(f"{path} is truncated: header of {length} bytes, file of {size}; delete it")
        metadata, rest, parsed = split_header(path, os.pread(fd, length, 8))
        check_metadata(path, metadata)
        layout = self._layouts.get(rest)
        if layout is None:
            if len(self._layouts) >= 32:  # keep memory bounded when every file differs
                self._layouts.clear()
            layout = self._layouts[rest] = make_layout(path, parsed or json.loads("{" + rest), self.want)
        data = size - 8 - length
        if data != layout.size:
            kind, word = (
                (TruncatedDump, "truncated") if data < layout.size else (ForeignDump, "longer than its header says")
            )
            raise kind(f"{path} is {word}: {data} bytes of data, {layout.size} expected; delete it")
        return metadata, self._gather(path, fd, 8 + length, layout)

    def _gather(self, path: Path, fd: int, start: int, layout: Layout) -> list[tuple[Block, NDArray]]:
        if self._buffer.size < layout.size:
            self._buffer = np.empty((layout.size + 7) // 8 * 8, np.uint8)
        for begin, end in layout.ranges:
            got = os.preadv(fd, [memoryview(self._buffer)[begin:end]], start + begin)
            self.bytes += got
            if got != end - begin:
                raise TruncatedDump(f"{path} is truncated: it shrank while it was read; delete it")
        out = []
        for block in layout.blocks:
            width = np.dtype(DTYPES[block.dtype]).itemsize
            view = self._buffer[: self._buffer.size // width * width].view(DTYPES[block.dtype])
            out.append((block, view.take(block.index).reshape(len(block.sites), *block.shape)))
        return out


def split_header(path: Path, raw: bytes) -> tuple[dict[str, str], str, dict[str, Any] | None]:
    """(metadata, rest of the header text, parsed rest or None): the rest is the same text in every file of a job."""
    head = '{"__metadata__":'
    try:
        text = raw.decode()
        if text.startswith(head):
            metadata, end = json.JSONDecoder().raw_decode(text, len(head))
            return dict(metadata), text[end:].lstrip(" ,"), None
        whole = json.loads(text)
        metadata = dict(whole.pop("__metadata__", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise ForeignDump(
            f"{path} is no safetensors file: its header is not JSON; point at a dm_plugin dump"
        ) from error
    return metadata, json.dumps(whole), whole


def make_layout(path: Path, header: dict[str, Any], want: Want) -> Layout:
    """Check every entry of a header and lay out the wanted fields; ForeignDump names the first entry that is wrong."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, int]]] = {}
    ranges, size = [], 0
    for key, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            width = np.dtype(DTYPES[dtype]).itemsize
        except (KeyError, TypeError, ValueError) as error:
            raise ForeignDump(
                f"{path}: entry {key!r} has no known dtype, shape and offsets; not a dm_plugin dump"
            ) from error
        count = int(np.prod(shape, dtype=np.int64))
        if end - begin != count * width or begin < 0:
            raise ForeignDump(
                f"{path}: entry {key!r} has {end - begin} bytes for shape {shape} of {dtype}; file is corrupt"
            )
        size = max(size, end)
        site, _, name = key.rpartition("/")
        if not site or begin % width or (want is not None and name not in want):
            continue
        groups.setdefault((name, dtype, shape), []).append((site, begin // width))
        ranges.append((begin, end))
    blocks = []
    for (name, dtype, shape), places in groups.items():
        first = np.array([place for _, place in places], np.int64)
        index = first[:, None] + np.arange(int(np.prod(shape, dtype=np.int64)))
        blocks.append(Block(name, tuple(site for site, _ in places), dtype, shape, index))
    return Layout(tuple(blocks), _join(sorted(ranges), size), size)


def _join(ranges: list[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for begin, end in ranges:
        if out and begin - out[-1][1] <= GAP:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return ((0, size),) if sum(e - b for b, e in out) > WHOLE_FILE * size else tuple(out)


class Merger:
    """Adds files up until a frame is asked for."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int, tuple[str, ...], tuple[int, ...]], NDArray] = {}
        self.first, self.last = -1, -1

    def add(self, step: int, tp: int, arrays: list[tuple[Block, NDArray]]) -> None:
        self.first, self.last = (step if self.first < 0 else self.first), step
        for block, value in arrays:
            key = (block.name, tp, block.sites, block.shape)
            old = self.parts.get(key)
            self.parts[key] = value if old is None else combine(rule(block.name), old, value)
        if not arrays:
            self.parts.setdefault(("", tp, (), ()), np.empty(0))

    def frame(self) -> Frame:
        sites = sorted({s for _, _, names, _ in self.parts for s in names}, key=site_order)
        number = {site: i for i, site in enumerate(sites)}
        fields: Fields = {}
        has: dict[str, NDArray[np.bool_]] = {}
        ranks: dict[str, dict[int, Fields]] = {}
        for (name, tp, names, shape), value in self.parts.items():
            if not name:
                continue
            where = np.array([number[s] for s in names])
            slot = ranks.setdefault(name, {}).setdefault(tp, {})
            _scatter(slot, (len(sites), *shape), rule(name), where, value)
            has.setdefault(name, np.zeros(len(sites), bool))[where] = True
        for name, by_rank in ranks.items():
            fields[name] = _join_ranks(name, [by_rank[tp]["x"] for tp in sorted(by_rank)])
        return Frame(self.first, self.last, sites, fields, has)


def combine(how: str, old: NDArray, new: NDArray) -> NDArray:
    if how == "add":
        return np.add(old, new, out=old)
    return np.fmax(old, new) if how == "max" else new


def _scatter(slot: Fields, shape: tuple[int, ...], how: str, where: NDArray, value: NDArray) -> None:
    """Put the rows of some sites into a [S, ...] array; shorter sites are padded (0, or NaN for maxima)."""
    fill = np.nan if how == "max" else 0
    old = slot.get("x")
    if old is None:
        old = np.full(shape, fill, np.float64 if how == "max" else value.dtype)
    want = (
        (shape[0], *(max(a, b) for a, b in zip(old.shape[1:], shape[1:], strict=False)))
        if old.ndim == len(shape)
        else shape
    )
    if old.shape != want:
        old = np.pad(old, [(0, w - o) for w, o in zip(want, old.shape, strict=True)], constant_values=fill)
    if value.shape[1:] != want[1:]:
        pad = [(0, 0), *((0, w - o) for w, o in zip(want[1:], value.shape[1:], strict=True))]
        value = np.pad(value.astype(old.dtype), pad, constant_values=fill)
    old[where] = combine(how, old[where], value)
    slot["x"] = old


def _join_ranks(name: str, parts: list[NDArray]) -> NDArray:
    if len(parts) == 1:
        return parts[0]
    how, field_name = rule(name), name.rpartition(".")[2]
    heads = parts[0].ndim > 1 and not field_name.startswith("hist") and how != "last"
    if heads:
        return np.concatenate(parts, axis=1)
    total = parts[0].copy()
    for part in parts[1:]:
        total = combine(how, total, part)
    return total


def tensor_rank(metadata: dict[str, str]) -> int:
    """Tensor-parallel coordinate of a file: its heads are a slice of the layer's heads. 0 when not stated."""
    world = _json(metadata.get("dm_plugin.world"))
    tp = world.get("tp_rank", world.get("tp"))
    if isinstance(tp, dict):
        tp = tp.get("rank", 0)
    elif "tp_rank" not in world:
        tp = tp[0] if isinstance(tp, list) and tp else 0
    return int(tp or 0)


def site_order(site: str) -> tuple[Any, ...]:
    """Natural order: numbers inside a name compare as numbers, decoder layers before others of the same prefix."""
    parts = site.split(".")
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts)


def _json(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


Progress = Callable[[int, int], None]
