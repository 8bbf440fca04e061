"""ProbeSession: joins a model's attention to a recorder on the steps that are probed, and to nothing on all others.

    session = ProbeSession(config, out).attach(model)
    for step in ...:
        session.begin(step)          # hooks exist from here
        forward, backward (any number of microbatches, with or without recompute)
        session.step(step)           # to here; the step's record goes to the writer thread

A core attention of ours gets a tap; any other gets a hook on its key tensor, whose gradient is exact whatever the backend computed. Where
a plugin decides at each call which of the two runs, both are there and the one that did not run stays silent.
Everything is recorded in backward, which runs once a microbatch, so recomputed forwards do not count twice. Nothing here touches a value,
a gradient or the random state of the job, and an error in a probe is a warning.
"""

import json
import logging
import math
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import __version__
from .capture import Captures
from .config import PROBES, ProbeConfig, Section
from .control import Request, Watcher
from .dump import DumpWriter
from .recorder import Recorder, not_given
from .refusals import no_key_sum, refusals
from .residuals import BINS_PER_DECADE, LOG10_LOW
from .sites import Site, find_sites
from .stats import RowStats

log = logging.getLogger("dm_plugin")


class ProbeSession:
    """Probes of one rank.

    config: what to probe when (ProbeConfig). out: dump folder, None for scalars only. rank: names this process's dumps; default: that of
    torch.distributed, else RANK in the environment, else 0. world: parallel coordinates such as {"tp_rank": 0, "tp_size": 2, ...}.
    backend: name of the attention of sites that have no tap, or a function that names it from the site's module after its forward.
    writer: any object with add_scalar(tag, value, step) or log(mapping, step=). control: folder watched for probe requests (default:
    out), False for none. on_signal: a signal number such as signal.SIGUSR1 that asks for all probes on the next step (from the main
    thread, and where the job has no handler of its own).
    """

    def __init__(
        self,
        config: ProbeConfig,
        out: Path | str | None,
        *,
        rank: int | None = None,
        world: Mapping[str, int] | None = None,
        backend: str | Callable[[nn.Module], str] = "",
        model_info: Mapping[str, Any] | None = None,
        writer: Any = None,
        control: Path | str | bool | None = True,
        on_signal: int | None = None,
    ) -> None:
        self.config, self.backend, self.scalars = config, backend, writer
        self.rank = rank = process_rank() if rank is None else rank
        self.world, self.model_info = dict(world or {}), dict(model_info or {})
        self.sites: list[Site] = []
        self.dumps = DumpWriter(out, rank) if out is not None else None
        folder = out if control is True else control
        self.watcher = Watcher(folder, rank) if folder not in (None, False) else None  # type: ignore[arg-type]
        self._warned: set[str] = set()
        self._sections: list[tuple[Site, Section | None]] = []
        self._captures = Captures(0, self.world, self._miss)
        self._recorder = Recorder()  # one a probed step: a backward pass that comes late adds to a record nobody reads
        self._active: dict[str, tuple[Site, frozenset[str]]] = {}
        self._to_log: set[str] = set()
        self._to_dump: set[str] = set()
        self._undo: list[Callable[[], None]] = []
        self._keys: dict[int, weakref.ref[Tensor]] = {}
        self._backends: dict[str, str] = {}
        self._tapped: set[str] = set()
        self._signalled = False
        self._restore_signal = self._listen(on_signal) if on_signal is not None else lambda: None
        self._missing: dict[str, dict[str, str]] = {}
        self._reported: tuple[str | None, bool] | None = None

    # -------------------------------------------------------------------------------------------- life
    def attach(self, model: nn.Module | Iterable[nn.Module]) -> "ProbeSession":
        """Find the attention sites of a model (or of its pipeline chunks). No hook is made here.

        Raises ValueError when the model has no attention site or the config gives one site to two sections.
        """
        self.sites = find_sites(model)
        if not self.sites:
            raise ValueError(
                "the model has no module with a core_attention; dm_plugin probes attention layers built that way"
            )
        self._sections = [(site, self.config.section_for(site.name)) for site in self.sites]
        for section in self.config.sections:
            if all(section is not used for _, used in self._sections):
                log.warning(
                    "section %s of the probe config matches no attention site; sites here are named like %s",
                    section.name,
                    self.sites[0].name,
                )
        return self

    def begin(self, step: int) -> bool:
        """Start of a training step; makes hooks if this step is probed and says whether it is. Costs one stat() otherwise."""
        self._unhook()
        request = self.watcher.poll(step) if self.watcher is not None else None
        if self._signalled:
            self._signalled = False
            request = request or Request("signal", "start", step, 1, None, frozenset(PROBES))
        self._report(step, request is not None)
        nothing = frozenset[str](), frozenset[str]()
        wanted = {section: section.wanted(step) for section in self.config.sections}
        if request is None and not any(log or dump for log, dump in wanted.values()):
            return False
        self._recorder, self._missing, self._backends, self._tapped = Recorder(), {}, {}, set()
        self._captures = Captures(step, self.world, self._miss)
        for site, section in self._sections:
            to_log, to_dump = wanted[section] if section is not None else nothing
            if request is not None and (request.layers is None or _layer(site) in request.layers):
                to_dump |= request.probes
            if to_log:
                self._to_log.add(site.name)
            if to_dump:
                self._to_dump.add(site.name)
            if to_log or to_dump:
                self._active[site.name] = (site, to_log | to_dump)
        for site, probes in self._active.values():
            try:
                self._hook(site, probes)
            except Exception as error:
                self._failed("hook", site.name, probes, error)
        return bool(self._active)

    def step(self, step: int) -> None:
        """End of the step (after the last backward): takes the hooks off and hands the record over."""
        if not self._active:
            return
        active, to_log, to_dump = dict(self._active), set(self._to_log), set(self._to_dump)
        try:
            self._add_gains(active)
            record = self._recorder.drain()
            for name, (_, probes) in active.items():
                if f"{name}/records.count" not in record:
                    self._miss(
                        name, probes - {"gain_share"}, "no backward pass of this layer reached the probe in this step"
                    )
            if self.dumps is not None and to_dump:
                kept = {key: x for key, x in record.items() if key.partition("/")[0] in to_dump}
                metadata = self._metadata(active)
                self.dumps.submit(step, kept, metadata, self._captures.work(self.dumps.out, self.rank, metadata))
            if self.scalars is not None and to_log:
                self._write_scalars(step, {k: x for k, x in record.items() if k.partition("/")[0] in to_log})
        except Exception as error:  # a probe must not end a training job
            text = f"the probe record of step {step} is lost ({error}); training goes on"
            lose = self.dumps.lose if self.dumps is not None and to_dump else self._warn
            lose(f"step:{type(error).__name__}", text)
        finally:
            self._unhook()

    def detach(self) -> None:
        """Take everything off the model and forget it; dumps already queued are still written."""
        self._unhook()
        self.sites, self._sections = [], []

    def _listen(self, number: int) -> Callable[[], None]:
        """Ask for one probed step when the signal comes, unless the job handles it; returns what takes the handler off again."""

        def heard(*_: Any) -> None:
            self._signalled = True

        try:
            if signal.getsignal(number) is not signal.SIG_DFL:
                raise ValueError("the job handles it itself")
            signal.signal(number, heard)
        except ValueError as error:  # or this is not the main thread: the job goes on without
            self._warn("signal", f"probes do not listen to signal {number} ({error})")
            return lambda: None

        def restore() -> None:
            if signal.getsignal(number) is heard:
                signal.signal(number, signal.SIG_DFL)

        return restore

    def close(self) -> None:
        """Detach and wait for the writer thread."""
        self.detach()
        self._restore_signal()
        if self.dumps is not None:
            self.dumps.close()

    def __enter__(self) -> "ProbeSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------- hooks
    def _hook(self, site: Site, probes: frozenset[str]) -> None:
        tapped = site.tapped
        if tapped is not None:
            self._undo.append(partial(_set_tap, tapped, tapped.tap))
            _set_tap(tapped, partial(self._on_stats, self._recorder, site, probes))
        if not site.ours:
            wants_keys = "key_col_sum" in probes and no_key_sum(site, self.world) is None
            if tapped is not None:
                tapped.ran = None  # type: ignore[assignment]
            observe = partial(self._on_forward, self._recorder, site, wants_keys)
            self._undo.append(site.module.register_forward_hook(observe, with_kwargs=True).remove)
        if "replay" in probes:
            self._captures.hook(site, self._undo)

    def _unhook(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._active.clear()
        self._to_log.clear()
        self._to_dump.clear()
        self._keys.clear()

    def _on_stats(self, recorder: Recorder, site: Site, probes: frozenset[str], stats: RowStats) -> None:
        try:
            probes -= getattr(site.tapped, "refuse_probe", {}).keys()
            self._backends[site.name] = stats.backend
            self._tapped.add(site.name)
            for probe, field in not_given(stats, probes).items():
                self._miss(site.name, (probe,), f"{stats.backend or 'the backend'} hands out no {field} on this rank")
            recorder.add(site.name, stats, probes)
        except Exception as error:
            self._failed("tap", site.name, probes, error)

    def _on_forward(
        self,
        recorder: Recorder,
        site: Site,
        wants_keys: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _: Any,
    ) -> None:
        tapped = site.tapped
        if tapped is not None:
            ours, tapped.ran = tapped.ran, None  # type: ignore[assignment]
            if ours:
                return
        if site.name not in self._tapped:
            name = self.backend(module) if callable(self.backend) else self.backend
            self._backends[site.name] = tapped.stock_backend() if tapped is not None else name  # type: ignore[operator]
        key = args[1] if len(args) > 1 else next((kwargs[n] for n in ("key", "key_layer") if n in kwargs), None)
        if not wants_keys or not isinstance(key, Tensor) or not torch.is_grad_enabled() or not key.requires_grad:
            return
        if key.dim() != 4:
            text = f"keys of shape {tuple(key.shape)} are packed, and the sum over each sequence cannot be told apart"
            self._miss(site.name, ("key_col_sum",), text)
            return
        seen = self._keys.get(id(key))
        if seen is not None and seen() is key:  # a non-reentrant recompute runs forward again on the same tensor
            return
        self._keys[id(key)] = weakref.ref(key)
        batch_first = str(getattr(module, "qkv_format", "sbhd")).startswith("bshd")
        handle = key.register_hook(partial(self._on_key_gradient, recorder, site.name, batch_first))
        self._undo.append(handle.remove)

    def _on_key_gradient(self, recorder: Recorder, site: str, batch_first: bool, gradient: Tensor) -> None:
        try:
            recorder.add_key_gradient(site, gradient.transpose(0, 1) if batch_first else gradient)
        except Exception as error:
            self._failed("key", site, ("key_col_sum",), error)

    def _add_gains(self, active: Mapping[str, tuple[Site, frozenset[str]]]) -> None:
        for name, (site, probes) in active.items():
            try:
                gains = site.gains() if "gain_share" in probes else None
                if gains is not None:
                    self._recorder.set_gains(name, *gains)
            except Exception as error:
                self._failed("gains", name, ("gain_share",), error)

    # -------------------------------------------------------------------------------------------- what went wrong
    def _miss(self, site: str, probes: Iterable[str], text: str) -> None:
        """Remember why a site has no value for these probes in this step; the first reason stays."""
        for probe in probes:
            self._missing.setdefault(site, {}).setdefault(probe, text)

    def _failed(self, cause: str, site: str, probes: Iterable[str], error: Exception) -> None:
        self._miss(site, probes, f"the probe failed ({error})")
        self._warn(f"{cause}:{type(error).__name__}", f"a probe of {site} failed ({error}); training goes on")

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning(text)

    # -------------------------------------------------------------------------------------------- records
    def _metadata(self, active: Mapping[str, tuple[Site, frozenset[str]]]) -> dict[str, str]:
        reasons = {
            name: r
            for name, (site, probes) in active.items()
            if (r := {**self._missing.get(name, {}), **refusals(site, probes, self.world, name in self._tapped)})
        }
        why = sorted({getattr(site.tapped, "impl_reason", "") for site, _ in active.values()} - {""})
        given = self.backend if isinstance(self.backend, str) else ""
        backends = sorted({self._backends.get(name) or given or "unknown" for name in active})
        return {
            "dm_plugin.version": __version__,
            "dm_plugin.world": json.dumps(self.world),
            "dm_plugin.backend": ",".join(backends),
            "dm_plugin.impl_reason": ", ".join(why),
            "dm_plugin.model": json.dumps(self.model_info),
            "dm_plugin.config": json.dumps({name: sorted(probes) for name, (_, probes) in active.items()}),
            "dm_plugin.reasons": json.dumps(reasons),
        }

    def _report(self, step: int, active: bool) -> None:
        """Queue a status file when what this rank does about requests has changed."""
        if self.watcher is None or self.dumps is None:
            return
        request = self.watcher.request
        state = (request.id if request is not None else None, active)
        if state == self._reported or (self._reported is None and request is None):
            return
        dumps, watcher = self.dumps, self.watcher
        asked = request is not None and request.action == "start"
        word = "probing" if active else "done" if watcher.over(step) else "waiting" if asked else "idle"
        if dumps.call(lambda: watcher.report(step, word, dumps.written, dumps.lost_total, dumps.queued)):
            self._reported = state  # else the queue is full: tried again at the next step

    def _write_scalars(self, step: int, record: Mapping[str, np.ndarray]) -> None:
        values = scalars(record)
        if hasattr(self.scalars, "add_scalar"):
            for tag, value in values.items():
                self.scalars.add_scalar(tag, value, step)
        else:
            self.scalars.log(values, step=step)


def _set_tap(module: nn.Module, tap: Any) -> None:
    """`probing`, where a module has it, is what a compiled graph watches: the tap itself is another object on every probed step."""
    module.tap = tap
    if hasattr(module, "probing"):
        module.probing = tap is not None  # type: ignore[assignment]


def scalars(record: Mapping[str, np.ndarray]) -> dict[str, float]:
    """log10 of the median row ratio of each site, from its histogram (tags dm_plugin/{site}/{probe}_log10_median)."""
    out: dict[str, float] = {}
    for key, hist in record.items():
        site, _, name = key.rpartition("/")
        probe, _, field = name.partition(".")
        if field == "hist" and hist.sum() > 0:
            bin_ = int(np.searchsorted(np.cumsum(hist), (hist.sum() + 1) // 2))
            out[f"dm_plugin/{site}/{probe}_log10_median"] = (
                LOG10_LOW + (bin_ - 0.5) / BINS_PER_DECADE if bin_ else -math.inf
            )
    return out


def process_rank() -> int:
    """The global rank: torch.distributed's if it is initialised, else RANK of the environment, else 0."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def _layer(site: Site) -> int | None:
    return None if site.layer_number is None or site.name.startswith("mtp.") else site.layer_number - 1
