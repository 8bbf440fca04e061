"""One pass over an arm's dumps: every measure by step and site, and merged fields of the first and the latest steps.

    values[key][f, s] = measure of frame f (one probed step, or a few neighbours merged) at site s
    recent            = fields merged over the last quarter of the frames, early = over the first quarter
Memory is one file, one frame and three merged field sets, whatever the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dm_plugin.review.measure import MEASURES, Array, Fields, Measure, form, hist_quantile, needed_fields
from dm_plugin.review.read import Block, Frame, Merger, Reader, site_order
from dm_plugin.review.runs import Arm

EXTRA_FIELDS = frozenset({"row_sum_pre.hist_top_p", "row_sum_post.hist_top_p"})
TOP_P_FRAMES = 60  # points of the bucket curves
QUARTER = 0.25


@dataclass
class Collected:
    """Everything a review of one arm needs; arrays have sites in `sites` order."""

    arm: Arm
    reader: Reader
    first: list[int] = field(default_factory=list)  # [F] first and last step of each frame
    last: list[int] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)  # [F, S]
    top_p_frames: list[int] = field(default_factory=list)  # frame numbers with bucket medians
    top_p: dict[str, Array] = field(default_factory=dict)  # "row_sum_pre" -> [F', S, 5]
    recent: Frame | None = None
    early: Frame | None = None

    @property
    def backend(self) -> str:
        return ", ".join(sorted(b for b in self.reader.backends if b)) or str(self.arm.about.get("backend", ""))


def collect(
    arm: Arm,
    measures: list[Measure] | None = None,
    *,
    max_frames: int | None = None,
    buckets: bool = False,
    steps: Callable[[int], bool] | None = None,
    strict: bool = False,
    tick: Callable[[], None] | None = None,
) -> Collected:
    """Read an arm once. `buckets` adds the top-probability histograms; `steps` chooses steps; `tick` is called per frame.

    Raises DumpError kinds with strict=True; otherwise refused files are in `reader.problems`.
    """
    measures = list(MEASURES.values()) if measures is None else measures
    files = [f for f in arm.files if steps is None or steps(f.step)]
    reader = Reader(needed_fields(measures) | (EXTRA_FIELDS if buckets else frozenset()), strict)
    out = Collected(arm, reader)
    count = len({f.step for f in files})
    frames = count if not max_frames else -(-count // -(-count // max_frames)) if count else 0
    quarter = max(1, int(frames * QUARTER))
    early, recent = Merger(), Merger()
    rows: dict[str, list[tuple[list[str], Array]]] = {m.key: [] for m in measures}
    bucket_rows: dict[str, list[tuple[list[str], Array]]] = {}
    stride = max(1, -(-frames // TOP_P_FRAMES))
    for number, frame in enumerate(reader.frames(files, max_frames)):
        out.first.append(frame.first)
        out.last.append(frame.last)
        for m in measures:
            rows[m.key].append((frame.sites, form(m, frame.fields, len(frame.sites))))
        if buckets and number % stride == 0:
            out.top_p_frames.append(number)
            for name, medians in top_p_medians(frame.fields, len(frame.sites)).items():
                bucket_rows.setdefault(name, []).append((frame.sites, medians))
        if number < quarter:
            add_frame(early, frame)
        if number >= frames - quarter:
            add_frame(recent, frame)
        if tick:
            tick()
    out.sites = sorted({s for sites, _ in next(iter(rows.values()), []) for s in sites}, key=site_order)
    out.values = {key: spread(parts, out.sites) for key, parts in rows.items()}
    out.top_p = {name: spread(parts, out.sites) for name, parts in bucket_rows.items()}
    out.early, out.recent = early.frame() if early.parts else None, recent.frame() if recent.parts else None
    return out


def top_p_medians(fields: Fields, sites: int) -> dict[str, Array]:
    """Median row ratio per top-probability bucket: probe -> [S, 5], NaN where a bucket holds no rows."""
    out = {}
    for probe in ("row_sum_pre", "row_sum_post"):
        hist = fields.get(f"{probe}.hist_top_p")
        out[probe] = np.full((sites, 5), np.nan) if hist is None else hist_quantile(hist, 0.5)
    return out


def add_frame(merger: Merger, frame: Frame) -> None:
    """Add a frame's fields to a merger, only for the sites that have them."""
    blocks: list[tuple[Block, NDArray]] = []
    for name, value in frame.fields.items():
        has = frame.has[name]
        sites = tuple(s for s, there in zip(frame.sites, has, strict=True) if there)
        kept = value[has]
        blocks.append((Block(name, sites, str(value.dtype), value.shape[1:], np.empty(0, np.int64)), kept))
    merger.add(frame.last, 0, blocks)


def spread(parts: list[tuple[list[str], Array]], sites: list[str]) -> Array:
    """Rows over differing site lists -> one array [F, S, ...] with NaN where a frame lacks a site."""
    number = {site: i for i, site in enumerate(sites)}
    tail = parts[0][1].shape[1:] if parts else ()
    out = np.full((len(parts), len(sites), *tail), np.nan)
    for f, (names, row) in enumerate(parts):
        out[f, [number[s] for s in names]] = row
    return out


def measured(frame: Frame | None, sites: list[str], measure: Measure) -> Array:
    """A measure of a merged frame, put in the order of `sites`: [S]."""
    if frame is None:
        return np.full(len(sites), np.nan)
    return spread([(frame.sites, form(measure, frame.fields, len(frame.sites)))], sites)[0]
