"""Context parallelism by gathered keys: each rank keeps its queries and reads all keys.

Megatron and Transformer Engine give rank r the chunks r and 2 cp - 1 - r of 2 cp equal chunks. Keys and values are gathered and put in
natural order, so their FP8 codes are those of one device; each of the two query chunks then attends with its own causal offset (its first
position). The delta is a quantity of one row over all keys, hence whole on one rank: nothing but dK and dV is reduced.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dm_plugin.attention import Tap, dm_attn_func
from dm_plugin.stats import CodeStats, RowStats


def attend_over_context(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any,
    causal: bool,
    tap: Tap | None,
    options: dict[str, Any],
    return_max_logit: bool = False,
) -> Any:
    """Local query [Tq/cp, B, H, D], key and value [Tk/cp, B, G, D] -> [Tq/cp, B, H, D].

    With return_max_logit also the largest scaled logit of each head [H] over the whole sequence, the same on every rank.
    """
    if query.shape[0] % 2:
        raise ValueError(
            f"context parallelism needs an even number of tokens on each rank, got {query.shape[0]}; pad the sequence"
        )
    merge = _Merge(tap, group.rank() == 0) if tap is not None else None
    key = _GatherTokens.apply(key, group, merge.keys if merge is not None else None)
    value = _GatherTokens.apply(value, group, None)
    k, v = key.transpose(0, 1), value.transpose(0, 1)
    half = query.shape[0] // 2
    starts = (group.rank() * half, (2 * group.size() - 1 - group.rank()) * half)
    parts: list[Tensor] = []
    tops: list[Tensor] = []
    for i, (chunk, start) in enumerate(zip(query.split(half), starts, strict=True)):
        part_tap = merge.rows(i) if merge is not None else None
        offset = start if causal else None
        out = dm_attn_func(
            chunk.transpose(0, 1),
            k,
            v,
            causal,
            causal_offset=offset,
            tap=part_tap,
            return_max_logit=return_max_logit,
            **options,
        )
        parts.append(out[0] if return_max_logit else out)
        if return_max_logit:
            tops.append(out[1])
    out = torch.cat(parts, 1).transpose(0, 1)
    if not return_max_logit:
        return out
    top = torch.maximum(*tops)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return out, top


class _GatherTokens(torch.autograd.Function):
    """[T/cp, ...] of each rank -> [T, ...] in natural order; backward adds the ranks' gradients and returns this rank's chunks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, on_gradient: Callable[[Tensor], None] | None) -> Tensor:
        ctx.group, ctx.on_gradient = group, on_gradient
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        halves = [p.chunk(2) for p in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        if ctx.on_gradient is not None:
            ctx.on_gradient(gradient)
        chunks = gradient.chunk(2 * ctx.group.size())
        rank = ctx.group.rank()
        return torch.cat([chunks[rank], chunks[2 * ctx.group.size() - 1 - rank]]), None, None


_ROWS = (
    *("row_sum", "row_abs_sum", "row_sum_cast", "row_abs_sum_cast"),
    *("delta", "delta_stale", "delta_consistent", "top_p", "entropy"),
)


class _Merge:
    """One RowStats from the two query chunks and the reduced key gradient.

    No collective of its own: ranks may begin to probe on different steps. Key sums come from the gradient that backward has reduced over
    all ranks (in its dtype) and are handed out on the first rank alone, so that adding ranks up counts them once.
    """

    def __init__(self, tap: Tap, first_rank: bool) -> None:
        self.tap, self.first_rank = tap, first_rank
        self.parts: dict[int, RowStats] = {}

    def rows(self, index: int) -> Tap:
        return lambda stats: self.parts.__setitem__(index, stats)

    def keys(self, dk: Tensor) -> None:
        """Called with the whole dK [T, B, G, D], after both chunks."""
        a, b = self.parts[0], self.parts[1]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(a, name), getattr(b, name)], -1) for name in _ROWS if getattr(a, name) is not None
        }
        codes = None
        if a.codes is not None and b.codes is not None:
            # both chunks, and all ranks, quantise the same whole K and V: they count once
            own = {n: _add(c, b.codes[n]) for n, c in a.codes.items() if n not in ("k", "v")}
            codes = own | {n: a.codes[n] for n in ("k", "v") if self.first_rank and n in a.codes}
        logits = None if a.max_logit is None or b.max_logit is None else torch.maximum(a.max_logit, b.max_logit)
        sums = dk.float()
        self.tap(
            replace(
                a,
                **joined,
                max_logit=logits,
                codes=codes,
                key_col_sum=sums.sum(0) if self.first_rank else None,
                key_abs_sum=sums.abs().sum(0) if self.first_rank else None,
            )
        )


def _add(a: CodeStats, b: CodeStats) -> CodeStats:
    counts = {n: getattr(a, n) + getattr(b, n) for n in ("saturated", "underflowed", "nonfinite", "count")}
    return CodeStats(amax=torch.maximum(a.amax, b.amax), **counts)
