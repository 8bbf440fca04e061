"""The compiled kernels as torch operators, torch.ops.dm_plugin.*: loading, shapes for tracing, autograd. Nothing happens on import.

    attention_forward   pre-pass of q, k, v, then O            -> o and what backward reads
    attention_backward  pre-pass of dO, delta, dQ, then dK, dV  -> dq, dk, dv and the deltas (and probe buffers)
    quantise, quantise_grad   the pre-passes alone

The library is csrc/ built by `python csrc/build.py` (or by `pip install .` where a CUDA 13 toolkit is found) as dm_plugin/_C.so. It is
loaded on the first use of an operator; `available()` says whether and why not. Layouts of images and scales: csrc/params.h.
"""

import ctypes
import json
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .stats import CodeStats, RowStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from .reference import Call

LIBRARY = Path(__file__).with_name("_C.so")
MODE_NUMBER = {"stale": 0, "consistent": 1, "matched": 2}
UNIT = 128
LN2 = math.log(2.0)


class Forward(NamedTuple):
    """Outputs of attention_forward. Images uint8 [B, heads, units, 128 D], scales FP32, row vectors FP32 [B, H, units 128]; tensors that
    were not asked for (keep, probe, centring) are empty. stats int64 [3, 4]: q, k, v by saturated, underflowed, non-finite, amax bits."""

    o: Tensor
    o_centred: Tensor
    lse2: Tensor
    m2: Tensor
    q_row: Tensor
    q_t: Tensor
    q_scale: Tensor
    k_row: Tensor
    k_t: Tensor
    k_scale: Tensor
    k_fold: Tensor
    v_row: Tensor
    v_scale: Tensor
    k_mean: Tensor
    v_mean: Tensor
    q_dot: Tensor
    stats: Tensor

    def for_backward(self) -> tuple[Tensor, ...]:
        """The tensors that attention_backward takes after dO: the O before the V mean was added, then row vectors, images, scales."""
        return (self.o if self.o_centred.numel() == 0 else self.o_centred, *self[2:13])


class Backward(NamedTuple):
    """Outputs of attention_backward. delta is empty unless the mode is matched; the last five are empty without probe."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor
    delta_stale: Tensor
    delta_consistent: Tensor
    rows: Tensor  # [6, B, H, units * 128]: row_sum, row_abs_sum, both after the cast, top_p, entropy
    columns: Tensor  # [2, B, G, 2 * key units, D]: partial sums over 64 keys of dK and |dK|
    tile_amax: Tensor
    e_pow: Tensor
    stats: Tensor  # int64 [3, 4]: dO, dS, P


class Quantised(NamedTuple):
    """Outputs of quantise."""

    row: Tensor
    token: Tensor
    scale: Tensor
    fold: Tensor
    mean: Tensor
    dot: Tensor
    stats: Tensor


# ------------------------------------------------------------------------------------------------ loading
@torch.compiler.assume_constant_result
def available() -> tuple[bool, str]:
    """(True, "") when the kernels are loaded, else (False, one sentence). Loads the library on the first call; needs no GPU."""
    return _load_once()


@cache
def _load_once() -> tuple[bool, str]:
    if not LIBRARY.exists():
        return (
            False,
            "the sm90 kernels are not built (dm_plugin/_C.so is missing); run `python csrc/build.py` with a CUDA 13 toolkit",
        )
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return False, f"torch {torch.__version__} is too old for the sm90 kernels' stable ABI; install torch >= 2.11"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return False, f"{LIBRARY.name} does not load ({error}); rebuild it with `python csrc/build.py`"
    _register()
    return True, ""


def load() -> None:
    """Make torch.ops.dm_plugin ready. Raises RuntimeError with the reason when the library cannot be used."""
    ok, reason = available()
    if not ok:
        raise RuntimeError(reason)


def build_info() -> dict[str, str]:
    """Compiler, flags, torch headers and source hash of the loaded library: part of a run's numerical identity."""
    load()
    text = ctypes.CDLL(str(LIBRARY)).dm_plugin_build_info
    text.restype = ctypes.c_char_p
    return {**json.loads(text().decode()), "torch": torch.__version__}


