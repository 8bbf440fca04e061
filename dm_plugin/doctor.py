"""What is installed, which backend would run here, and why not.

Versions come from package metadata, so nothing heavy is imported; torch is imported only where it is there, to ask about the GPU.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata, util

from . import __version__

PACKAGES = (
    ("torch", "needed for attention and probes"),
    ("safetensors", "needed for dumps"),
    ("numpy", "needed for review"),
    ("transformer-engine", "optional: TE backend, extra `te`"),
    ("megatron-core", "optional: Megatron spec, extra `megatron`"),
    ("nvdlfw-inspect", "optional: TE debug features"),
    ("typer", "extra `review`: this command line"),
    ("jinja2", "extra `review`: the report page"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what, the value found, ok (None for information), and a remark."""

    what: str
    found: str
    ok: bool | None
    remark: str = ""


def packages() -> list[Finding]:
    """Versions of what dm_plugin works with."""
    out = [Finding("dm_plugin", __version__, True), Finding("python", platform.python_version(), True)]
    for name, why in PACKAGES:
        try:
            out.append(Finding(name, metadata.version(name), True, why))
        except metadata.PackageNotFoundError:
            out.append(Finding(name, "not installed", None if why.startswith(("optional", "extra")) else False, why))
    return out


def backends(head_dim: int = 128, dtype: str = "bfloat16") -> list[Finding]:
    """For CPU tensors and for the GPU's tensors: the backend that `impl="auto"` picks, or the sentence that says why none runs."""
    if util.find_spec("torch") is None:
        return [Finding("attention", "none", False, "torch is not installed; reviewing dumps works without it")]
    import torch

    from .support import AttnCall, why_not

    call = {"dtype": dtype, "heads": 8, "kv_heads": 2, "head_dim": head_dim, "head_dim_v": head_dim, "causal": True}
    problem = why_not(AttnCall(device="cpu", **call), "reference")  # type: ignore[arg-type]
    out = [
        Finding(
            "CPU tensors",
            "reference" if problem is None else "none",
            problem is None,
            problem or "plain torch, a CPU simulation",
        )
    ]
    arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if arch is None:
        return [
            *out,
            Finding("CUDA tensors", "none", None, "no CUDA device is visible"),
            Finding("kernel library", *_library()),
        ]
    problem = why_not(AttnCall(device="cuda", arch=arch, **call), "sm90")  # type: ignore[arg-type]
    name = torch.cuda.get_device_name()
    return [
        *out,
        Finding(
            f"CUDA tensors ({name})", "sm90" if problem is None else "none", problem is None, problem or "FP8 kernel"
        ),
    ]


def _library() -> tuple[str, bool | None, str]:
    from . import ops

    ok, reason = ops.available()
    return ("built" if ok else "not usable", ok or None, reason)
