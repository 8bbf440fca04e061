"""A small transformer built like Megatron's attention layers (names, layer_number, config), without Megatron."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dm_plugin.attention import dm_attn_func


class OurCore(nn.Module):
    """Core attention with a tap; tensors [T, B, heads, D] as in Megatron."""

    supports_tap = True

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number, self.tap = layer_number, None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        o = dm_attn_func(*(x.transpose(0, 1) for x in (query, key, value)), tap=self.tap)
        return o.transpose(0, 1).flatten(2)


class OtherCore(nn.Module):
    """Plain attention that knows nothing of probes."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.permute(2, 0, 1, 3).flatten(2)


class Norm(nn.Module):
    def __init__(self, dim: int, zero_centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if zero_centered else torch.ones(dim))
        self.plus = 1.0 if zero_centered else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight + self.plus)


class SelfAttention(nn.Module):
    def __init__(
        self, layer_number: int, core: type[nn.Module], width: int, heads: int, kv_heads: int, zero_centered: bool
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.config = SimpleNamespace(layernorm_zero_centered_gamma=zero_centered)
        self.dim = width // heads
        self.sizes = [heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(width, self.dim * sum(self.sizes), bias=False)
        self.q_layernorm, self.k_layernorm = Norm(self.dim, zero_centered), Norm(self.dim, zero_centered)
        self.core_attention = core(layer_number)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, recompute: str = "none") -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.dim)).split(self.sizes, dim=2)
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        if recompute.startswith("selective"):
            return self.proj(
                checkpoint(self.core_attention, q, k, v, use_reentrant=not recompute.endswith("non-reentrant"))
            )
        return self.proj(self.core_attention(q, k, v))


class Layer(nn.Module):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__()
        self.self_attention = SelfAttention(*args, **kwargs)

    def forward(self, x: Tensor, recompute: str = "none") -> Tensor:
        return x + self.self_attention(x, recompute)


class Decoder(nn.Module):
    def __init__(self, numbers: Sequence[int], **kwargs) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(n, **kwargs) for n in numbers)

    def forward(self, x: Tensor, recompute: str = "none") -> Tensor:
        for layer in self.layers:
            if recompute.startswith("full"):
                x = checkpoint(layer, x, use_reentrant=not recompute.endswith("non-reentrant"))
            else:
                x = layer(x, recompute)
        return x


class Model(nn.Module):
    """decoder.layers with global layer numbers; tensors [T, B, width]."""

    def __init__(
        self,
        layers: int | Sequence[int] = 2,
        core: type[nn.Module] = OurCore,
        width: int = 32,
        heads: int = 4,
        kv_heads: int = 2,
        zero_centered: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        numbers = range(1, layers + 1) if isinstance(layers, int) else layers
        self.decoder = Decoder(
            numbers, core=core, width=width, heads=heads, kv_heads=kv_heads, zero_centered=zero_centered
        )

    def forward(self, x: Tensor, recompute: str = "none") -> Tensor:
        return self.decoder(x, recompute)


def train(
    model: nn.Module, session=None, steps: int = 3, microbatches: int = 1, recompute: str = "none", tokens: int = 24
) -> list[float]:
    """Losses of a few SGD steps on seeded data; the session is driven as a training loop drives it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        if session is not None:
            session.begin(step)
        optimizer.zero_grad()
        total = 0.0
        for _ in range(microbatches):
            x = torch.randn(tokens, 2, 32, generator=gen).requires_grad_()
            loss = model(x, recompute).square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        if session is not None:
            session.step(step)
        losses.append(total)
    return losses
