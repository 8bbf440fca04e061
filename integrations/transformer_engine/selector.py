"""Which backend runs a te.DotProductAttention call: ours, or what Transformer Engine's own selector says, and the reason.

TE asks once for each distinct set of attention parameters and keeps the answer, so everything here is a pure function of those parameters,
of the settings (`configure`) and of two environment variables: NVTE_FLASH_ATTN ("0": ours is off) and DM_PLUGIN_STRICT.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version

from dm_plugin.attention import choose_impl
from dm_plugin.formats import Format
from dm_plugin.support import AttnCall

from .switches import strict, switched_off

log = logging.getLogger("dm_plugin")
# stand where TE passes the flash-attn version on to the attention class, which knows by it that it was chosen
OURS, OURS_WITH_MAX_LOGIT = Version("0.0.0+dm"), Version("0.0.0+dm.max.logit")
MASKS = ("causal", "causal_bottom_right", "no_mask")


@dataclass(frozen=True)
class Settings:
    """What `configure` sets: the delta (None: DM_PLUGIN_MODE, else matched), the operand format and the implementation."""

    mode: str | None = None
    fmt: str | Format = "sm90"
    impl: str = "auto"

    @property
    def delta(self) -> str:
        return self.mode or os.environ.get("DM_PLUGIN_MODE", "matched")


@dataclass(frozen=True)
class Decision:
    """ours: does our attention run? reason: why, in one sentence."""

    ours: bool
    reason: str


class State:
    """The process's one plugin: how it came in, what TE had before, and what was decided for each distinct request."""

    settings = Settings()
    installed: str | None = None  # "NVTE_PLUGIN" or "install()"
    decisions: list[tuple[str, Decision]] = []  # noqa: RUF012
    stock_selector: Callable[[Any], tuple[Any, ...]] | None = None
    stock_class: type | None = None


def get_attention_backend(attention_params: Any) -> tuple[Any, ...]:
    """TE's selector with ours in front: (use flash, its version, use fused, its sub-backend, use unfused, available).

    Raises ValueError in one sentence when ours was asked for and cannot run (not with DM_PLUGIN_STRICT=0).
    """
    decision = decide(attention_params)
    refused = not decision.ours and strict() and not switched_off()
    if not refused and not torch.compiler.is_compiling():
        _announce(attention_params, decision)
    if decision.ours:
        marker = OURS_WITH_MAX_LOGIT if getattr(attention_params, "return_max_logit", False) else OURS
        return True, marker, False, None, False, [True, False, False]
    if refused:
        raise ValueError(
            f"dm_plugin attention cannot run this: {decision.reason}; NVTE_FLASH_ATTN=0 asks for Transformer Engine's own "
            "backends, DM_PLUGIN_STRICT=0 falls back to them with a warning"
        )
    assert State.stock_selector is not None
    return State.stock_selector(attention_params)


def decide(params: Any) -> Decision:
    """Ours or not for TE's AttentionParams, without side effects."""
    if switched_off():
        return Decision(False, "NVTE_FLASH_ATTN=0 asks for Transformer Engine's own backends")
    try:
        chosen, reason = choose_impl(request(params), State.settings.impl)
    except (ValueError, RuntimeError) as error:
        return Decision(False, str(error))
    return Decision(True, f"{chosen}: {reason}")


def request(params: Any) -> AttnCall:
    """The AttnCall that AttentionParams of any TE since 2.3 amount to (older ones lack fields)."""
    get: Any = lambda name, default=None: getattr(params, name, default)  # noqa: E731
    layout, mask = params.qkv_layout, params.attn_mask_type
    window = get("window_size")
    right = get("bottom_right_diagonal")
    extras = []
    if mask not in MASKS:
        extras.append(f"attn_mask_type={mask}")
    if "thd" in layout or "paged" in layout:
        extras.append(f"qkv_layout={layout} (packed or paged sequences)")
    if window is not None and tuple(window) not in ((-1, -1), (-1, 0)):
        extras.append(f"window_size={tuple(window)}")
    if right is not None and mask == "causal" and right and params.max_seqlen_q != params.max_seqlen_kv:
        extras.append("bottom_right_diagonal=True with attn_mask_type=causal")
    if get("core_attention_bias_type", "no_bias") != "no_bias" or get("alibi_slopes_shape") is not None:
        extras.append(f"core_attention_bias_type={get('core_attention_bias_type')}")
    if params.attention_dropout and params.is_training:
        extras.append(f"attention_dropout={params.attention_dropout}")
    if get("inference_params") is not None:
        extras.append("inference_params (a key cache)")
    if get("softmax_type", "vanilla") != "vanilla":
        extras.append(f"softmax_type={params.softmax_type}")
    if get("softcap", 0.0):
        extras.append(f"softcap={params.softcap}")
    if get("has_score_mod", False):
        extras.append("score_mod")
    if get("fp8_output", False):
        extras.append("fp8_output")
    if get("checkpoint_core_attention", False):
        extras.append("checkpoint_core_attention (use Megatron's recompute or torch.utils.checkpoint around the layer)")
    if params.qkv_type is not torch.Tensor:
        extras.append(f"{params.qkv_type.__name__} operands (fp8_mha)")
    if get("context_parallel", False) and (get("cp_size_a2a", 1) > 1 or get("cp_comm_type") == "a2a+p2p"):
        extras.append(
            f"cp_comm_type={get('cp_comm_type')} (keys are gathered: p2p, a2a and all_gather are the same here)"
        )
    return AttnCall(
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=str(params.qkv_dtype).removeprefix("torch."),
        heads=params.num_heads,
        kv_heads=params.num_gqa_groups,
        head_dim=params.head_dim_qk,
        head_dim_v=params.head_dim_v,
        causal="causal" in mask,
        mode=State.settings.delta,
        fmt=State.settings.fmt,
        arch=gpu_arch(),
        extras=tuple(extras),
    )


def gpu_arch() -> tuple[int, int] | None:
    """Compute capability of the current GPU, None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.major, properties.minor


def _announce(params: Any, decision: Decision) -> None:
    """Log a decision once for each distinct request."""
    what = (
        f"{params.qkv_layout} {params.attn_mask_type} {str(params.qkv_dtype).removeprefix('torch.')} head_dim "
        f"{params.head_dim_qk} heads {params.num_heads}/{params.num_gqa_groups} mode {State.settings.delta}"
    )
    if (what, decision) in State.decisions:
        return
    State.decisions.append((what, decision))
    if decision.ours:
        log.info("attention backend dm_plugin (%s) for %s", decision.reason, what)
    else:
        log.warning("attention backend Transformer Engine's own for %s: %s", what, decision.reason)
