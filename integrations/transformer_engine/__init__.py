"""Transformer Engine: our FP8 attention as the backend of te.DotProductAttention.

    NVTE_PLUGIN=dm_plugin.integrations.transformer_engine python train.py        # TE >= 2.20, nothing else changes
    from dm_plugin.integrations.transformer_engine import install; install()     # TE 2.3 and later, before or after models are built

NVTE_FLASH_ATTN=0 (Megatron's --attention-backend fused) turns it off again: TE then picks among its own backends, and the log says so.
What was asked for and cannot run is an error; DM_PLUGIN_STRICT=0 makes it a logged fall-back to TE's own choice, recorded in dumps.
Transformer Engine is imported when install() is called, never by importing this package: TE calls load_plugins() half-way through its own
import.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "load_plugins": "plugin",
    "install": "plugin",
    "uninstall": "plugin",
    "configure": "plugin",
    "refresh": "plugin",
    "status": "plugin",
    "assert_active": "plugin",
    "backend_of": "observe",
    "feature_dir": "plugin",
    "findings": "doctor",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
