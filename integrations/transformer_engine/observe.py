"""The name of the backend that Transformer Engine ran last, for dumps and logs."""

SUB_BACKENDS = {0: "F16 short sequences", 1: "F16", 2: "FP8"}


def backend_of() -> str:
    """What TE's last selection was, such as "te:FusedAttention:FP8"; right after a module's forward it is that module's."""
    import transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention as dpa

    from .selector import OURS, OURS_WITH_MAX_LOGIT, State
    from .switches import switched_off

    chosen = dpa._attention_backends
    why = ""
    if State.installed is not None:
        why = " (NVTE_FLASH_ATTN=0)" if switched_off() else _fallback_reason()
    if chosen["use_flash_attention"]:
        version = chosen["flash_attention_backend"]
        return (
            f"te:dm_plugin:{State.settings.delta}"
            if version in (OURS, OURS_WITH_MAX_LOGIT)
            else f"te:FlashAttention:{version}{why}"
        )
    if chosen["use_fused_attention"]:
        number = int(chosen["fused_attention_backend"])
        return f"te:FusedAttention:{SUB_BACKENDS.get(number, number)}{why}"
    return f"te:UnfusedDotProductAttention{why}" if chosen["use_unfused_attention"] else "te:not yet selected"


def _fallback_reason() -> str:
    import transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention as dpa

    from .selector import decide

    params = dpa._attention_backends["attention_params"]
    return "" if params is None else f" (dm_plugin cannot: {decide(params).reason})"
