"""What `dm-plugin doctor` says of Transformer Engine: the version, the plugin, and which way the environment's switches point.

Nothing is imported from Transformer Engine: its import needs torch, cuDNN and seconds, and a doctor must work where it is broken.
"""

import os
from importlib.util import find_spec

import torch

from dm_plugin import ops
from dm_plugin.delta import MODES
from dm_plugin.doctor import Finding

from .switches import OLDEST, installed, strict, switched_off, too_old

PLUGIN = "dm_plugin.integrations.transformer_engine"
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def findings() -> list[Finding]:
    """Lines for the doctor; empty when Transformer Engine is not installed."""
    found = installed()
    if found is None:
        return []
    text, version = found
    asked, mode = os.environ.get("NVTE_PLUGIN"), os.environ.get("DM_PLUGIN_MODE", "matched")
    if mode not in MODES:
        return [
            Finding(
                "TE attention", "none", False, f"DM_PLUGIN_MODE={mode} is not a delta; use one of {', '.join(MODES)}"
            )
        ]
    if version < OLDEST:
        return [
            Finding(
                "TE attention",
                "stock",
                False,
                too_old(text),
            )
        ]
    triple = " ".join(f"{name.removeprefix('NVTE_')}={os.environ.get(name, 'unset')}" for name in SWITCHES)
    if asked == PLUGIN and version < (2, 20):
        return [
            Finding(
                "TE attention",
                "stock",
                False,
                f"NVTE_PLUGIN needs Transformer Engine 2.20 and {text} is here; call install() instead",
            )
        ]
    if asked not in (None, "", PLUGIN) and not importable(asked):
        return [Finding("TE attention", "stock", False, f"NVTE_PLUGIN={asked} cannot be imported; ours is {PLUGIN}")]
    if asked not in (None, "", PLUGIN):
        return [
            Finding(
                "TE attention",
                "stock",
                None,
                f"NVTE_PLUGIN={asked} is another plugin; dm_plugin can come in by install()",
            )
        ]
    if asked != PLUGIN:
        return [
            Finding(
                "TE attention",
                "stock",
                None,
                f"NVTE_PLUGIN is not set; NVTE_PLUGIN={PLUGIN} or install() brings ours ({triple})",
            )
        ]
    if switched_off():
        return [Finding("TE attention", "stock", None, f"NVTE_FLASH_ATTN=0 turns dm_plugin off ({triple})")]
    kernel, reason = ops.available()
    if not kernel:
        return [Finding("TE attention", "none", False, f"dm_plugin was asked for and its kernels cannot run: {reason}")]
    word = (
        "an error where it cannot run"
        if strict()
        else "TE's own with a warning where it cannot run (DM_PLUGIN_STRICT=0)"
    )
    if not torch.cuda.is_available():
        return [
            Finding(
                "TE attention",
                "dm_plugin",
                None,
                f"asked for, but no CUDA device is visible here (mode {mode}; {triple})",
            )
        ]
    return [Finding("TE attention", "dm_plugin", True, f"mode {mode}; {triple}; {word}")]


def importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
