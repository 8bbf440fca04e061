"""Put dm_plugin's attention into a Megatron layer spec.

Works on a layer's ModuleSpec, on TransformerBlockSubmodules (whose layer specs are often one shared object) and on any spec that holds
such layers, HybridStack's included: every `core_attention` slot below it is replaced, in a copy. Which layers use it is decided when a
layer is built, from its global layer number, so a choice of layers means the same in every pipeline split.
"""

import copy
import logging
import os
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from dm_plugin.control import parse_layers
from dm_plugin.formats import Format

from ..logs import ensure_handler
from .attention import configured

log = logging.getLogger("dm_plugin")


def with_dm_attention(
    spec: Any,
    layers: Iterable[int] | str | None = None,
    mode: str = "matched",
    fmt: str | Format = "sm90",
    impl: str = "auto",
    quiet: bool = False,
) -> Any:
    """A copy of `spec` with our core attention in the given layers (global, from 0; numbers or text like "0-11,20"; None: all).

    quiet: do not log it. The other layers keep what the spec had. Megatron tells a multi-token-prediction layer's attention its own number only (from 1 in
    megatron-core 0.19, after the decoder's in 0.16), so `layers` picks it by that number. Raises ValueError when the spec has no core_attention slot or a layer is negative.
    """
    chosen = parse_layers(layers) if isinstance(layers, str) else None if layers is None else frozenset(layers)
    if chosen is not None and any(layer < 0 for layer in chosen):
        raise ValueError(f"layers={sorted(chosen)} holds a negative number; layers count from 0 over the whole model")
    spec = copy.deepcopy(spec)
    if not _replace(spec, configured(mode, fmt, impl), chosen, set()):
        raise ValueError(
            "the spec has no core_attention slot; dm_plugin replaces that of self- and cross-attention layers"
        )
    if not quiet:
        announce(chosen, mode, [])
    return spec


def announce(chosen: frozenset[int] | None, mode: str, exceptions: list[tuple[frozenset[int], str]]) -> None:
    """Log which layers are ours and in which mode, in one line."""
    ensure_handler()
    where = "every layer" if chosen is None else f"layers {_ranges(chosen)} (the spec's own elsewhere)"
    but = "".join(f", layers {_ranges(numbers)} {other}" for numbers, other in exceptions)
    log.info("attention of %s: dm_plugin, mode %s%s", where, mode, but)


def _ranges(layers: frozenset[int]) -> str:
    """{0, 1, 2, 3, 7} -> 0-3, 7"""
    starts = sorted(n for n in layers if n - 1 not in layers)
    ends = sorted(n for n in layers if n + 1 not in layers)
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's own layer spec for a GPTModelConfig with our attention in it, for a script that cannot be changed (megatron-core 0.19):

        pretrain_gpt.py --spec dm_plugin.integrations.megatron.spec layer_spec

    The delta is DM_PLUGIN_MODE, else matched; the dm flags need the launcher (`python -m dm_plugin.integrations.megatron.launch`).
    """
    from megatron.training.models.gpt import default_layer_spec

    return with_dm_attention(default_layer_spec(config, vp_stage), mode=os.environ.get("DM_PLUGIN_MODE", "matched"))


def _replace(node: Any, core: type, layers: frozenset[int] | None, seen: set[int]) -> int:
    """Set every core_attention slot below a spec; returns how many."""
    if isinstance(node, (list, tuple)):
        return sum(_replace(x, core, layers, seen) for x in node)
    if id(node) in seen or isinstance(node, type) or not is_dataclass(node):
        return 0
    seen.add(id(node))
    count = 0
    for field in fields(node):
        value = getattr(node, field.name, None)
        if field.name == "core_attention" and value is not None:
            setattr(node, field.name, core if layers is None else _by_layer(core, value, layers))
            count += 1
        else:
            count += _replace(value, core, layers, seen)
    return count


def _by_layer(ours: type, stock: Any, layers: frozenset[int]) -> type:
    """A class whose instances are ours in `layers` and the stock attention elsewhere (a class, since builders accept classes)."""

    def new(cls: type, *args: Any, layer_number: int, **kwargs: Any) -> Any:
        if layer_number - 1 in layers:
            return ours(*args, layer_number=layer_number, **kwargs)
        if isinstance(stock, type):
            return stock(*args, layer_number=layer_number, **kwargs)
        from megatron.core.transformer.spec_utils import build_module

        return build_module(stock, *args, layer_number=layer_number, **kwargs)

    return type("CoreAttentionByLayer", (), {"__new__": new})
