"""Attach a ProbeSession to a Megatron model, with its parallel coordinates and global layer names."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from dm_plugin.config import ProbeConfig
from dm_plugin.session import ProbeSession, process_rank

_AXES = ("tensor", "pipeline", "context", "data")


def attach_probes(
    model: nn.Module | Iterable[nn.Module],
    config: ProbeConfig | str | Path | None,
    out: str | Path | None,
    *,
    backend: str = "",
    writer: Any = None,
    control: str | Path | bool | None = True,
    on_signal: int | None = None,
) -> ProbeSession:
    """A session attached to a model or its pipeline chunks; call begin(step) and step(step) around each training step.

    config: ProbeConfig, a YAML file, or None (probe on request only). out: dump folder. backend: name of the attention where it has no tap;
    default: what ran, as Transformer Engine's selection or the module's class tells. See dm_plugin.session.ProbeSession.
    """
    if config is None:
        config = ProbeConfig()
    elif not isinstance(config, ProbeConfig):
        config = ProbeConfig.from_yaml(config)
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    rank, world = parallel_coordinates()
    session = ProbeSession(
        config,
        out,
        rank=rank,
        world=world,
        backend=backend or backend_name,
        model_info=model_info(chunks[0]),
        writer=writer,
        control=control,
        on_signal=on_signal,
    )
    return session.attach(chunks)


def backend_name(core: nn.Module) -> str:
    """What ran in a core attention's last forward, such as "te:FusedAttention:FP8"; "megatron:<class>" outside Transformer Engine."""
    if "transformer_engine" in sys.modules and hasattr(core, "flash_attention"):
        from ..transformer_engine.observe import backend_of

        return backend_of()
    return f"megatron:{type(core).__name__}"


def parallel_coordinates() -> tuple[int, dict[str, int]]:
    """(global rank, {"tp_rank", "tp_size", "pp_rank", ...}) from Megatron's parallel state; no coordinates when it is not initialised."""
    from megatron.core import parallel_state as mpu

    if not mpu.model_parallel_is_initialized():
        return process_rank(), {}
    world = {}
    for axis, short in zip(_AXES, ("tp", "pp", "cp", "dp"), strict=True):
        kind = "parallel" if axis in ("context", "data") else "model_parallel"
        world[f"{short}_rank"] = int(getattr(mpu, f"get_{axis}_{kind}_rank")())
        world[f"{short}_size"] = int(getattr(mpu, f"get_{axis}_{kind}_world_size")())
    return process_rank(), world


def model_info(chunk: nn.Module) -> dict[str, Any]:
    """What a reviewer wants to know of the model, from its TransformerConfig."""
    config = getattr(chunk, "config", None) or getattr(getattr(chunk, "module", None), "config", None)
    if config is None:
        return {}
    return {
        "layers": config.num_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "norm": config.normalization,
        "qk_norm": config.qk_layernorm,
        "zero_centered_gain": config.layernorm_zero_centered_gamma,
    }
