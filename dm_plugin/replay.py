"""Replay: what each delta would have given on the operands of a running job, whatever attention that job runs.

A capture holds q, k, v and dO of one sequence and a few heads, as core attention got them. Each arm runs them through the reference:
    stale, consistent, matched    the sm90 kernel's casts with that delta         stock    Transformer Engine's DelayedScaling casts
and gives, against FP64 attention on the same operands: row residuals before the cast, |delta - delta_matched| / |delta|, key-column sums,
errors of dQ, dK, dV, and the push of the residual on each channel's key gain
    push_c = sum_j k_jc (scale sum_i eps_i P_ij q_ic) = d loss / d ln g_k,c that is due to eps_i = sum_j dS_ij alone
(RoPE turns channel pairs into each other: only a pair's sum belongs to its two gains). CPU simulation of the casts, never the kernel.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reference, residuals
from .dump import DumpError, read_file
from .formats import SM90, STOCK, Format
from .recorder import to_numpy

ARMS: dict[str, tuple[Format, str]] = {
    "stale": (SM90, "stale"),
    "consistent": (SM90, "consistent"),
    "matched": (SM90, "matched"),
    "stock": (STOCK, "stale"),
}
TOKENS, HEADS = 1024, 4  # of one capture: a causal row needs only the keys before it, so a prefix is exact


class Capture(NamedTuple):
    """q, do [T, h, D], k, v [T, 1, D] in BF16 on the CPU: one sequence, one key head, some of its query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    causal: bool
    scale: float


class Exact(NamedTuple):
    """FP64 attention of a capture: P [h, T, T], dQ [T, h, D], dK and dV [T, 1, D]."""

    p: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact(c: Capture) -> Exact:
    """Softmax attention and its gradients in FP64."""
    q, do = (x.double().transpose(0, 1) for x in (c.q, c.do))
    k, v = (x.double()[:, 0] for x in (c.k, c.v))
    s = q @ k.T * c.scale
    if c.causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    p = s.softmax(-1)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    dk = torch.einsum("htj,htd->jd", ds, q) * c.scale
    dv = torch.einsum("htj,htd->jd", p, do)
    return Exact(p, (ds @ k * c.scale).transpose(0, 1), dk[:, None], dv[:, None])


def replay(c: Capture) -> dict[str, np.ndarray]:
    """Additive fields replay_{arm}.{field} of one capture (docs/dump-format.md)."""
    truth = exact(c)
    out: dict[str, Tensor] = {}
    for arm, (fmt, mode) in ARMS.items():
        call = reference.Call(fmt, c.scale, 0 if c.causal else None, mode)
        q, k, v, do = (x.unsqueeze(0) for x in (c.q, c.k, c.v, c.do))
        grads, stats = reference.backward(reference.forward(q, k, v, call).saved, do, call, want_stats=True)
        assert stats is not None and stats.row_sum is not None and stats.row_abs_sum is not None  # noqa: PT018
        assert stats.delta is not None and stats.key_col_sum is not None and stats.key_abs_sum is not None  # noqa: PT018
        rows = residuals.row_sum(stats.row_sum, stats.row_abs_sum)
        gap = residuals.row_sum(stats.row_sum, stats.delta.abs())
        column = residuals.key_col_sum(stats.key_col_sum, stats.key_abs_sum)
        fields = {"num": rows.num, "den": rows.den, "count": rows.count, "excluded": rows.excluded, "hist": rows.hist}
        fields |= {"gap_num": gap.num, "gap_den": gap.den, "col_num": column["num"], "col_den": column["den"]}
        for name, mine, right in zip(("dq", "dk", "dv"), grads, truth[1:], strict=True):
            fields[f"{name}_num"] = (mine[0].double() - right).square().sum((0, 2))
            fields[f"{name}_den"] = right.square().sum((0, 2))
        fields["push"], fields["push_sharpened"] = push(c, truth.p, stats.row_sum[0].double())
        fields["push_abs"] = fields["push"].abs()
        out |= {f"replay_{arm}.{name}": x for name, x in fields.items()}
    return {name: to_numpy(x) for name, x in out.items()}


def push(c: Capture, p: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """push_c [D] from all rows, and from the rows that the residual sharpens (eps_i < 0). p [h, T, T], eps [h, T]."""
    mean_key = p @ c.k.double()[:, 0]  # [h, T, D]
    each = eps.unsqueeze(-1) * c.q.double().transpose(0, 1) * mean_key * c.scale
    return each.sum((0, 1)), (each * (eps < 0).unsqueeze(-1)).sum((0, 1))


# ------------------------------------------------------------------------------------------------ files
def pack(site: str, c: Capture) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, description) of a capture for a file: BF16 bits as U16, which numpy can hold."""
    arrays = {f"{site}/capture.{n}": to_bits(x) for n, x in zip(("q", "k", "v", "do"), c[:4], strict=True)}
    return arrays, {"causal": c.causal, "scale": c.scale}


def to_bits(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)


def load(path: Path | str) -> tuple[dict[str, str], dict[str, Capture]]:
    """(metadata, site -> capture) of a capture file. Raises DumpError kinds, also for a dump that holds no capture."""
    metadata, arrays = read_file(path)
    described: Mapping[str, Any] = json.loads(metadata.get("dm_plugin.captures", "{}"))
    if not described:
        raise DumpError(f"{path} holds no captured operands; ask for them with `dm-plugin probe start RUN --replay`")
    captures = {}
    for site, about in described.items():
        q, k, v, do = (from_bits(arrays[f"{site}/capture.{n}"]) for n in ("q", "k", "v", "do"))
        captures[site] = Capture(q, k, v, do, bool(about["causal"]), float(about["scale"]))
    return metadata, captures


# ------------------------------------------------------------------------------------------------ capturing
def sample(q: Tensor, k: Tensor, v: Tensor, do: Tensor, step: int, causal: bool, scale: float) -> Capture:
    """A capture of q, do (T, B, H, D), k, v (T, B, G, D): the first sequence, key head `step` modulo G and up to HEADS of its queries.

    Raises ValueError where a prefix would be another problem than the job's.
    """
    if not causal and k.shape[0] > TOKENS:
        raise ValueError(f"full attention over {k.shape[0]} keys is too long to replay (at most {TOKENS})")
    if causal and q.shape[0] != k.shape[0]:
        raise ValueError(f"{q.shape[0]} queries over {k.shape[0]} keys are not replayed")
    group = step % k.shape[2]
    first = group * (q.shape[2] // k.shape[2])
    heads = slice(first, first + min(HEADS, q.shape[2] // k.shape[2]))
    pick = lambda x, h: x[:TOKENS, 0, h].detach().to(torch.bfloat16, copy=True)  # noqa: E731
    one = slice(group, group + 1)
    return Capture(pick(q, heads), pick(k, one), pick(v, one), pick(do, heads), causal, scale)
