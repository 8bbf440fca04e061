"""One record of what was asked, and the one sentence that says why it cannot run.

Errors, backend selectors and `dm-plugin doctor` all show the text of `why_not`, so a user reads the same reason everywhere.
"""

from dataclasses import dataclass
from typing import Any

from .delta import MODES, RESEARCH_MODES
from .formats import Format, get_format

IMPLS = ("auto", "sm90", "reference")
SM90_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class AttnCall:
    """One attention request. `arch` is the compute capability, None off CUDA; `extras` names features asked for beyond plain attention
    (dropout, sliding window, softcap, sinks, bias, packed sequences, ...)."""

    device: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    mode: str = "matched"
    fmt: str | Format = "sm90"
    accumulate: str = "exact"
    arch: tuple[int, int] | None = None
    extras: tuple[str, ...] = ()


def describe(q: Any, k: Any, v: Any, **options: Any) -> AttnCall:
    """The AttnCall of tensors q (B, T, H, D), k and v (B, Tk, G, D)."""
    arch = None
    if q.device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(q.device)  # a constant under torch.compile
        arch = (properties.major, properties.minor)
    return AttnCall(
        device=q.device.type,
        dtype=str(q.dtype).removeprefix("torch."),
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        arch=arch,
        **options,
    )


def why_not(call: AttnCall, impl: str = "sm90") -> str | None:
    """Why `impl` cannot run this call, in one sentence, or None when it can. Raises ValueError for an unknown impl."""
    if impl not in ("sm90", "reference"):
        raise ValueError(f"impl={impl!r} is not a backend; use 'sm90' or 'reference'")
    return _why_not_any(call) or (_why_not_sm90(call) if impl == "sm90" else _why_not_reference(call))


def _why_not_any(c: AttnCall) -> str | None:
    if c.mode not in MODES + RESEARCH_MODES:
        return f"mode={c.mode!r} is not a delta; use one of {', '.join(MODES)}"
    if c.extras:
        return f"{', '.join(c.extras)} is not supported by dm_plugin (plain softmax attention, causal or full); turn it off or use the stock backend"
    if c.kv_heads == 0 or c.heads % c.kv_heads:
        return f"q has {c.heads} heads and k has {c.kv_heads}; the number of query heads must be a multiple of the number of key heads"
    if c.head_dim != c.head_dim_v:
        return f"head_dim={c.head_dim} for q and k but {c.head_dim_v} for v is not supported by dm_plugin; give both the same head dim"
    return None


def _why_not_reference(c: AttnCall) -> str | None:
    fmt = get_format(c.fmt)
    if c.dtype not in ("bfloat16", "float16", "float32"):
        return f"dtype {c.dtype} is not supported by the reference (bfloat16, float16, float32); cast q, k and v"
    if c.accumulate not in ("exact", "hopper"):
        return f"accumulate={c.accumulate!r} is not known; use 'exact' or 'hopper'"
    if c.accumulate == "hopper" and fmt.ds not in ("slab", "row"):
        return f"accumulate='hopper' models the sm90 kernel and fmt={fmt.name!r} is not its format; use fmt='sm90' or accumulate='exact'"
    return None


def _why_not_sm90(c: AttnCall) -> str | None:
    fmt = get_format(c.fmt)
    if c.device != "cuda":
        return f"q is on {c.device} and the sm90 kernel needs a CUDA tensor; move q, k and v to a Hopper GPU or use impl='reference'"
    if c.arch != (9, 0):
        return f"the GPU is sm_{''.join(map(str, c.arch or ()))} and the kernel needs sm_90 (H100, H200); use the stock backend there"
    if c.dtype != "bfloat16":
        return f"dtype {c.dtype} is not supported by the sm90 kernel (bfloat16); cast q, k and v or run under autocast"
    if c.head_dim not in SM90_HEAD_DIMS:
        return f"head_dim={c.head_dim} is not supported by the sm90 kernel ({', '.join(map(str, SM90_HEAD_DIMS))}); use the stock backend or pad"
    if c.mode not in MODES:
        return f"mode={c.mode!r} is a research mode of the reference; use one of {', '.join(MODES)}"
    if fmt.name.split("[")[0] != "sm90" or fmt.ds != "slab" or fmt.p_forward != "tile" or fmt.p_backward != "pow2":
        return f"fmt={fmt.name!r} is a format of the reference; the kernel runs 'sm90', so use impl='reference' to study the others"
    if c.accumulate != "exact":
        return f"accumulate={c.accumulate!r} is a model for the reference; drop it to run the kernel"
    return _library_missing()


def _library_missing() -> str | None:
    from . import ops

    ok, reason = ops.available()
    return None if ok else reason
