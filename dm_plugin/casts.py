"""Where P and dS become FP8, for each way a `Format` names, and the contractions that follow.

A cast gives codes and a scale, both [..., Tq, Tk], with  x_hat = codes * scale.
    group   per row and group of keys: scale = amax / 448          fixed   P_hat = code / 448, the row maximum of P~ sits at 448
    tile64  64 x 64 tiles: scale = amax / max                       tensor  one scale for the whole tensor
    tile    per row and key tile, code = E4M3(2^(s - B) * 448 * rho), B the tile's own row maximum, rho the folded V scale ratio
    pow2    code = E4M3(P 2^E), E = 8 + max(0, floor(min_i (lse2_i - m2_i))) over 128 queries
    slab    dQ: 16 rows x one key tile, K scale ratio folded in; dK: 128 x 128        row  the same with 1 row for dQ
The last four are the sm90 kernel's; a key tile is 128 keys (64 at D = 256, where nothing is folded).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .accumulate import Accumulate, dot
from .formats import E4M3, Format, Grid
from .quantise import Codes, block_scale, finite_amax, round_to_grid
from .stats import CodeStats

LOG2_448 = math.log2(448.0)
KV_BLOCK = 64
Q_BLOCK = 128
SLAB = 16
MAX_FOLD = 16.0  # two V (or K) scales are folded into one promotion only when they differ by no more than this


class Cast(NamedTuple):
    """codes and scale [..., Tq, Tk]; x_hat = codes * scale."""

    codes: Tensor
    scale: Tensor


class Fold(NamedTuple):
    """Per 64-key block: rho multiplies the value before the cast; pairs: the two blocks of a tile share one promotion."""

    rho: Tensor  # [..., Tk]
    pairs: Tensor | None  # [..., tiles] bool


class Operands(NamedTuple):
    """What the backward contractions read, and the log2 row statistics of forward."""

    q: Codes
    k: Codes
    do: Codes
    lse2: Tensor
    m2: Tensor


class Backward(NamedTuple):
    """Products of the cast P and dS without softmax_scale; dq [N, R, Tq, D], dk and dv [N, 1, Tk, D]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    ds_hat: Tensor
    p_stats: CodeStats
    ds_stats: CodeStats


def key_tile(head_dim: int) -> int:
    """Keys of one tile of the kernel's query-stationary passes."""
    return 128 if head_dim <= 128 else 64


def code_stats(codes: Tensor, values: Tensor, top: float, visible: Tensor | None = None) -> CodeStats:
    """amax over finite values; saturated: |code| at the largest; underflowed: code 0 of a non-zero value. 0-d tensors, no sync.

    visible: number of query-key pairs that a [..., Tq, Tk] tensor really has; its hidden entries are zeros and count as nothing.
    """
    whole = torch.tensor(codes.numel(), device=codes.device)
    count = whole if visible is None else visible * math.prod(codes.shape[:-2])
    finite = torch.isfinite(values)
    amax = torch.where(finite, values.abs(), 0.0).amax() if values.numel() else values.new_zeros(())
    return CodeStats(
        amax=amax,
        saturated=(codes.abs() == top).sum(),
        underflowed=((codes == 0) & (values != 0)).sum(),
        nonfinite=torch.isnan(codes).sum(),
        count=count,
    )


def tile_amax(x: Tensor, rows: int, cols: int) -> Tensor:
    """Finite amax of each rows x cols tile, spread back over the tile: same shape as x."""
    m, n = x.shape[-2:]
    full = pad(torch.where(torch.isfinite(x), x.abs(), 0.0), (0, -n % cols, 0, -m % rows))
    tiles = full.unflatten(-2, (-1, rows)).unflatten(-1, (-1, cols)).amax(dim=(-3, -1))
    return tiles.repeat_interleave(rows, -2)[..., :m, :].repeat_interleave(cols, -1)[..., :n]


def per_tensor(x: Tensor, grid: Grid = E4M3) -> Tensor:
    """x through an FP8 grid with one scale for the whole tensor, dequantised."""
    if x.numel() == 0:
        return x
    scale, inv = block_scale(finite_amax(x.reshape(-1), 0).reshape((1,) * x.dim()), grid)
    return round_to_grid(x * inv, grid) * scale


