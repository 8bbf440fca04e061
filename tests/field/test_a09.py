"""Field case A09 on the Megatron path: documents packed into one row must not read each other under a causal layer, so packing is refused."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_jobs import core_attention

pytestmark = pytest.mark.megatron


def test_A09_packed_sequences_are_refused() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(512, h, 128, generator=gen).bfloat16() for h in (4, 1, 1))
    cu = torch.tensor([0, 256, 512], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=256, max_seqlen_kv=256)
    core = core_attention(num_attention_heads=4, num_query_groups=1, kv_channels=128)
    with pytest.raises(ValueError, match="packed sequences are not supported by dm_plugin yet"):
        core(q, k, v, None, packed_seq_params=packed)


def test_A09_a_block_diagonal_mask_is_refused_under_a_causal_layer_not_ignored() -> None:
    # what --reset-attention-mask makes: causal inside two documents, nothing across them
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(512, 1, h, 128, generator=gen).bfloat16() for h in (4, 1, 1))
    core = core_attention(num_attention_heads=4, num_query_groups=1, kv_channels=128)
    hidden = torch.ones(512, 512, dtype=torch.bool).triu(1)
    hidden[256:, :256] = True
    with pytest.raises(ValueError, match="reset_attention_mask, packing or padding"):
        core(q, k, v, hidden[None, None])
    # the leak that the refusal prevents is as large as the output itself
    own = core(q[256:], k[256:], v[256:], None).float()
    assert (core(q, k, v, None)[256:].float() - own).norm() / own.norm() > 0.5
