"""Shared by the Hopper tests: images back to codes, one call through the kernel, the reference and FP64, and the tolerances.

Tolerances (relative L2 unless said) are those of the design: kernel against reference 8e-3 (2e-2 at D = 256), against FP64 the error
that E4M3 operands cost at a logit spread of 1 / 4.
"""

import itertools
from contextlib import contextmanager
from typing import NamedTuple

import torch
from cases import gaussian
from torch import Tensor

from dm_plugin import ops, reference
from dm_plugin.formats import SM90
from dm_plugin.reference import Call

DIMS = (64, 128, 256)
TO_FP64 = {"o": (0.055, 0.095), "dv": (0.055, 0.10), "dq": (0.072, 0.13), "dk": (0.072, 0.13)}


def to_reference(d: int) -> float:
    return 8e-3 if d <= 128 else 2e-2


class Run(NamedTuple):
    """One forward and backward of the kernel."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    out: ops.Forward
    back: ops.Backward


def make_call(
    d: int,
    offset: int | None = 0,
    mode: str = "matched",
    center: bool = True,
    accumulate: str = "exact",
    scale: float | None = None,
) -> Call:
    fmt = SM90 if center else SM90.with_(center_k=False, center_v=False)
    return Call(fmt, d**-0.5 if scale is None else scale, offset, mode, accumulate)  # type: ignore[arg-type]


def inputs(**kw) -> tuple[Tensor, ...]:
    """gaussian() on the GPU."""
    return tuple(x.cuda() for x in gaussian(**kw))


def kernel(q: Tensor, k: Tensor, v: Tensor, do: Tensor, call: Call, probe: bool = False) -> Run:
    out = ops.forward(q, k, v, call, probe=probe)
    back = ops.backward(do, out.for_backward(), k.shape[1], call, probe=probe)
    return Run(out.o, back.dq, back.dk, back.dv, out, back)


@contextmanager
def means_of(out: ops.Forward, call: Call):
    """Let the reference centre with the kernel's own means, so that codes can be compared bit for bit."""
    given = []
    if call.fmt.center_k:
        given.append(out.k_mean.flatten(0, 1)[:, None, None])
    if call.fmt.center_v:
        given.append(out.v_mean.flatten(0, 1)[:, None, None])
    numbers = iter(given)
    real = reference.token_mean
    reference.token_mean = lambda x: next(numbers)  # type: ignore[assignment]
    try:
        yield
    finally:
        reference.token_mean = real


def simulate(q: Tensor, k: Tensor, v: Tensor, do: Tensor, call: Call, run: Run | None = None):
    """(Forward, Grads, RowStats) of the reference on the same device, with the kernel's means when `run` is given."""
    if run is None:
        fwd = reference.forward(q, k, v, call)
    else:
        with means_of(run.out, call):
            fwd = reference.forward(q, k, v, call)
    grads, stats = reference.backward(fwd.saved, do, call, want_stats=True)
    return fwd, grads, stats


def unswizzle(image: Tensor, row_bytes: int, mask: int) -> Tensor:
    """Undo the swizzle of [..., bytes] whose rows are `row_bytes` long: 16-byte chunk index ^= (address >> 7) & mask."""
    address = torch.arange(image.shape[-1], device=image.device)
    return image[..., address ^ (((address >> 7) & mask) << 4)]


def row_codes(image: Tensor, d: int) -> Tensor:
    """Row images [B, H, U, 128 D] -> codes uint8 [B, H, 128 U, D]."""
    b, h, u, _ = image.shape
    if d == 64:
        return unswizzle(image, 64, 3).reshape(b, h, u * 128, 64)
    panels = unswizzle(image, 128, 7).reshape(b, h, u, d // 128, 128, 128)
    return panels.transpose(3, 4).reshape(b, h, u * 128, d)


def token_codes(image: Tensor, d: int, halves: bool) -> Tensor:
    """Token images [B, H, U, 128 D] -> codes uint8 [B, H, 128 U, D]."""
    b, h, u, _ = image.shape
    tokens = 64 if halves else 128
    plain = unswizzle(image, tokens, 3 if halves else 7).reshape(b, h, u, 128 // tokens, d, tokens)
    position = torch.arange(tokens, device=image.device)
    k = position % 32
    source = position // 32 * 32 + (k & 16) + 2 * ((k & 15) >> 2) + (k & 1) + 8 * ((k >> 1) & 1)
    out = torch.empty_like(plain)
    out[..., source] = plain
    return out.transpose(-1, -2).reshape(b, h, u * 128, d)


def values(codes: Tensor) -> Tensor:
    """E4M3 bytes -> FP32 values."""
    return codes.view(torch.float8_e4m3fn).float()


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality of values, NaN equal to NaN, signed zeros equal."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def bits_equal(a: Tensor, b: Tensor) -> bool:
    dtype = {2: torch.int16, 4: torch.int32, 1: torch.uint8, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(dtype), b.contiguous().view(dtype))


def product(**axes):
    """Parameter dictionaries, one a combination."""
    return [dict(zip(axes, values_, strict=True)) for values_ in itertools.product(*axes.values())]
