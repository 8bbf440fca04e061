"""Field case A10 on the Megatron path: padding between packed sequences would enter outputs and amax statistics, so it is refused."""

import math

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_jobs import core_attention

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("padding", [1e4, math.nan])
def test_A10_padded_packed_sequences_are_refused_whatever_the_padding_holds(padding: float) -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(608, h, 128, generator=gen).bfloat16() for h in (8, 2, 2))
    for x in (q, k, v):
        x[250:256], x[606:] = padding, padding
    cu, padded = (torch.tensor(x, dtype=torch.int32) for x in ([0, 250, 600], [0, 256, 608]))
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=350,
        max_seqlen_kv=350,
    )
    core = core_attention(num_attention_heads=8, num_query_groups=2, kv_channels=128)
    records: list = []
    core.tap = records.append
    with pytest.raises(ValueError, match="packed_seq_params was given"):
        core(q, k, v, None, packed_seq_params=packed)
    assert not records


def test_A10_a_padding_mask_is_refused() -> None:
    q, k, v = (torch.randn(32, 1, h, 128).bfloat16() for h in (8, 2, 2))
    core = core_attention(num_attention_heads=8, num_query_groups=2, kv_channels=128)
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
    hidden[:, 25:] = True
    with pytest.raises(ValueError, match="attention_mask"):
        core(q, k, v, hidden[None, None])
