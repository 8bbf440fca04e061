"""What decides between ours and Transformer Engine's own attention before any call: two environment variables and the version."""

import os
from importlib import metadata

OLDEST = (2, 3)  # the first Transformer Engine whose attention lives where the plugin looks


def strict() -> bool:
    """Is what was asked for and cannot run an error? DM_PLUGIN_STRICT=0: a logged fall-back. Raises ValueError for another value."""
    word = os.environ.get("DM_PLUGIN_STRICT", "1")
    if word not in ("0", "1"):
        raise ValueError(f"DM_PLUGIN_STRICT={word} must be 0 or 1")
    return word == "1"


def switched_off() -> bool:
    """NVTE_FLASH_ATTN=0, which Megatron's --attention-backend fused sets."""
    return os.environ.get("NVTE_FLASH_ATTN", "1") == "0"


def installed() -> tuple[str, tuple[int, ...]] | None:
    """Transformer Engine's version as text and as (major, minor), None when it is not installed."""
    try:
        text = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None
    return text, tuple(int(x) for x in text.split("+")[0].split(".")[:2])


def too_old(text: str) -> str:
    return f"Transformer Engine {text} is too old for dm_plugin; install {'.'.join(map(str, OLDEST))} or later"
