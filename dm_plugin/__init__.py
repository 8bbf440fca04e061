"""FP8 attention for training whose softmax backward subtracts the delta that the gradient really used.

Public names are resolved on first use (PEP 562): importing this package imports no torch, touches no GPU and patches nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "dm_attn_func": "attention",
    "MODES": "delta",
    "RowStats": "stats",
    "CodeStats": "stats",
    "ProbeConfig": "config",
    "ProbeSession": "session",
    "Schedule": "schedule",
    "find_sites": "sites",
    "read_file": "dump",
    "find_dumps": "dump",
    "why_not": "support",
}
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
