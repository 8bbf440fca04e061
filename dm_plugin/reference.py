"""The numerics contract of FP8 attention in plain torch, for any device and any length.

    S = q_hat k_hat^T * softmax_scale    P = softmax(S)    O = (P_hat v_hat) / l
    dP_hat = do_hat v_hat^T    dS = P (dP_hat - delta)    dQ = dS_hat k_hat * scale    dK = dS_hat^T q_hat * scale    dV = P_hat^T do_hat

P is never rounded where it multiplies dP_hat; hats are FP8 codes times their scale, block by block as the `Format` says. The delta is
one FP32 a row (delta.py). Quadratic memory: this file is the truth that kernels are compared with, and a CPU simulation of them; it is
not the kernel. Tensors inside: q [N, R, Tq, D], k and v [N, 1, Tk, D] with N = B * G sequences and key heads, R = H / G.
Source: Delta-Matching (arXiv 2609.37852) sections 3 and 4; the `sm90` casts are this project's kernel.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import casts, delta
from .accumulate import Accumulate, dot
from .formats import Format
from .quantise import Codes, quantise, token_mean
from .stats import CodeStats, RowStats

LOG2E = math.log2(math.e)


class Call(NamedTuple):
    """What one call asks for, apart from its tensors. offset: key j is visible to query i iff j <= i + offset; None: all keys."""

    fmt: Format
    softmax_scale: float
    offset: int | None
    mode: str
    accumulate: Accumulate = "exact"


class Saved(NamedTuple):
    """What forward keeps for backward. o: the saved O that deltas read, without the V mean; lse2, m2: log2 units, [N, R, Tq].

    shift [N, R, Tq]: what centring K took from each row's logits (natural units). counts [3, 5]: code statistics of q, k, v (or [0, 5]).
    """

    q: Codes
    k: Codes
    v: Codes
    v_given: Tensor | None
    o: Tensor
    lse2: Tensor
    m2: Tensor
    shift: Tensor
    counts: Tensor


class Forward(NamedTuple):
    """o (B, T, H, D) FP32 values of the stored O; lse (B, H, T) natural log, of the uncentred scores."""

    o: Tensor
    lse: Tensor
    saved: Saved


class Grads(NamedTuple):
    """FP32 gradients in the layouts of the inputs."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, count: bool = True) -> Forward:
    """Attention on the codes of q (B, T, H, D), k and v (B, Tk, G, D). Rows that see no key: O = 0, LSE = -inf.

    count: keep code statistics of q, k and v for backward's RowStats.
    """
    fmt, groups = call.fmt, k.shape[2]
    qn, kn, vn = _split(q, groups), _split(k, groups), _split(v, groups)
    k_mean = token_mean(kn) if fmt.center_k else None
    v_mean = token_mean(vn) if fmt.center_v else None
    qc = quantise(qn, fmt.q_block)
    k_used = kn if k_mean is None else kn - k_mean
    kc = quantise(k_used, fmt.kv_block)
    v_used = vn if v_mean is None else vn - v_mean
    vc = quantise(v_used, fmt.kv_block)
    visible = visible_keys(q.shape[1], k.shape[1], call.offset, q.device)
    s2 = _logits2(qc, kc, call).masked_fill(~visible, -math.inf)
    o, lse2, m2 = casts.FORWARD[fmt.p_forward](s2, vc, fmt, call.accumulate)
    o_saved = o.bfloat16().float() if fmt.o_saved == "bf16" else casts.per_tensor(o)
    empty = torch.isneginf(lse2).unsqueeze(-1)
    out = o_saved if v_mean is None else (o + v_mean).masked_fill(empty, 0.0).bfloat16().float()
    shift = lse2.new_zeros(lse2.shape) if k_mean is None else (qn * k_mean).sum(-1) * call.softmax_scale
    lse = lse2 / LOG2E + shift
    operands = ((qc, qn), (kc, k_used), (vc, v_used)) if count else ()
    counts = (
        torch.stack([_packed(casts.code_stats(c.codes, x, 448.0)) for c, x in operands])
        if count
        else lse.new_zeros(0, 5)
    )
    return Forward(
        _join(out, q.shape[0]),
        _join_rows(lse, q.shape[0]),
        Saved(qc, kc, vc, v_used if fmt.dp == "bf16" else None, o_saved, lse2, m2, shift, counts),
    )


