"""The two environment variables that decide between ours and Transformer Engine's own attention."""

import os

OLDEST = (2, 3)  # the first Transformer Engine whose attention lives where the plugin looks


def strict() -> bool:
    """Is what was asked for and cannot run an error? DM_PLUGIN_STRICT=0: a logged fall-back."""
    return os.environ.get("DM_PLUGIN_STRICT", "1") != "0"


def switched_off() -> bool:
    """NVTE_FLASH_ATTN=0, which Megatron's --attention-backend fused sets."""
    return os.environ.get("NVTE_FLASH_ATTN", "1") == "0"
