"""Megatron-Core: our core attention in a layer spec, command-line flags, and probes with global layer names.

    spec = with_dm_attention(get_gpt_layer_local_spec(...), mode="matched")      # or get_gpt_layer_with_transformer_engine_spec
    parse_args(extra_args_provider=add_dm_args)
    session = attach_probes(model, "probes.yaml", "runs/x/dm_probes")

Megatron is imported when one of these names is used, not before.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "DMDotProductAttention": "attention",
    "configured": "attention",
    "with_dm_attention": "spec",
    "add_dm_args": "args",
    "spec_from_args": "args",
    "probes_from_args": "args",
    "attach_probes": "probes",
    "parallel_coordinates": "probes",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
