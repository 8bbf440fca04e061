"""Attention sites of a model, by duck typing: every module with a `core_attention`, named by its global layer number.

Megatron numbers layers from 1 over the whole model in `layer_number`; the place in a module list starts again on every pipeline stage
and virtual chunk. The name uses the former, so one layer has one name in every split:
    decoder.layers.{layer_number - 1}.self_attention.core_attention
A multi-token-prediction layer keeps its own prefix and never takes a decoder's number.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_LAYER = re.compile(r"(?P<head>(?:^|\.)layers\.)(?P<local>\d+)(?P<tail>\.|$)")


@dataclass(frozen=True)
class Site:
    """One core attention. q_norm, k_norm: the norms on queries and keys, None where there are none."""

    name: str
    module: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    layer_number: int | None
    zero_centered: bool
    config: Any = None

    @property
    def ours(self) -> bool:
        """Does the module always hand out RowStats through a tap?"""
        return self.tapped is self.module

    @property
    def tapped(self) -> nn.Module | None:
        """What hands out RowStats: the module itself, or the part of it that runs when a plugin was chosen (`flash_attention`)."""
        parts = (self.module, getattr(self.module, "flash_attention", None))
        return next((m for m in parts if getattr(m, "supports_tap", False)), None)

    def gains(self) -> tuple[Tensor, Tensor] | None:
        """Effective gains (g_q, g_k) [D], 1 + w where the norm stores its gain minus one; None without QK norm."""
        weights = [getattr(n, "weight", None) for n in (self.q_norm, self.k_norm)]
        if any(w is None or w.numel() == 0 for w in weights):
            return None
        plus = 1.0 if self.zero_centered else 0.0
        g_q, g_k = (w.detach().float().reshape(-1) + plus for w in weights)  # type: ignore[union-attr]
        return (g_q, g_k) if g_q.shape == g_k.shape else None


def find_sites(model: nn.Module | Iterable[nn.Module]) -> list[Site]:
    """Sites of a model or of a list of pipeline chunks, in order. Raises ValueError when two get one name."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    sites: dict[str, Site] = {}
    for chunk in chunks:
        for path, parent in chunk.named_modules():
            core = getattr(parent, "core_attention", None)
            if not isinstance(core, nn.Module):
                continue
            number = getattr(parent, "layer_number", None) or getattr(core, "layer_number", None)
            name = global_name(f"{path}.core_attention" if path else "core_attention", number)
            if name in sites:
                raise ValueError(f"two attention modules are both named {name}; give each its own layer_number")
            norms = [getattr(parent, n, None) for n in ("q_layernorm", "k_layernorm")]
            q_norm, k_norm = (n if isinstance(n, nn.Module) else None for n in norms)
            config = getattr(parent, "config", None) or getattr(core, "config", None)
            sites[name] = Site(name, core, q_norm, k_norm, number, _zero_centered(q_norm, config), config)
    return list(sites.values())


def global_name(path: str, layer_number: int | None) -> str:
    """A module path with wrapper prefixes removed and the local list index replaced by the global one."""
    path = re.sub(r"^(?:module\.|_orig_mod\.|model\.(?=decoder|mtp))+", "", path).replace("._orig_mod", "")
    if layer_number is None or path.startswith("mtp."):
        return path
    return _LAYER.sub(lambda m: f"{m['head']}{layer_number - 1}{m['tail']}", path, count=1)


def _zero_centered(norm: nn.Module | None, config: Any) -> bool:
    """Norms of some stacks carry no flag, so the attention's config is asked too."""
    flag = getattr(norm, "zero_centered_gamma", None)
    return bool(getattr(config, "layernorm_zero_centered_gamma", False) if flag is None else flag)