# ------------------------------------------------------------------------------------------------ calls
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: "Call",
    tap: "Callable[[RowStats], None] | None" = None,
    want_max: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable FP8 attention on the GPU: (o, max logit [H] if wanted). Meanings as dm_plugin.dm_attn_func."""
    load()
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if (
        needs_grad and not torch.compiler.is_compiling()
    ):  # a graph takes the operator's registered formula, without a tap
        o, m2, q_dot = _Attention.apply(q, k, v, call, tap)
    else:
        out = forward(q, k, v, call, keep=needs_grad)
        o, m2, q_dot = out.o, out.m2, out.q_dot
    return o, _uncentred(m2, q_dot, q.shape[1], call).amax((0, 2)) if want_max else None


def forward(q: Tensor, k: Tensor, v: Tensor, call: "Call", *, keep: bool = True, probe: bool = False) -> Forward:
    """attention_forward for a reference.Call. keep: make what backward reads. Differentiable in `o` when keep is set."""
    load()
    mode = MODE_NUMBER[call.mode]
    return Forward(
        *torch.ops.dm_plugin.attention_forward(
            q, k, v, *_numbers(call), call.fmt.center_k, call.fmt.center_v, mode, keep, probe
        )
    )


def backward(do: Tensor, saved: tuple[Tensor, ...], t_k: int, call: "Call", *, probe: bool = False) -> Backward:
    """attention_backward. saved: Forward.for_backward(); t_k: number of keys."""
    load()
    return Backward(
        *torch.ops.dm_plugin.attention_backward(do, *saved, t_k, *_numbers(call), MODE_NUMBER[call.mode], probe)
    )


def quantise(
    x: Tensor, *, keys: bool, center: bool = False, key_mean: Tensor | None = None, probe: bool = False
) -> Quantised:
    """The pre-pass of one tensor (B, T, heads, D): both images, scales (64-token blocks for keys, else 128), mean, code statistics."""
    load()
    return Quantised(*torch.ops.dm_plugin.quantise(x, keys, center, key_mean, True, True, probe))


def lse(out: Forward, tokens: int, call: "Call") -> Tensor:
    """Natural log-sum-exp of the scaled, uncentred scores [B, H, T]; -inf for a row without a key."""
    return _uncentred(out.lse2, out.q_dot, tokens, call)


def row_stats(out: Forward, back: Backward, call: "Call", t_q: int, t_k: int) -> RowStats:
    """RowStats from the probe buffers of both passes."""
    rows = back.rows[..., :t_q]
    delta_stale, delta_consistent = back.delta_stale[..., :t_q], back.delta_consistent[..., :t_q]
    delta = {"stale": delta_stale, "consistent": delta_consistent, "matched": back.delta[..., :t_q]}[call.mode]
    columns = back.columns.sum(3)
    batch, heads, kv_heads, dim = out.o.shape[0], out.o.shape[2], out.k_row.shape[1], out.o.shape[3]
    pairs = batch * heads * _visible(t_q, t_k, call.offset)
    n_q, n_k = batch * heads * t_q * dim, batch * kv_heads * t_k * dim
    codes = {name: _codes(out.stats[i], n) for i, (name, n) in enumerate((("q", n_q), ("k", n_k), ("v", n_k)))}
    codes["do"] = _codes(back.stats[0], n_q)
    codes["ds"] = _codes(back.stats[1], pairs, (back.tile_amax.view(torch.float32) * back.e_pow.unsqueeze(-1)).amax())
    codes["p"] = _codes(back.stats[2], pairs, rows[4].amax())
    return RowStats(
        row_sum=rows[0],
        row_abs_sum=rows[1],
        row_sum_cast=rows[2],
        row_abs_sum_cast=rows[3],
        delta=delta,
        delta_stale=delta_stale,
        delta_consistent=delta_consistent,
        top_p=rows[4],
        entropy=rows[5],
        max_logit=_uncentred(out.m2, out.q_dot, t_q, call).amax(-1),
        key_col_sum=columns[0],
        key_abs_sum=columns[1],
        codes=codes,
        backend=f"sm90:{call.mode}",
    )


def _numbers(call: "Call") -> tuple[float, bool, int]:
    return call.softmax_scale, call.offset is not None, call.offset or 0


def _uncentred(x: Tensor, q_dot: Tensor, tokens: int, call: "Call") -> Tensor:
    x = x[..., :tokens] * LN2
    return x if q_dot.numel() == 0 else x + q_dot[..., :tokens] * call.softmax_scale


def _visible(t_q: int, t_k: int, offset: int | None) -> int:
    """Number of (query, key) pairs that the mask shows."""
    if offset is None:
        return t_q * t_k
    first = max(0, min(t_q, -offset))  # queries without a key
    full = max(first, min(t_q, t_k - 1 - offset))  # queries before the first that sees every key
    some = full - first
    return some * (first + offset + 1) + some * (some - 1) // 2 + (t_q - full) * t_k


def _codes(stats: Tensor, count: int, amax: Tensor | None = None) -> CodeStats:
    amax = stats[3].to(torch.int32).view(torch.float32) if amax is None else amax
    return CodeStats(amax, stats[0], stats[1], stats[2], torch.full((), count, dtype=torch.int64, device=stats.device))


class _Attention(torch.autograd.Function):
    """Autograd around the operators. With a tap the probe instantiations run, and the tap is called once, in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: "Call", tap: "Callable[[RowStats], None] | None"
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = forward(q, k, v, call, probe=tap is not None)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.tap, ctx.t_k, ctx.same_o = call, tap, k.shape[1], out.o_centred.numel() == 0
        if tap is None:
            ctx.save_for_backward(*out.for_backward())
        else:
            ctx.save_for_backward(*out[0 if ctx.same_o else 1 :])  # the returned O only where backward reads it
        ctx.mark_non_differentiable(out.m2, out.q_dot)
        return out.o, out.m2, out.q_dot

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * 5
        saved = ctx.saved_tensors
        if ctx.tap is None:
            back = backward(do, saved, ctx.t_k, ctx.call)
        else:
            out = Forward(*saved) if ctx.same_o else Forward(saved[0], *saved)
            back = backward(do, out.for_backward(), ctx.t_k, ctx.call, probe=True)
            ctx.tap(row_stats(out, back, ctx.call, do.shape[1], ctx.t_k))
        return back.dq, back.dk, back.dv, None, None


