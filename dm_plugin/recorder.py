"""Adds RowStats up on the device they come from, and hands them over once a step.

Every method but `drain` only launches device work: no synchronisation, no transfer. `drain` packs everything into one buffer a device and
kind of number, moves each at once and starts afresh.
Fields and shapes are the dump's (docs/dump-format.md); how two values of a field combine is `dump.rule`.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from . import residuals
from .dump import rule
from .stats import RowStats


class Recorder:
    """Accumulators {site}/{probe}.{field} -> tensor."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, site: str, stats: RowStats, probes: Iterable[str]) -> None:
        """Add one backward pass of one site."""
        wanted = frozenset(probes)
        self._merge(site, _fields(stats, wanted))
        device = next((x.device for x in (stats.row_sum, stats.key_col_sum) if x is not None), torch.device("cpu"))
        self._merge(site, {"records.count": torch.ones((), dtype=torch.long, device=device)})

    def add_key_gradient(self, site: str, dk: Tensor) -> None:
        """Add the key gradient [T, B, G, D] of a backend that has no tap, in the dtype in which that backend stored it."""
        dk = dk.detach().float()
        total, absolute = dk.sum(0, dtype=torch.float64), dk.abs().sum(0, dtype=torch.float64)
        self._merge(site, _prefixed("key_col_sum", residuals.key_col_sum(total, absolute)))
        self._merge(site, {"records.count": torch.ones((), dtype=torch.long, device=dk.device)})

    def set_gains(self, site: str, g_q: Tensor, g_k: Tensor) -> None:
        """Keep the effective gains [D] of a site's norms (the last value counts)."""
        self._merge(site, {"gain_share.q": g_q.double(), "gain_share.k": g_k.double()})

    def drain(self) -> dict[str, np.ndarray]:
        """Everything recorded since the last drain, on the CPU."""
        sums, self._sums = self._sums, {}
        packs: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for key, x in sums.items():
            packs.setdefault((x.device, x.dtype), []).append(key)
        out: dict[str, np.ndarray] = {}
        for keys in packs.values():
            parts = [sums[key].detach() for key in keys]
            flat = to_numpy(torch.cat([x.reshape(-1) for x in parts]))
            ends = np.cumsum([x.numel() for x in parts])
            for key, x, piece in zip(keys, parts, np.split(flat, ends[:-1]), strict=True):
                out[key] = piece.reshape(tuple(x.shape))
        return {key: out[key] for key in sums}

    def _merge(self, site: str, fields: dict[str, Tensor]) -> None:
        for name, value in fields.items():
            key = f"{site}/{name}"
            old = self._sums.get(key)
            how = rule(name)
            if old is None or how == "last":
                self._sums[key] = value.clone()
            elif how == "max":
                self._sums[key] = torch.fmax(old, value)
            else:
                old += value


NEEDS = {
    "row_sum": ("row_sum", "row_abs_sum"),
    "row_sum_signed": ("row_sum",),
    "delta_gap": ("row_sum", "delta"),
    "key_col_sum": ("key_col_sum", "key_abs_sum"),
    "max_logit": ("max_logit",),
    "entropy": ("entropy",),
    "codes": ("codes",),
}


def not_given(stats: RowStats, probes: Iterable[str]) -> dict[str, str]:
    """probe -> the field of RowStats that it needs and this backend left out."""
    fields = {p: next((f for f in NEEDS.get(p, ()) if getattr(stats, f) is None), None) for p in probes}
    return {probe: field for probe, field in fields.items() if field is not None}


def to_numpy(x: Tensor) -> np.ndarray:
    """A CPU tensor of any layout as an array of its own; BF16 and FP8 become FP32, which numpy has."""
    x = x.detach().cpu()
    return (x.float() if x.dtype.is_floating_point and x.element_size() < 4 else x).contiguous().clone().numpy()


def _prefixed(probe: str, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{probe}.{name}": value for name, value in fields.items()}


def _sums(probe: str, sums: residuals.Sums) -> dict[str, Tensor]:
    return _prefixed(probe, {name: value for name, value in vars(sums).items() if value is not None})


def _fields(s: RowStats, wanted: frozenset[str]) -> dict[str, Tensor]:
    """The additive fields of one RowStats."""
    out: dict[str, Tensor] = {}
    if "row_sum" in wanted:
        for probe, total, absolute in (
            ("row_sum_pre", s.row_sum, s.row_abs_sum),
            ("row_sum_post", s.row_sum_cast, s.row_abs_sum_cast),
        ):
            if total is not None and absolute is not None:
                out |= _sums(probe, residuals.row_sum(total, absolute, s.top_p))
    if "row_sum_signed" in wanted and s.row_sum is not None:
        out |= _prefixed("row_sum_signed", residuals.signed(s.row_sum, s.entropy))
    if "delta_gap" in wanted and s.row_sum is not None and s.delta is not None:
        # delta_used - delta_matched = -sum_j dS, because the row's probabilities sum to one
        out |= _sums("delta_gap", residuals.row_sum(s.row_sum, s.delta.abs()))
    if "key_col_sum" in wanted and s.key_col_sum is not None and s.key_abs_sum is not None:
        out |= _prefixed("key_col_sum", residuals.key_col_sum(s.key_col_sum, s.key_abs_sum))
    if "max_logit" in wanted and s.max_logit is not None:
        out["max_logit.max"] = (
            s.max_logit.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf).amax(0)
        )
    if "entropy" in wanted and s.entropy is not None:
        finite = torch.isfinite(s.entropy)
        out["entropy.num"] = residuals.per_head(s.entropy.masked_fill(~finite, 0.0))
        out["entropy.count"] = finite.sum((0, 2))
    if "codes" in wanted and s.codes is not None:
        for operand, c in s.codes.items():
            out[f"codes.{operand}.amax"] = c.amax.double()
            for name in ("saturated", "underflowed", "nonfinite", "count"):
                out[f"codes.{operand}.{name}"] = getattr(c, name).long()
    return out
