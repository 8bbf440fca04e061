"""Our attention in the place of te.DotProductAttention's FlashAttention.

    q [T, B, H, D] or [B, T, H, D] (any packed view of those)  ->  [T, B, H * D] or [B, T, H * D]

A subclass: every call that the selector did not give to us runs the stock class. The fp8 arguments that TE passes are ignored on purpose
(TE loses its autocast in Megatron's selective recompute; our numerics depend on `configure` alone).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dm_plugin import graphs
from dm_plugin.attention import choose_impl, dm_attn_func
from dm_plugin.support import AttnCall

from ..context import attend_over_context
from .observe import backend_of
from .selector import OURS, OURS_WITH_MAX_LOGIT, State, gpu_arch
from .switches import strict, switched_off


@cache
def attention_class() -> type:
    """DMFlashAttention; built on first use, because TE asks for it half-way through its own import."""
    from transformer_engine.pytorch.attention.dot_product_attention.backends import FlashAttention

    class DMFlashAttention(FlashAttention):  # type: ignore[misc]
        """tap: set by a ProbeSession. ran: what the last forward ran, None if TE did not come here."""

        supports_tap = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            equip(self)
            if strict() and not switched_off():
                _refuse_early(self.layer_number)

        def forward(
            self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            version = kwargs.get("flash_attention_backend")
            if version is OURS or version is OURS_WITH_MAX_LOGIT:
                return _attend(self, query_layer, key_layer, value_layer, kwargs, version is OURS_WITH_MAX_LOGIT)
            return super().forward(query_layer, key_layer, value_layer, *args, **kwargs)

        def stock_backend(self) -> str:
            return backend_of()

    return DMFlashAttention


def equip(module: Any) -> None:
    """Give a FlashAttention the attributes of ours."""
    module.tap = None
    module.probing = False
    module.ran = None


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], want_max: bool) -> Any:
    settings, tap = State.settings, module.tap
    if torch.compiler.is_compiling():
        if module.probing and not graphs.must_stay():
            return graphs.outside(_attend, module, q, k, v, given, want_max)
        tap = None
    mask, tokens_first = given["attn_mask_type"], given["qkv_layout"].startswith("s")
    options: dict[str, Any] = {
        "mode": settings.delta,
        "fmt": settings.fmt,
        "impl": settings.impl,
        "softmax_scale": module.softmax_scale,
    }
    causal = "causal" in mask
    group = given.get("cp_group")
    if isinstance(group, list):
        group = group[0] if len(group) == 1 else None
    if not torch.compiler.is_compiling():
        module.ran = f"te:dm_plugin:{settings.delta}"
    if group is not None and group.size() > 1:
        q, k, v = (x if tokens_first else x.transpose(0, 1) for x in (q, k, v))
        out = attend_over_context(q, k, v, group, causal, tap, options, want_max)
        o, top = out if want_max else (out, None)
        o = o if tokens_first else o.transpose(0, 1)
    else:
        q, k, v = (x.transpose(0, 1) if tokens_first else x for x in (q, k, v))
        offset = 0 if mask == "causal" else None  # TE aligns a plain causal mask to the top left
        out = dm_attn_func(q, k, v, causal, causal_offset=offset, tap=tap, return_max_logit=want_max, **options)
        o, top = out if want_max else (out, None)
        o = o.transpose(0, 1) if tokens_first else o
    o = o.flatten(2).contiguous()
    return (o, top) if want_max else o


def _refuse_early(layer: int | None) -> None:
    """What no call could run is said when the model is built: no Hopper GPU, no kernel library, an unknown mode."""
    if State.settings.impl == "reference":
        return
    call = AttnCall(
        device="cuda", dtype="bfloat16", heads=1, kv_heads=1, head_dim=128, head_dim_v=128, causal=True,
        mode=State.settings.delta, fmt=State.settings.fmt, arch=gpu_arch(),
    )  # fmt: skip
    try:
        choose_impl(call, State.settings.impl)
    except (ValueError, RuntimeError) as error:
        raise type(error)(
            f"dm_plugin attention, layer {(layer or 1) - 1} (from 0): {error}; NVTE_FLASH_ATTN=0 asks for Transformer Engine's own backends, "
            "DM_PLUGIN_STRICT=0 falls back to them with a warning"
        ) from None


def adopt(model: Any) -> int:
    """Turn the FlashAttention of every te.DotProductAttention already built below `model` into ours; returns how many."""
    ours = attention_class()
    stock = ours.__bases__[0]
    found = [m for m in model.modules() if type(m) is stock]
    for module in found:
        module.__class__ = ours
        equip(module)
    return len(found)