def backward(saved: Saved, do: Tensor, call: Call, want_stats: bool = False) -> tuple[Grads, RowStats | None]:
    """Gradients of q, k, v for dO (B, T, H, D); RowStats too when asked for."""
    fmt = call.fmt
    batch, groups = do.shape[0], saved.k.codes.shape[0] // max(do.shape[0], 1)
    don = _split(do, groups)
    doc = quantise(don, fmt.q_block, fmt.grid_do)
    do_hat = doc.codes * doc.scale
    visible = visible_keys(don.shape[-2], saved.k.codes.shape[-2], call.offset, do.device)
    s2 = _logits2(saved.q, saved.k, call).masked_fill(~visible, -math.inf)
    p = torch.exp2(s2 - saved.lse2.masked_fill(torch.isneginf(saved.lse2), 0.0).unsqueeze(-1)).masked_fill(
        ~visible, 0.0
    )
    if saved.v_given is None:
        dp = dot(doc.codes, saved.v.codes, call.accumulate) * (doc.scale * saved.v.scale.transpose(-1, -2))
    else:
        dp = dot(don.bfloat16().float(), saved.v_given.bfloat16().float())
    dp = dp.masked_fill(~visible, 0.0)  # a bad value that a row does not see must not reach its delta
    d_stale = delta.stale(saved.o, do_hat if fmt.stale_do == "hat" else don)
    d_consistent = delta.consistent(saved.o, do_hat)
    d = {
        "stale": lambda: d_stale,
        "consistent": lambda: d_consistent,
        "matched": lambda: delta.matched(p, dp, d_consistent),
        "matched_plain": lambda: delta.matched_plain(p, dp),
    }[call.mode]()
    ds = (p * (dp - d.unsqueeze(-1))).masked_fill(~visible, 0.0)
    operands = casts.Operands(saved.q, saved.k, doc, saved.lse2, saved.m2)
    casted = casts.backward(p, ds, operands, fmt, call.accumulate, visible.sum())
    dq, dk, dv = casted.dq * call.softmax_scale, casted.dk * call.softmax_scale, casted.dv
    if fmt.grid_grad is not None:
        dq, dk, dv = (casts.per_tensor(x, fmt.grid_grad) for x in (dq, dk, dv))
    stats = None
    if want_stats:
        codes = {
            **{name: CodeStats(*row) for name, row in zip("qkv", saved.counts, strict=False)},
            "do": casts.code_stats(doc.codes, don, fmt.grid_do.max),
            "p": casted.p_stats,
            "ds": casted.ds_stats,
        }
        rows = _row_statistics(p, ds, casted.ds_hat, s2 / LOG2E + saved.shift.unsqueeze(-1), batch)
        stats = RowStats(
            **rows,
            delta=_join_rows(d, batch),
            delta_stale=_join_rows(d_stale, batch),
            delta_consistent=_join_rows(d_consistent, batch),
            key_col_sum=dk.sum((1, 2)).reshape(batch, groups, -1),
            key_abs_sum=dk.abs().sum((1, 2)).reshape(batch, groups, -1),
            codes=codes,
            backend=f"reference:{fmt.name}:{call.mode}",
        )
    return Grads(_join(dq, batch), _join(dk, batch), _join(dv, batch)), stats


def max_logit(saved: Saved, heads: int) -> Tensor:
    """The largest scaled, uncentred logit of each head, FP32 [H] over batch and visible pairs; -inf without one."""
    rows = saved.m2 / LOG2E + saved.shift  # [B * G, R, T]
    return rows.amax(-1).reshape(-1, heads).amax(0)


def visible_keys(t_q: int, t_k: int, offset: int | None, device: torch.device) -> Tensor:
    """Boolean [Tq, Tk]: may query i read key j?"""
    if offset is None:
        return torch.ones(t_q, t_k, dtype=torch.bool, device=device)
    return torch.arange(t_k, device=device)[None, :] <= torch.arange(t_q, device=device)[:, None] + offset


def _packed(c: CodeStats) -> Tensor:
    """The five numbers of a CodeStats in the order of its fields, FP64."""
    return torch.stack([x.double() for x in (c.amax, c.saturated, c.underflowed, c.nonfinite, c.count)])


def _logits2(q: Codes, k: Codes, call: Call) -> Tensor:
    """Scores in log2 units: fl(fl(scale_q * kappa) * scale_k) times the dot product of codes."""
    kappa = torch.tensor(call.softmax_scale * LOG2E, dtype=torch.float32, device=q.codes.device)
    return dot(q.codes, k.codes, call.accumulate) * ((q.scale * kappa) * k.scale.transpose(-1, -2))


def _row_statistics(p: Tensor, ds: Tensor, ds_hat: Tensor, logits: Tensor, batch: int) -> dict[str, Tensor]:
    """Row sums in FP64 (the sum of the FP32 numbers, not its own rounding), stored FP32 [B, H, T]; max_logit [B, H]."""
    log_p = torch.log(p.clamp(min=torch.finfo(torch.float32).tiny))
    rows = {
        "row_sum": ds.double().sum(-1).float(),
        "row_abs_sum": ds.abs().sum(-1, dtype=torch.float64).float(),
        "row_sum_cast": ds_hat.double().sum(-1).float(),
        "row_abs_sum_cast": ds_hat.abs().sum(-1, dtype=torch.float64).float(),
        "top_p": p.amax(-1) if p.shape[-1] else p.new_zeros(p.shape[:-1]),
        "entropy": -(p * log_p).sum(-1),
    }
    out = {name: _join_rows(x, batch) for name, x in rows.items()}
    top = logits.masked_fill(torch.isnan(logits), -math.inf).flatten(-2).amax(-1)
    out["max_logit"] = top.reshape(batch, -1)
    return out


def _split(x: Tensor, groups: int) -> Tensor:
    """(B, T, H, D) -> FP32 [B * G, H / G, T, D]."""
    b, t, h, d = x.shape
    return x.float().permute(0, 2, 1, 3).reshape(b * groups, h // groups, t, d)


def _join(x: Tensor, batch: int) -> Tensor:
    """[B * G, R, T, D] -> (B, T, G * R, D)."""
    n, r, t, d = x.shape
    return x.reshape(batch, (n // max(batch, 1)) * r, t, d).permute(0, 2, 1, 3)


def _join_rows(x: Tensor, batch: int) -> Tensor:
    """[B * G, R, T] -> (B, H, T)."""
    n, r, t = x.shape
    return x.reshape(batch, (n // max(batch, 1)) * r, t)