# ------------------------------------------------------------------------------------------------ registration
def _register() -> None:
    """Fakes for tracing and the autograd formula; once a process."""
    torch.library.register_fake("dm_plugin::quantise", _fake_quantise)
    torch.library.register_fake("dm_plugin::quantise_grad", _fake_quantise_grad)
    torch.library.register_fake("dm_plugin::attention_forward", _fake_forward)
    torch.library.register_fake("dm_plugin::attention_backward", _fake_backward)
    torch.library.register_autograd("dm_plugin::attention_forward", _autograd_backward, setup_context=_autograd_setup)


def _autograd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, k, _, scale, causal, offset, _, _, mode, keep, _ = inputs
    out = Forward(*output)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.keep, ctx.args = keep, (k.shape[1], scale, causal, offset, mode, False)
    if keep:
        ctx.save_for_backward(*out.for_backward())


def _autograd_backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 11
    if not ctx.keep:
        raise RuntimeError("attention_forward ran with keep=False and cannot be differentiated; call it with keep=True")
    grads = torch.ops.dm_plugin.attention_backward(do, *ctx.saved_tensors, *ctx.args)
    return (*grads[:3], *(None,) * 8)


def _units(tokens: int) -> int:
    return (tokens + UNIT - 1) // UNIT


def _f32(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.float32)


def _u8(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)


