"""What one backward pass of attention hands to a probe.

For each query row i, with dS_ij = P_ij (dP_hat_ij - delta_i) before the softmax scale:
    row_sum_i = sum_j dS_ij      row_abs_sum_i = sum_j |dS_ij|      (and both again after the FP8 cast of dS)
and for each key channel c, from dK in FP32:  key_col_sum_c = sum_j dK_jc,  key_abs_sum_c = sum_j |dK_jc|.
In exact arithmetic every row_sum and key_col_sum is zero. A field that a backend cannot give is None, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CodeStats:
    """How an operand met its FP8 grid. 0-d tensors: amax of the finite values; numbers of codes at the largest magnitude, of zero codes
    of non-zero values, of non-finite values, and of all codes."""

    amax: Tensor
    saturated: Tensor
    underflowed: Tensor
    nonfinite: Tensor
    count: Tensor


@dataclass(frozen=True)
class RowStats:
    """Row statistics FP32 [B, H, T] unless said: max_logit [B, H] (scaled logits, natural units); key sums [B, G, D]; codes keyed by
    q, k, v, p, do, ds; entropy in nats; `delta` is the one that was subtracted; backend names what ran."""

    row_sum: Tensor | None = None
    row_abs_sum: Tensor | None = None
    row_sum_cast: Tensor | None = None
    row_abs_sum_cast: Tensor | None = None
    delta: Tensor | None = None
    delta_stale: Tensor | None = None
    delta_consistent: Tensor | None = None
    top_p: Tensor | None = None
    entropy: Tensor | None = None
    max_logit: Tensor | None = None
    key_col_sum: Tensor | None = None
    key_abs_sum: Tensor | None = None
    codes: dict[str, CodeStats] | None = None
    backend: str = ""
