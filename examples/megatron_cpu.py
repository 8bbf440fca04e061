"""What Megatron-Core needs to run on a machine without a GPU, in one place. Used by the examples and the tests alone.

    with megatron_on_cpu(tp=1, cp=1): ...        process groups over gloo, torch.cuda calls of the training path redirected

Megatron asks torch.cuda for the current device, streams and random states even where every tensor is on the CPU. The redirections below
are the measured list for megatron-core 0.16 and 0.19; none of them touches arithmetic.
"""

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class _NoStream:
    """Stands in for a CUDA stream: every method does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def cuda_redirected() -> Iterator[None]:
    """Point the torch.cuda calls of Megatron's training path at the CPU."""
    import megatron.core.models.common.embeddings.rotary_pos_embedding as rotary
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
        chunks = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
        return torch.cat([chunks[cp_group.rank()], chunks[2 * cp_group.size() - 1 - cp_group.rank()]], dim=seq_dim)

    def zeros(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
        return torch.zeros(*size, **more)  # the pipeline schedule says device="cuda"

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "current_stream", lambda *args, **kwargs: _NoStream()),
            (torch.cuda, "synchronize", lambda *args, **kwargs: None),
            (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
            (random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
            (rope_utils, "get_pos_emb_on_this_cp_rank", on_this_cp_rank),
            (rotary, "get_pos_emb_on_this_cp_rank", on_this_cp_rank),
            (
                transformer_block,
                "LayerNormImpl",
                WrappedTorchNorm,
            ),  # Transformer Engine's, where it is installed, needs a GPU
            (schedules, "torch", SimpleNamespace(**vars(torch) | {"zeros": zeros})),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@contextmanager
def megatron_on_cpu(tp: int = 1, cp: int = 1, pp: int = 1, seed: int = 1234) -> Iterator[None]:
    """Initialise torch.distributed (gloo) and Megatron's parallel state for CPU tensors; one process unless launched by torchrun."""
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    else:  # no port, no environment: nothing that a child process could inherit
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with cuda_redirected(), parallel(tp, cp, pp, seed):
            yield
        dist.barrier()  # gloo now and then aborts at exit without it
    finally:
        dist.destroy_process_group()


@contextmanager
def parallel(tp: int = 1, cp: int = 1, pp: int = 1, seed: int = 1234, virtual_pp: int | None = None) -> Iterator[None]:
    """Megatron's parallel state and random seeds, inside an initialised process group."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual_pp,
    )
    torch.manual_seed(seed)
    # the inference tracker's fork() is a null context: there is no CUDA random state to keep
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)
    try:
        yield
    finally:
        mpu.destroy_model_parallel()


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def gpt(
    vocab: int = 256,
    tokens: int = 256,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    ffn: int = 512,
    tp: int = 1,
    cp: int = 1,
    recompute: str = "none",
    dtype: torch.dtype = torch.float32,
    edit_spec: Any = None,
    model: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A Megatron-Core GPTModel on the CPU: RMSNorm, QK norm, RoPE, SwiGLU, GQA.

    edit_spec: layer spec -> layer spec. model, config: more arguments for GPTModel and TransformerConfig.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {
        "none": {},
        "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[recompute]
    settings: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": head_dim,
        "ffn_hidden_size": ffn,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "pipeline_dtype": dtype,
    }
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return GPTModel(
        config=TransformerConfig(**(settings | more | config)),
        transformer_layer_spec=spec if edit_spec is None else edit_spec(spec),
        vocab_size=vocab,
        max_sequence_length=tokens,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **(model or {}),
    )


def causal_mask(tokens: int) -> torch.Tensor:
    """[1, 1, T, T], True where a key is hidden: Megatron's own attention needs it spelled out."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
