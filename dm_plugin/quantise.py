"""Block-scaled FP8 quantisation.

    amax = max |x| over the block's finite entries,  scale = amax / max(grid),  inv = max(grid) / amax   (both FP32, RN)
    code = RN-even, saturating, on the grid of  x * inv,      x_hat = code * scale

amax = 0 (an all-zero or empty block) gives scale = inv = 1. A non-finite entry becomes NaN in its own place, is counted, and does not
enter amax. Codes are kept as FP32 tensors of grid values: exact, and any device can multiply them.
Source: Delta-Matching (arXiv 2609.37852) section 3; the order of operations is the kernel's, bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import E4M3, Grid


class Codes(NamedTuple):
    """codes: grid values, FP32, in the shape of the input. scale: FP32, one a block, broadcastable to `codes`."""

    codes: Tensor
    scale: Tensor


_TORCH_DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def round_to_grid(x: Tensor, grid: Grid = E4M3) -> Tensor:
    """Round FP32 to the grid: nearest even, saturating at +-max, non-finite to NaN. Shape and device are kept."""
    code = x.clamp(-grid.max, grid.max).to(_TORCH_DTYPE[grid.name]).float()  # torch's own cast turns > 464 into NaN
    return torch.where(torch.isfinite(x), code, float("nan"))


def block_scale(amax: Tensor, grid: Grid = E4M3) -> tuple[Tensor, Tensor]:
    """(scale, inv) of blocks with the given amax, FP32; both 1 where amax is 0."""
    zero = amax == 0
    top = torch.full_like(amax, grid.max)
    scale = torch.where(zero, 1.0, amax / top)
    inv = torch.where(zero, 1.0, top / amax)
    # a subnormal amax overflows max/amax: such a block is below FP8's reach and is stored as zeros with scale 1
    tiny = ~torch.isfinite(inv)
    return torch.where(tiny, 1.0, scale), torch.where(tiny, 0.0, inv)


def finite_amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """max |x| over the finite entries along `dim`, kept as size 1; 0 where there is none."""
    return torch.where(torch.isfinite(x), x.abs(), 0.0).amax(dim=dim, keepdim=True)


def quantise(x: Tensor, block: int | None, grid: Grid = E4M3) -> Codes:
    """Quantise (..., T, D) with one scale for `block` tokens (all D channels), or one a tensor for block=None.

    Returns Codes with scale (..., T, 1), or a single-element scale with as many dimensions as x. Any T, zero included.
    """
    x = x.float()
    if x.numel() == 0:
        return Codes(x, torch.ones_like(x[..., :1]))
    if block is None:
        scale, inv = block_scale(finite_amax(x.reshape(-1), 0).reshape((1,) * x.dim()), grid)
        return Codes(round_to_grid(x * inv, grid), scale)
    tokens = x.shape[-2]
    amax = finite_amax(x, -1)  # [..., T, 1]
    pad = -tokens % block
    padded = torch.nn.functional.pad(amax, (0, 0, 0, pad)).unflatten(-2, (-1, block))
    per_block = padded.amax(dim=-2, keepdim=True).expand_as(padded).flatten(-3, -2)[..., :tokens, :]
    scale, inv = block_scale(per_block, grid)
    return Codes(round_to_grid(x * inv, grid), scale)


def dequantise(c: Codes) -> Tensor:
    """x_hat = codes * scale, FP32."""
    return c.codes * c.scale


def token_mean(x: Tensor) -> Tensor:
    """Mean over tokens of (..., T, D) in FP32: 64-token partial sums, then their sum; non-finite entries count as 0.

    Returns (..., 1, D). Attention is unchanged by k -> k - mean (each row of logits moves by a constant) and by v -> v - mean
    (the rows of P sum to one, so O gains the mean back).
    """
    x = torch.where(torch.isfinite(x), x.float(), 0.0)
    tokens = x.shape[-2]
    if tokens == 0:
        return x.new_zeros((*x.shape[:-2], 1, x.shape[-1]))
    partial = torch.nn.functional.pad(x, (0, 0, 0, -tokens % 64)).unflatten(-2, (-1, 64)).sum(-2)
    return partial.sum(-2, keepdim=True) / tokens
