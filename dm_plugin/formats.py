"""FP8 grids and the operand formats of FP8 attention.

A grid with e exponent bits (bias b) and m mantissa bits holds  +-(1 + i/2^m) 2^(x-b)  and, below 2^(1-b), the subnormals
+-(i/2^m) 2^(1-b). E4M3 (no infinity, one NaN code) reaches 448, E5M2 reaches 57344.

A `Format` says, operand by operand, which grid is used and over which block one scale is shared. Four records are kept:
`paper` (Delta-Matching, arXiv 2609.37852, section 3), `sm90` (this project's kernel), `stock` (Transformer Engine's
DelayedScaling FP8 attention on Hopper) and `stock_current` (the same with O kept in BF16).
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Grid:
    """A set of FP8 numbers. `max` is the largest finite value, `min_exp` the exponent of the smallest normal one."""

    name: str
    mantissa: int
    min_exp: int
    max: float

    @property
    def smallest(self) -> float:
        """The smallest positive number (a subnormal)."""
        return 2.0 ** (self.min_exp - self.mantissa)


E4M3 = Grid("e4m3", mantissa=3, min_exp=-6, max=448.0)
E5M2 = Grid("e5m2", mantissa=2, min_exp=-14, max=57344.0)


@dataclass(frozen=True)
class Format:
    """How each operand of attention is rounded.

    q_block, kv_block: tokens that share one scale, None for one scale a tensor.
    p_forward: `group` (per row and group of `p_group` keys), `tile` (per row and key tile, V scales folded, the kernel's),
        `fixed` (448 at the row maximum: the max shift).
    p_backward: `tile64` (64 x 64), `pow2` (one power of two for 128 queries), `fixed` (448 at P = 1).
    ds: `tile64`, `slab` (16 x 128 for dQ, 128 x 128 for dK), `row` (1 x 128 for dQ, 128 x 128 for dK), `tensor`.
    o_saved: what the saved-output deltas read, `bf16` or `e4m3` (per tensor; then the caller gets that O too).
    stale_do: the dO of the stale delta, the incoming one or its FP8 image (`hat`).
    dp: operands of dP, `hat` (FP8) or `bf16` (unquantised).
    grid_grad: the grid of dQ, dK and dV as they are handed out, one scale a tensor; None: not rounded.
    """

    name: str
    q_block: int | None = 128
    kv_block: int | None = 64
    grid_do: Grid = E4M3
    grid_ds: Grid = E4M3
    center_k: bool = True
    center_v: bool = False
    p_forward: Literal["group", "tile", "fixed"] = "group"
    p_group: int = 64
    p_backward: Literal["tile64", "pow2", "fixed"] = "tile64"
    ds: Literal["tile64", "slab", "row", "tensor"] = "tile64"
    o_saved: Literal["bf16", "e4m3"] = "bf16"
    stale_do: Literal["given", "hat"] = "given"
    dp: Literal["hat", "bf16"] = "hat"
    grid_grad: Grid | None = None

    def with_(self, **changes: object) -> "Format":
        """The same format with some fields changed; the name lists the changes."""
        tail = ",".join(f"{k}={getattr(v, 'name', v)}" for k, v in changes.items())
        return replace(self, name=f"{self.name}[{tail}]", **changes)  # type: ignore[arg-type]


PAPER = Format("paper")
SM90 = Format("sm90", center_v=True, p_forward="tile", p_backward="pow2", ds="slab")
STOCK = Format(
    "stock",
    q_block=None,
    kv_block=None,
    grid_do=E5M2,
    grid_ds=E5M2,
    center_k=False,
    p_forward="fixed",
    p_backward="fixed",
    ds="tensor",
    o_saved="e4m3",
    stale_do="hat",
    grid_grad=E5M2,
)
STOCK_CURRENT = replace(STOCK, name="stock_current", o_saved="bf16", stale_do="given", grid_grad=None)

FORMATS = {f.name: f for f in (PAPER, SM90, STOCK, STOCK_CURRENT)}


def get_format(fmt: str | Format) -> Format:
    """The record of that name (or the record itself). Raises ValueError for an unknown name."""
    if isinstance(fmt, Format):
        return fmt
    if fmt not in FORMATS:
        raise ValueError(
            f"fmt={fmt!r} is not a known format; use one of {', '.join(FORMATS)} or a formats.Format record"
        )
    return FORMATS[fmt]