# ------------------------------------------------------------------------------------------------ forward
def forward_group(s2: Tensor, v: Codes, fmt: Format, how: Accumulate) -> tuple[Tensor, Tensor, Tensor]:
    """P per row and group of keys (`group`) or relative to the row maximum (`fixed`). -> o, lse2, m2."""
    m2 = s2.amax(-1)
    p = torch.exp2(s2 - m2.masked_fill(torch.isneginf(m2), 0.0).unsqueeze(-1))
    if fmt.p_forward == "fixed":
        p_hat = round_to_grid(p * 448.0) / 448.0
    else:
        scale, inv = block_scale(tile_amax(p, 1, fmt.p_group))
        p_hat = round_to_grid(p * inv) * scale
    l = p.sum(-1)
    v_hat = v.codes * v.scale
    o = dot(p_hat, v_hat.transpose(-1, -2), how) / l.masked_fill(l == 0, 1.0).unsqueeze(-1)
    return o, m2 + torch.log2(l), m2


def forward_tile(s2: Tensor, v: Codes, fmt: Format, how: Accumulate) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's forward: each key tile is cast relative to its own row maximum. -> o, lse2, m2."""
    tile, t_k = key_tile(v.codes.shape[-1]), s2.shape[-1]
    base = pad(s2, (0, -t_k % tile), value=-math.inf).unflatten(-1, (-1, tile)).amax(-1)  # B [..., Tq, tiles]
    empty = torch.isneginf(base)
    m2 = base.amax(-1)
    spread = base.masked_fill(empty, 0.0).repeat_interleave(tile, -1)[..., :t_k]
    fold = fold_scales(v, tile)
    rho = fold.rho.unsqueeze(-2)
    p = torch.exp2(s2 + (LOG2_448 - spread + torch.log2(rho)))
    codes = round_to_grid(p)
    weight = torch.exp2(base - m2.masked_fill(torch.isneginf(m2), 0.0).unsqueeze(-1)).masked_fill(empty, 0.0)
    weight = weight.repeat_interleave(tile, -1)[..., :t_k]
    l = (p / rho * weight).sum(-1)
    o = contract(Cast(codes, weight / rho), v, fold.pairs, KV_BLOCK, how)
    o = o / l.masked_fill(l == 0, 1.0).unsqueeze(-1)
    return o, m2 + torch.log2(l) - LOG2_448, m2


FORWARD = {"group": forward_group, "fixed": forward_group, "tile": forward_tile}


# ------------------------------------------------------------------------------------------------ backward
def backward(p: Tensor, ds: Tensor, x: Operands, fmt: Format, how: Accumulate, visible: Tensor) -> Backward:
    """Cast P for dV and dS for dQ and dK, and contract. p, ds [N, R, Tq, Tk], masked entries exactly 0; visible: pairs per head."""
    head_dim = x.q.codes.shape[-1]
    p_cast = cast_p(p, x, fmt)
    tile = key_tile(head_dim)
    kernel = fmt.ds in ("slab", "row")
    fold = fold_scales(x.k, tile) if kernel else Fold(ds.new_ones(ds.shape[-1]), None)
    ds_q = cast_ds(ds, fmt, fold, tile)
    ds_k = cast_tiles(ds, Q_BLOCK, Q_BLOCK, fmt.grid_ds) if kernel else ds_q
    dq = contract(ds_q, x.k, fold.pairs, KV_BLOCK, how)
    dk = contract(_transpose(ds_k), x.q, None, Q_BLOCK if head_dim <= 128 else 64, how).sum(1, keepdim=True)
    dv = contract(_transpose(p_cast), x.do, None, Q_BLOCK, how).sum(1, keepdim=True)
    return Backward(
        dq,
        dk,
        dv,
        ds_q.codes * ds_q.scale,
        code_stats(p_cast.codes, p, 448.0, visible),
        code_stats(ds_q.codes, ds, fmt.grid_ds.max, visible),
    )


def cast_p(p: Tensor, x: Operands, fmt: Format) -> Cast:
    """P for dV."""
    if fmt.p_backward == "tile64":
        return cast_tiles(p, KV_BLOCK, KV_BLOCK, E4M3)
    if fmt.p_backward == "fixed":
        return Cast(round_to_grid(p * 448.0), torch.full_like(p, 1 / 448.0))
    e = p_exponent(x.lse2, x.m2).unsqueeze(-1)
    return Cast(round_to_grid(p * torch.exp2(e)), torch.exp2(-e).expand_as(p))


