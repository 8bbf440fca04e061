"""Why the Hopper tests cannot run here, if they cannot."""

from functools import cache


@cache
def missing() -> str | None:
    """One phrase, or None on a machine with a Hopper GPU and the compiled kernels."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the GPU is not sm_90"
    from dm_plugin import ops

    ok, reason = ops.available()
    return None if ok else reason
