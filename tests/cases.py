"""Seeded inputs shared by the tests."""

import torch
from torch import Tensor


def gaussian(
    t: int = 128,
    h: int = 2,
    g: int | None = None,
    d: int = 64,
    b: int = 1,
    t_k: int | None = None,
    spread: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (B, T, H, D) times spread, k and v (B, Tk, G, D), dO; unit Gaussian."""
    gen = torch.Generator().manual_seed(seed)
    draw = lambda n, heads: torch.randn(b, n, heads, d, generator=gen).to(dtype)  # noqa: E731
    g, t_k = g or h, t if t_k is None else t_k
    q, k, v, do = draw(t, h), draw(t_k, g), draw(t_k, g), draw(t, h)
    return (q.float() * spread).to(dtype), k, v, do