def _i64(like: Tensor, *size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.int64)


def _fake_quantise(
    x: Tensor, keys: bool, center: bool, key_mean: Tensor | None, row: bool, token: bool, probe: bool
) -> tuple[Tensor, ...]:
    b, t, h, d = x.shape
    n = _units(t)
    image = (b, h, n, UNIT * d)
    return (
        _u8(x, *image) if row else _u8(x, 0),
        _u8(x, *image) if token else _u8(x, 0),
        _f32(x, b, h, 2 * n if keys else n),
        _f32(x, b, h, n, 8) if keys else _f32(x, 0),
        _f32(x, b, h, d) if center else _f32(x, 0),
        _f32(x, b, h, n * UNIT) if key_mean is not None else _f32(x, 0),
        _i64(x, 4) if probe else _i64(x, 0),
    )


def _fake_quantise_grad(grad: Tensor, o: Tensor, lse2: Tensor, m2: Tensor, probe: bool) -> tuple[Tensor, ...]:
    b, t, h, d = grad.shape
    n = _units(t)
    rows = lambda: _f32(grad, b, h, n * UNIT)  # noqa: E731
    image = lambda: _u8(grad, b, h, n, UNIT * d)  # noqa: E731
    return (
        image(),
        image(),
        _f32(grad, b, h, n),
        rows(),
        rows(),
        rows(),
        _f32(grad, b, h, n),
        _i64(grad, 4) if probe else _i64(grad, 0),
    )


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    causal_offset: int,
    center_k: bool,
    center_v: bool,
    mode: int,
    keep: bool,
    probe: bool,
) -> tuple[Tensor, ...]:
    key_mean = k if center_k else None
    kq = Quantised(*_fake_quantise(k, True, center_k, None, True, keep, probe))
    vq = Quantised(*_fake_quantise(v, True, center_v, None, keep, True, probe))
    qq = Quantised(*_fake_quantise(q, False, False, key_mean, True, keep, probe))
    rows = q.shape[0], q.shape[2], _units(q.shape[1]) * UNIT
    return Forward(
        o=q.new_empty(q.shape),
        o_centred=q.new_empty(q.shape if keep and center_v else (0,)),
        lse2=_f32(q, *rows),
        m2=_f32(q, *rows),
        q_row=qq.row,
        q_t=qq.token,
        q_scale=qq.scale,
        k_row=kq.row,
        k_t=kq.token,
        k_scale=kq.scale,
        k_fold=kq.fold,
        v_row=vq.row,
        v_scale=vq.scale,
        k_mean=kq.mean,
        v_mean=vq.mean,
        q_dot=qq.dot,
        stats=_i64(q, 3, 4) if probe else _i64(q, 0),
    )


def _fake_backward(grad: Tensor, o: Tensor, lse2: Tensor, m2: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    k_row, (t_k, _, _, _, mode, probe) = rest[3], rest[-6:]
    b, t, h, d = grad.shape
    g, n_q, n_k = k_row.shape[1], _units(t), _units(t_k)
    none = lambda: _f32(grad, 0)  # noqa: E731
    rows = lambda: _f32(grad, b, h, n_q * UNIT)  # noqa: E731
    return Backward(
        dq=grad.new_empty((b, t, h, d)),
        dk=grad.new_empty((b, t_k, g, d)),
        dv=grad.new_empty((b, t_k, g, d)),
        delta=rows() if mode == MODE_NUMBER["matched"] else none(),
        delta_stale=rows(),
        delta_consistent=rows(),
        rows=_f32(grad, 6, b, h, n_q * UNIT) if probe else none(),
        columns=_f32(grad, 2, b, g, 2 * n_k, d) if probe else none(),
        tile_amax=grad.new_empty((b, h, n_q, n_k) if probe else (0,), dtype=torch.int32),
        e_pow=_f32(grad, b, h, n_q) if probe else none(),
        stats=_i64(grad, 3, 4) if probe else _i64(grad, 0),
    )
