"""dm_attn_func: softmax attention whose seven matmuls run on FP8 codes, forward and backward, with a chosen delta.

    O = softmax(q k^T * softmax_scale) v        dS = P (dP_hat - delta),  delta: matched | consistent | stale

The backend is resolved once a configuration, logged with its reason, and kept in every dump.
"""

import logging
import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import graphs, reference
from .formats import Format, get_format
from .quantise import Codes
from .stats import RowStats
from .support import IMPLS, AttnCall, describe, why_not

log = logging.getLogger("dm_plugin")
Tap = Callable[[RowStats], None]


def dm_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    mode: str | None = None,
    *,
    softmax_scale: float | None = None,
    impl: str = "auto",
    fmt: str | Format = "sm90",
    tap: Tap | None = None,
    causal_offset: int | None = None,
    accumulate: str = "exact",
    center_k: bool | None = None,
    center_v: bool | None = None,
    return_max_logit: bool = False,
) -> Any:
    """FP8 attention. q (B, T, H, D), k and v (B, Tk, G, D), H % G == 0 -> o (B, T, H, D) in q's dtype.

    causal: query i sees key j iff j <= i + causal_offset; the default offset Tk - T puts the last query on the last key.
    mode: which delta the backward subtracts, `matched` (default, or DM_PLUGIN_MODE), `consistent` or `stale`.
    softmax_scale: default 1 / sqrt(D). impl: `auto` (the sm90 kernel for CUDA tensors, the reference on CPU), `sm90`, `reference`.
    fmt: operand formats (formats.py); the kernel runs `sm90`. center_k, center_v: override the format's centring.
    return_max_logit: also return the largest scaled logit of each head, FP32 [H] over batch and visible pairs (-inf without one), detached.
    tap: called once in backward with RowStats (under torch.compile the call leaves the graph for it). accumulate: reference only, `exact` or `hopper`.
    A row that sees no key gives 0 and gradient 0. Gradients have the inputs' shapes and dtypes.
    Raises ValueError in one sentence for shapes, dtypes, devices or options that cannot run, RuntimeError if `auto` has no kernel for a
    CUDA tensor. Source: Delta-Matching (arXiv 2609.37852).
    """
    if tap is not None and torch.compiler.is_compiling():
        if not graphs.must_stay():
            return graphs.outside(
                dm_attn_func, q, k, v, causal, mode, softmax_scale=softmax_scale, impl=impl, fmt=fmt, tap=tap,
                causal_offset=causal_offset, accumulate=accumulate, center_k=center_k, center_v=center_v,
                return_max_logit=return_max_logit,
            )  # fmt: skip
        tap = None
    mode = os.environ.get("DM_PLUGIN_MODE", "matched") if mode is None else mode
    _check(q, k, v)
    record = get_format(fmt)
    changes = {
        n: x for n, x in (("center_k", center_k), ("center_v", center_v)) if x is not None and x != getattr(record, n)
    }
    record = record.with_(**changes) if changes else record
    if not causal and causal_offset is not None:
        raise ValueError(f"causal_offset={causal_offset} was given with causal=False; drop it or set causal=True")
    offset = (k.shape[1] - q.shape[1] if causal_offset is None else causal_offset) if causal else None
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    if softmax_scale is not None and not math.isfinite(scale):
        raise ValueError(
            f"softmax_scale={softmax_scale} is not finite; give a finite number or None for 1/sqrt(head_dim)"
        )
    asked = describe(q, k, v, causal=causal, mode=mode, fmt=record, accumulate=accumulate)
    chosen, _ = (choose_impl if torch.compiler.is_compiling() else resolve_impl)(
        asked, impl
    )  # no logging inside a graph
    if q.numel() == 0 or k.numel() == 0:
        o: Tensor = _no_keys(q, k, v)
        top: Tensor | None = q.new_full((q.shape[2],), -math.inf, dtype=torch.float32)
    else:
        call = reference.Call(record, scale, offset, mode, accumulate)  # type: ignore[arg-type]
        if chosen == "sm90":
            from . import ops

            o, top = ops.attention(q, k, v, call, tap, return_max_logit)
        else:
            o, top = _Reference.apply(q, k, v, call, tap)
    return (o, top) if return_max_logit else o


@lru_cache(maxsize=256)
def resolve_impl(call: AttnCall, impl: str = "auto") -> tuple[str, str]:
    """(backend, reason) for a request; decided and logged once a distinct request. Raises as choose_impl does."""
    chosen, reason = choose_impl(call, impl)
    log.info("attention backend %s (%s), mode %s, format %s", chosen, reason, call.mode, get_format(call.fmt).name)
    return chosen, reason


def choose_impl(call: AttnCall, impl: str = "auto") -> tuple[str, str]:
    """(backend, reason) for a request.

    Raises ValueError if the named backend cannot run it, RuntimeError if `auto` finds no kernel for a CUDA tensor: `auto` never picks
    the reference for a CUDA job, which would be a silent slow-down of 1000x.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not known; use one of {', '.join(IMPLS)}")
    if impl == "auto":
        chosen, reason = (
            ("sm90", "CUDA tensors")
            if call.device == "cuda"
            else ("reference", f"tensors on {call.device}: CPU simulation")
        )
    else:
        chosen, reason = impl, "asked for"
    problem = why_not(call, chosen)
    if problem:
        if impl == "auto" and call.device == "cuda" and why_not(call, "reference") is None:
            raise RuntimeError(f"{problem}; impl='reference' runs the slow simulation if that is what you want")
        raise ValueError(problem)
    return chosen, reason


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, tokens, heads, head_dim)")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; put q, k and v on one device")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q {q.dtype}; give q, k and v one dtype")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; batch, tokens and heads must agree")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k {k.shape[0]}; they must agree")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]} and k {k.shape[3]}; they must agree")


def _no_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Empty tensors, or no key at all: zeros that still connect to the inputs, so that gradients are zeros."""
    return (q * 0.0).nan_to_num() + (k.sum() + v.sum()).nan_to_num() * 0.0


class _Reference(torch.autograd.Function):
    """Autograd around reference.forward and reference.backward; everything a probe needs is recorded in backward, once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: reference.Call, tap: Tap | None
    ) -> tuple[Tensor, Tensor]:
        out = reference.forward(q, k, v, call, count=tap is not None)
        s = out.saved
        ctx.save_for_backward(*s.q, *s.k, *s.v, *s[3:])
        ctx.call, ctx.tap, ctx.dtype = call, tap, q.dtype
        top = reference.max_logit(s, q.shape[2])
        ctx.mark_non_differentiable(top)
        return out.o.to(q.dtype), top

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        t = ctx.saved_tensors
        saved = reference.Saved(Codes(*t[0:2]), Codes(*t[2:4]), Codes(*t[4:6]), *t[6:])
        grads, stats = reference.backward(saved, do, ctx.call, want_stats=ctx.tap is not None)
        if ctx.tap is not None and stats is not None:
            ctx.tap(stats)
        return grads.dq.to(ctx.dtype), grads.dk.to(ctx.dtype), grads.dv.to(ctx.dtype), None, None
