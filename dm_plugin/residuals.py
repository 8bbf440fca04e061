"""Residuals of the softmax invariant as additive sums, so that microbatches, ranks and steps merge by addition.

    row_sum       |sum_j dS_ij| / sum_j |dS_ij|      per query row: num, den, count per head, and a log10 histogram of the ratio
    signed        eps_i = sum_j dS_ij < 0 sharpens the row (its largest P grows), > 0 flattens it
    key_col_sum   |sum_j dK_jc| / sum_j |dK_jc|      per key head and channel
    gain_share    share of sum_c (g_q,c g_k,c)^2 held by its largest channels

Ratios and medians are formed only at review. A row with sum_j |dS_ij| = 0 (one key, zero gradient) has no ratio: it is excluded and
counted. A non-finite row goes to the last histogram bin and nowhere else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG10_LOW = -10.0
BINS_PER_DECADE = 20
N_BINS = 240
HIST_SIZE = N_BINS + 2  # [0] below 1e-10 and zero, [241] above 1e2 and non-finite
TOP_P_EDGES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Sums:
    """num, den (FP64), count, excluded (I64): [H]; hist [242], hist_top_p [5, 242] (I64)."""

    num: Tensor
    den: Tensor
    count: Tensor
    excluded: Tensor
    hist: Tensor
    hist_top_p: Tensor | None


def row_sum(total: Tensor, absolute: Tensor, top_p: Tensor | None = None) -> Sums:
    """Sums of rows from sum_j dS and sum_j |dS|, both [B, H, T]; by top probability too when top_p [B, H, T] is given."""
    num, den = total.abs(), absolute
    finite = torch.isfinite(num) & torch.isfinite(den)
    empty = den == 0
    valid = finite & ~empty
    bins = histogram_bins(torch.where(finite, num / den, float("nan")))
    weight = (~empty).long()
    hist = _histogram(bins, weight, HIST_SIZE)
    by_top = None
    if top_p is not None:
        # compared edge by edge: a tensor of edges would be copied to the device, and the host would wait for it
        bucket = torch.stack([~(top_p < edge) for edge in TOP_P_EDGES]).sum(0)
        by_top = _histogram(bucket * HIST_SIZE + bins, weight, 5 * HIST_SIZE).reshape(5, HIST_SIZE)
    return Sums(
        per_head(num.masked_fill(~valid, 0.0)),
        per_head(den.masked_fill(~valid, 0.0)),
        valid.sum((0, 2)),
        empty.sum((0, 2)),
        hist,
        by_top,
    )


def histogram_bins(ratio: Tensor) -> Tensor:
    """Index of each ratio's bin, 0 .. 241 (I64)."""
    place = torch.floor((torch.log10(ratio.double()) - LOG10_LOW) * BINS_PER_DECADE) + 1
    place = torch.where(torch.isfinite(ratio), place, float(HIST_SIZE - 1))
    return place.clamp(0, HIST_SIZE - 1).long()


def per_head(x: Tensor) -> Tensor:
    """[B, H, T] -> FP64 sum [H]."""
    return x.sum((0, 2), dtype=torch.float64)


def signed(total: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
    """Counts of sharpened (eps < 0) and flattened (eps > 0) rows per head, and the entropy sums of both kinds."""
    sharp, flat = total < 0, total > 0
    out = {"sharpened": sharp.sum((0, 2)), "flattened": flat.sum((0, 2))}
    if entropy is not None:
        finite = torch.isfinite(entropy)
        out["entropy_sharpened"] = per_head(entropy.masked_fill(~(sharp & finite), 0.0))
        out["entropy_flattened"] = per_head(entropy.masked_fill(~(flat & finite), 0.0))
    return out


def key_col_sum(total: Tensor, absolute: Tensor) -> dict[str, Tensor]:
    """From signed and absolute sums over keys, [B, G, D]: the absolute value is taken per sequence and head, then added."""
    finite = torch.isfinite(total) & torch.isfinite(absolute)
    return {
        "num": total.abs().masked_fill(~finite, 0.0).sum(0, dtype=torch.float64),
        "den": absolute.masked_fill(~finite, 0.0).sum(0, dtype=torch.float64),
        "count": torch.full((), total.shape[0], dtype=torch.long, device=total.device),
        "excluded": (~finite).sum(),
    }


def gain_share(g_q: Tensor, g_k: Tensor, top: int = 1) -> Tensor:
    """Share of sum_c (g_q,c g_k,c)^2 held by the `top` largest channels, FP64 0-d; 0 when every gain is zero.

    g_q, g_k: effective gains [D] (1 + w where the norm stores its gain minus one).
    """
    weight = (g_q.double() * g_k.double()).square()
    total = weight.sum()
    return torch.where(total > 0, weight.topk(min(top, weight.numel())).values.sum() / total.clamp(min=1e-300), 0.0)


def _histogram(bins: Tensor, weight: Tensor, size: int) -> Tensor:
    """Integer histogram without a device sync (bincount needs one)."""
    return torch.zeros(size, dtype=torch.long, device=bins.device).scatter_add_(0, bins.reshape(-1), weight.reshape(-1))
