"""Takes a sample of the operands of core attention in a running job, and has it replayed off the training thread.

q, k and v are copied when dO arrives in backward, once a step and site; nothing else of the job is touched.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .dump import write_step
from .refusals import no_key_sum
from .replay import Capture, pack, replay, sample
from .sites import Site

Miss = Callable[[str, tuple[str, ...], str], None]


class Captures:
    """The samples of one probed step. miss(site, probes, text): told why a site gave none."""

    def __init__(self, step: int, world: Mapping[str, int], miss: Miss) -> None:
        self.step, self.world, self.miss = step, world, miss
        self.taken: dict[str, Capture] = {}
        self.over = False  # a backward pass that comes after the step adds nothing

    def hook(self, site: Site, undo: list[Callable[[], None]]) -> None:
        """Watch a site; what takes the hooks off again is added to `undo`, now and with each forward."""
        watch = partial(self._on_forward, site, undo)
        undo.append(site.module.register_forward_hook(watch, with_kwargs=True).remove)

    def _on_forward(
        self,
        site: Site,
        undo: list[Callable[[], None]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if site.name in self.taken or not torch.is_grad_enabled() or not output.requires_grad:
            return

        def on_gradient(do: Tensor) -> None:
            try:
                if not self.over and site.name not in self.taken:
                    self.taken[site.name] = sample_of(site, module, args, kwargs, do, self.step, self.world)
            except Exception as error:
                self.miss(site.name, ("replay",), str(error))

        undo.append(output.register_hook(on_gradient).remove)

    def work(self, out: Path, rank: int, metadata: dict[str, str]) -> Callable[[], dict[str, np.ndarray]] | None:
        """What the writer thread does: keep the operands in a file of their own and return the replayed fields. None without samples."""
        self.over = True
        return partial(_replay, dict(self.taken), out, self.step, rank, metadata) if self.taken else None


def _replay(
    taken: dict[str, Capture], out: Path, step: int, rank: int, metadata: dict[str, str]
) -> dict[str, np.ndarray]:
    fields: dict[str, np.ndarray] = {}
    arrays: dict[str, np.ndarray] = {}
    described = {}
    for name, capture in taken.items():
        q, k, v, do = (x.cpu() for x in capture[:4])
        on_cpu = Capture(q, k, v, do, capture.causal, capture.scale)
        packed, described[name] = pack(name, on_cpu)
        arrays |= packed
        fields |= {f"{name}/{key}": x for key, x in replay(on_cpu).items()}
    write_step(out / "captures", step, rank, arrays, metadata | {"dm_plugin.captures": json.dumps(described)})
    return fields


def sample_of(
    site: Site,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    do: Tensor,
    step: int,
    world: Mapping[str, int],
) -> Capture:
    """The operands of a core attention's call as a capture. Raises ValueError where a replay would not be this call."""
    refused = no_key_sum(site, world)
    if refused is not None:
        raise ValueError(f"not replayed: {refused}")
    q, k, v = args[:3]
    if q.dim() != 4:
        raise ValueError(f"operands of shape {tuple(q.shape)} are packed and are not replayed")
    if str(getattr(module, "qkv_format", "sbhd")).startswith("bshd"):
        q, k, v, do = (x.transpose(0, 1) for x in (q, k, v, do))
    kind = kwargs.get("attn_mask_type") or next((a for a in args[3:] if hasattr(a, "name")), None)
    kind = getattr(module, "attn_mask_type", "") if kind is None else kind
    mask = str(getattr(kind, "name", kind))
    if mask not in ("causal", "no_mask"):
        raise ValueError(f"a mask of kind {mask} is not replayed")
    scale = getattr(module, "softmax_scale", None)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return sample(q, k, v, do.reshape(q.shape), step, mask == "causal", scale)
