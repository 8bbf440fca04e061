"""Dot products of FP8 codes, as exact arithmetic and as Hopper's tensor core computes them.

`exact`   sum_k a_k b_k in FP64, rounded to FP32 once (a product of two codes has at most 8 significant bits).
`hopper`  wgmma.m64nNk32 with e4m3 operands. The contraction is cut into groups of 32; for each group, with accumulator C,
              E = max(exponent(a_k) + exponent(b_k), exponent(C))          (subnormal codes have exponent -6)
              C <- cut( sum_k trunc(a_k b_k, 2^(E-13)) + trunc(C, 2^(E-13)) )
          where trunc cuts toward zero to a multiple of the quantum and cut keeps 13 fraction bits of the result. The order inside
          a group does not matter. Measured on an H200; this model equals the hardware bit for bit.
"""

from typing import Literal

import torch
from torch import Tensor

Accumulate = Literal["exact", "hopper"]
GROUP = 32
FRACTION_BITS = 13
_CHUNK = 1 << 24  # products held at once by the hopper model


def dot(a: Tensor, b: Tensor, how: Accumulate = "exact", init: Tensor | None = None) -> Tensor:
    """a (..., M, K) times b (..., N, K)^T -> FP32 (..., M, N), continuing from `init` when given.

    A NaN in `b` reaches only the rows of the result whose `a` is not zero there: a masked probability is exactly zero and must
    not be poisoned by a key that it does not see.
    """
    poison = None
    if torch.isnan(b).any():
        bad = torch.isnan(b)
        poison = ((a != 0).float() @ bad.float().transpose(-1, -2)) > 0
        b = b.masked_fill(bad, 0.0)
    if how == "exact":
        out = (a.double() @ b.double().transpose(-1, -2)).float()
        out = out if init is None else out + init
    else:
        out = hopper_dot(a, b, init)
    return out if poison is None else out.masked_fill(poison, float("nan"))


def hopper_dot(a: Tensor, b: Tensor, init: Tensor | None = None) -> Tensor:
    """The hopper model. a (..., M, K), b (..., N, K): FP32 tensors of E4M3 values. Returns FP32 (..., M, N)."""
    pad = -a.shape[-1] % GROUP
    a, b = (torch.nn.functional.pad(x.float(), (0, pad)) for x in (a, b))
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    m, n = a.shape[-2], b.shape[-2]
    out = a.new_zeros(a.shape[0], m, n) if init is None else init.float().expand(*batch, m, n).reshape(-1, m, n).clone()
    ea, eb = _exponent(a), _exponent(b)
    rows = max(1, _CHUNK // max(1, n * GROUP))
    for i in range(a.shape[0]):
        for r in range(0, m, rows):
            part = slice(r, r + rows)
            for g in range(0, a.shape[-1], GROUP):
                k = slice(g, g + GROUP)
                out[i, part] = _group(a[i, part, k], b[i, :, k], ea[i, part, k], eb[i, :, k], out[i, part])
    return out.reshape(*batch, m, n)


def _exponent(x: Tensor) -> Tensor:
    """Exponent field of an E4M3 value (-6 for subnormals), FP32; -500 for zero so that it never wins a maximum."""
    _, e = torch.frexp(x)
    return torch.where(x == 0, -500.0, (e - 1).clamp(min=-6).float())


def _group(a: Tensor, b: Tensor, ea: Tensor, eb: Tensor, c: Tensor) -> Tensor:
    """One k=32 instruction: a, ea (M, 32), b, eb (N, 32), accumulator c (M, N)."""
    products = a[:, None, :] * b[None, :, :]
    _, ec = torch.frexp(c)
    top = torch.maximum((ea[:, None, :] + eb[None, :, :]).amax(-1), torch.where(c == 0, -500.0, (ec - 1).float()))
    bits = FRACTION_BITS - top.clamp(min=-100.0)
    to_quanta = torch.exp2(bits)  # a power of two: every product and quotient below is exact
    total = (products * to_quanta[..., None]).trunc().sum(-1) + (c * to_quanta).trunc()
    _, es = torch.frexp(total)
    quantum = torch.exp2((es - 1 - FRACTION_BITS).clamp(min=0).float())
    return (total / quantum).trunc() * quantum / to_quanta
