"""DMDotProductAttention: dm_attn_func behind Megatron-Core's core_attention contract.

    query [Tq, B, H/tp, D], key and value [Tk, B, G/tp, D]  ->  [Tq, B, H/tp * D]

No parameters and no buffers, so checkpoints carry nothing of it; the `_extra_state` that Transformer Engine's attention saves is accepted
and dropped. What cannot be right is refused when the layer is built, or at the first call that asks for it.
"""

import weakref
from functools import lru_cache
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from dm_plugin import graphs
from dm_plugin.attention import Tap, choose_impl, dm_attn_func
from dm_plugin.delta import MODES
from dm_plugin.formats import Format, get_format
from dm_plugin.support import AttnCall

from ..context import attend_over_context

_CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right)
_FULL = (AttnMaskType.no_mask,)
_STOCK = "use the stock attention for this layer"


class DMDotProductAttention(MegatronModule):
    """FP8 attention as a Megatron core attention (constructor and forward as DotProductAttention's).

    dm_mode, dm_fmt, dm_impl: class attributes; `configured(...)` makes a class with others. `tap`: set by a ProbeSession.
    Raises ValueError in one sentence for a configuration that it cannot run.
    """

    supports_tap = True
    dm_mode = "matched"
    dm_fmt: str | Format = "sm90"
    dm_impl = "auto"

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        num_splits: int | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.cp_group = getattr(pg_collection, "cp", None)
        dim, dim_v = k_channels or config.kv_channels, v_channels or config.kv_channels
        # apply_query_key_layer_scaling divides the scores by the layer number and multiplies them again before the softmax: no change here
        self.softmax_scale = dim**-0.5 if softmax_scale is None else softmax_scale
        reason = why_not_layer(config, self.layer_number, attn_mask_type, attention_type, attention_dropout)
        if reason is None and config.context_parallel_size > 1 and self.cp_group is None:
            reason = "context parallelism needs pg_collection.cp; pass Megatron's process groups"
        if reason is not None:
            raise ValueError(f"dm_plugin attention, layer {self.layer_number - 1} (from 0): {reason}")
        try:
            _, self.impl_reason = choose_impl(self._call(dim, dim_v), self.dm_impl)
        except (ValueError, RuntimeError) as error:
            raise type(error)(f"dm_plugin attention, layer {self.layer_number - 1} (from 0): {error}") from None
        # Megatron's QK clip and its max-logit log read this attribute after the step
        self.keeps_max_logit = any(getattr(config, flag, False) for flag in ("qk_clip", "log_max_attention_logit"))
        self.current_max_attn_logits: Tensor | None = None
        self.tap: Tap | None = None
        self.probing = False
        self.refuse_probe: dict[str, str] = {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **extra: Any,
    ) -> Tensor:
        """[Tq, B, H, D] and [Tk, B, G, D] -> [Tq, B, H * D]. Raises ValueError for packed sequences, a bias, a mask of another kind, or more operands."""
        tap = self.tap
        if torch.compiler.is_compiling():
            if self.probing and not graphs.must_stay():
                operands = (query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
                return graphs.outside(self.forward, *operands, **extra)
            tap = None
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        given = [name for name, value in extra.items() if value is not None]
        if given:
            raise ValueError(f"{given[0]} was given to the core attention and is not supported by dm_plugin; {_STOCK}")
        _check_call(kind, attention_mask, attention_bias, packed_seq_params, query, key)
        options = {"mode": self.dm_mode, "fmt": self.dm_fmt, "impl": self.dm_impl, "softmax_scale": self.softmax_scale}
        causal, want_max = kind in _CAUSAL, self.keeps_max_logit
        if self.cp_group is not None and self.cp_group.size() > 1:
            out = attend_over_context(query, key, value, self.cp_group, causal, tap, options, want_max)
            o, top = out if want_max else (out, None)
        else:
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            out = dm_attn_func(q, k, v, causal, tap=tap, return_max_logit=want_max, **options)  # type: ignore[arg-type]
            o, top = out if want_max else (out, None)
            o = o.transpose(0, 1)
        if top is not None:
            before = self.current_max_attn_logits
            self.current_max_attn_logits = top if before is None else torch.maximum(before, top)
        return o.flatten(2)

    def _call(self, dim: int, dim_v: int) -> AttnCall:
        """The request that this layer will make, as far as it is known when it is built."""
        c = self.config
        device = torch.device(torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        dtype = torch.bfloat16 if c.bf16 else torch.float16 if c.fp16 else c.params_dtype
        return AttnCall(
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            heads=c.num_attention_heads,
            kv_heads=c.num_query_groups or c.num_attention_heads,
            head_dim=dim,
            head_dim_v=dim_v,
            causal=self.attn_mask_type in _CAUSAL,
            mode=self.dm_mode,
            fmt=self.dm_fmt,
            arch=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # Transformer Engine's FP8 history: nothing here reads it
        super()._load_from_state_dict(state_dict, prefix, *args)


@lru_cache(maxsize=64)
def configured(mode: str = "matched", fmt: str | Format = "sm90", impl: str = "auto") -> type[DMDotProductAttention]:
    """The class with a delta mode, an operand format and a backend. Raises ValueError for unknown names."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not a delta; use one of {', '.join(MODES)}")
    get_format(fmt)
    return type("DMDotProductAttention", (DMDotProductAttention,), {"dm_mode": mode, "dm_fmt": fmt, "dm_impl": impl})


def why_not_layer(
    config: Any, layer_number: int, mask: AttnMaskType, attention_type: str, dropout: float | None
) -> str | None:
    """Why this layer (from 1) cannot use dm_plugin's attention, or None."""
    asked = config.attention_dropout if dropout is None else dropout
    window = getattr(config, "window_size", None)
    if asked:
        return f"attention_dropout={asked} is not supported (0); set --attention-dropout 0"
    if mask not in _CAUSAL + _FULL:
        return f"attention mask type {mask.name} is not supported (causal, causal_bottom_right, no_mask); {_STOCK}"
    if attention_type not in ("self", "cross"):
        return f"attention_type={attention_type!r} is not supported (self, cross); {_STOCK}"
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        return f"softmax_type={config.softmax_type!r} is not supported ('vanilla'), since sinks change what a row sums to; {_STOCK}"
    if is_layer_window_attention(window, getattr(config, "window_attn_skip_freq", None), layer_number):
        return f"window_size={window} is not supported (none); {_STOCK}"
    if getattr(config, "fp8_multi_head_attention", False):
        return "fp8_multi_head_attention is not supported (q, k and v must arrive in BF16); turn it off"
    return None


def _check_call(
    kind: AttnMaskType, mask: Tensor | None, bias: Tensor | None, packed: Any, query: Tensor, key: Tensor
) -> None:
    if packed is not None:
        raise ValueError(
            "packed_seq_params was given: packed sequences are not supported by dm_plugin yet, and reading them as one causal sequence "
            "would let documents see each other; unpack them or use the stock attention"
        )
    if bias is not None:
        raise ValueError("attention_bias was given and is not supported by dm_plugin; use the stock attention")
    if kind not in _CAUSAL + _FULL:
        raise ValueError(
            f"attn_mask_type {kind.name} is not supported by dm_plugin (causal, causal_bottom_right, no_mask); use the stock attention"
        )
    if kind is AttnMaskType.causal and query.shape[0] != key.shape[0]:
        raise ValueError(
            f"causal attention of {query.shape[0]} queries over {key.shape[0]} keys (a key cache) is not supported by dm_plugin, which is for "
            "training; use the stock attention, or attn_mask_type causal_bottom_right if the last query is the last key"
        )
    if mask is not None and not _is_plain(mask, kind in _CAUSAL, query.shape[0], key.shape[0]):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides other keys than {kind.name} does (reset_attention_mask, packing or padding); dm_plugin "
            "would ignore it, so unpack the documents or use the stock attention"
        )


_known_masks: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}


def _is_plain(mask: Tensor, causal: bool, t_q: int, t_k: int) -> bool:
    """Is this boolean mask (True: hidden) just the causal one (or empty)? Compared once for each mask tensor, not once a layer."""
    known = _known_masks.get(id(mask))
    if known is not None and known[0]() is mask and known[1] == mask._version:
        return known[2]
    if mask.dtype != torch.bool or mask.shape[-2:] != (t_q, t_k):
        return False
    hidden = (
        torch.ones(t_q, t_k, dtype=torch.bool, device=mask.device).triu(1 + t_k - t_q)
        if causal
        else mask.new_zeros(t_q, t_k)
    )
    plain = bool((mask == hidden).all())
    _known_masks.clear()
    _known_masks[id(mask)] = weakref.ref(mask), mask._version, plain
    return plain