def p_exponent(lse2: Tensor, m2: Tensor) -> Tensor:
    """E of each query's 128-query block, [..., Tq]: P 2^E <= 256 in every row, well above E4M3's subnormals for long flat rows."""
    gap = (lse2 - m2).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    t_q = gap.shape[-1]
    low = pad(gap, (0, -t_q % Q_BLOCK), value=math.inf).unflatten(-1, (-1, Q_BLOCK)).amin(-1)
    e = 8.0 + torch.where(torch.isinf(low), 0.0, low.floor().clamp(min=0.0))
    return e.repeat_interleave(Q_BLOCK, -1)[..., :t_q]


def cast_ds(ds: Tensor, fmt: Format, fold: Fold, tile: int) -> Cast:
    """dS as dQ's contraction sees it."""
    if fmt.ds == "tile64":
        return cast_tiles(ds, KV_BLOCK, KV_BLOCK, fmt.grid_ds)
    if fmt.ds == "tensor":
        scale, inv = block_scale(finite_amax(ds.reshape(-1), 0).reshape((1,) * ds.dim()), fmt.grid_ds)
        return Cast(round_to_grid(ds * inv, fmt.grid_ds), scale.expand_as(ds))
    scale, inv = block_scale(tile_amax(ds, SLAB if fmt.ds == "slab" else 1, tile), fmt.grid_ds)
    rho = fold.rho.unsqueeze(-2)
    return Cast(round_to_grid(ds * (inv * rho), fmt.grid_ds), scale / rho)


def cast_tiles(x: Tensor, rows: int, cols: int, grid: Grid) -> Cast:
    """One scale a rows x cols tile."""
    scale, inv = block_scale(tile_amax(x, rows, cols), grid)
    return Cast(round_to_grid(x * inv, grid), scale)


def fold_scales(c: Codes, tile: int) -> Fold:
    """The ratio of each 64-key scale to its tile's larger one, where both blocks hold something and the ratio is at most 16."""
    t_k = c.codes.shape[-2]
    ones = torch.ones_like(c.codes[..., 0])
    if tile == KV_BLOCK:
        return Fold(ones, None)
    filled = (
        pad(torch.nan_to_num(c.codes).abs().amax(-1), (0, -t_k % tile)).unflatten(-1, (-1, 2, KV_BLOCK)).amax(-1) > 0
    )
    blocks = pad(c.scale[..., 0].expand_as(ones), (0, -t_k % tile), value=1.0).unflatten(-1, (-1, 2, KV_BLOCK))[..., 0]
    low, high = blocks.amin(-1), blocks.amax(-1)
    pairs = filled.all(-1) & (high <= MAX_FOLD * low)
    rho = torch.where(pairs.unsqueeze(-1), blocks / high.unsqueeze(-1), 1.0)
    return Fold(rho.flatten(-2).repeat_interleave(KV_BLOCK, -1)[..., :t_k], pairs)


def contract(x: Cast, y: Codes, pairs: Tensor | None, unit: int, how: Accumulate) -> Tensor:
    """x_hat (..., M, K) times y_hat (..., K, N).

    `hopper` runs the tensor core's chains: `unit` tokens (two units where `pairs` says so) from zero, then one FP32 promotion
    o <- o + t * weight. `exact` needs no chains.
    """
    if how == "exact":
        return dot(x.codes * x.scale, (y.codes * y.scale).transpose(-1, -2))
    k = x.codes.shape[-1]
    y_scale = y.scale.expand(*y.codes.shape[:-1], 1)
    out: Tensor = torch.zeros((), device=x.codes.device)
    units = -(-k // unit)
    chain: Tensor | None = None
    for u in range(units):
        part = slice(u * unit, min((u + 1) * unit, k))
        init = None
        if pairs is not None and u % 2 == 1 and chain is not None:
            init = torch.where(pairs[..., u // 2, None, None], chain, 0.0)
        chain = dot(x.codes[..., part], y.codes[..., part, :].transpose(-1, -2), how, init)
        weight = x.scale[..., part.start, None] * y_scale[..., part.start, None, :]
        promoted = chain * weight
        if pairs is not None and u % 2 == 0 and u + 1 < units:
            promoted = torch.where(pairs[..., u // 2, None, None], 0.0, promoted)
        out = out + promoted
    return out


def _transpose(c: Cast) -> Cast:
    return Cast(c.codes.transpose(-1, -2), c.scale.transpose(-1, -2))
