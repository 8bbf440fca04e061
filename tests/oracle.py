"""FP64 attention with an explicit dS, the truth that every other path is measured against.

S = q k^T scale    P = softmax(S)    dS = P (dP - sum_j P dP)    dQ = dS k scale    dK = dS^T q scale    dV = P^T dO
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Oracle(NamedTuple):
    o: Tensor  # (B, T, H, D)
    lse: Tensor  # (B, H, T)
    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds: Tensor  # [B, H, Tq, Tk]
    p: Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, offset: int | None = 0, scale: float | None = None
) -> Oracle:
    """q, do (B, T, H, D), k, v (B, Tk, G, D); key j visible iff j <= i + offset, all keys for offset=None."""
    rep = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    qd, dod = (x.double().transpose(1, 2) for x in (q, do))
    kd, vd = (x.double().transpose(1, 2).repeat_interleave(rep, 1) for x in (k, v))
    s = qd @ kd.transpose(-1, -2) * scale
    if offset is not None:
        hidden = torch.arange(k.shape[1])[None] > torch.arange(q.shape[1])[:, None] + offset
        s = s.masked_fill(hidden.to(s.device), -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    dp = dod @ vd.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    group = lambda x: x.unflatten(1, (-1, rep)).sum(2).transpose(1, 2)  # noqa: E731
    return Oracle(
        (p @ vd).transpose(1, 2),
        lse,
        (ds @ kd * scale).transpose(1, 2),
        group(ds.transpose(-1, -2) @ qd * scale),
        group(p.transpose(-1, -2) @ dod),
        ds,
        p,
    )


def rel(x: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN never passes a comparison."""
    return float((x.double() - truth.double()).norm() / truth.double().norm())
