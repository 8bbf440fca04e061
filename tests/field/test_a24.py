"""Field case A24 on the Megatron path: empty sequences in a packed batch are refused with the packing; empty and one-token tensors run."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_jobs import core_attention

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(30)]


@pytest.mark.parametrize("cu", [[0, 0, 256, 256, 512], [0], [0, 1, 2, 3]])
def test_A24_packed_batches_with_empty_sequences_are_refused_at_once(cu: list[int]) -> None:
    q, k, v = (torch.randn(cu[-1], h, 16).bfloat16() for h in (4, 2, 2))
    bounds = torch.tensor(cu, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=1, max_seqlen_kv=1
    )
    with pytest.raises(ValueError, match="packed_seq_params was given"):
        core_attention()(q, k, v, None, packed_seq_params=packed)


@pytest.mark.parametrize(("tokens", "batch"), [(0, 2), (5, 0)])
def test_A24_no_tokens_or_no_sequences_give_empty_tensors_and_gradients(tokens: int, batch: int) -> None:
    q, k, v = (torch.randn(tokens, batch, h, 16).bfloat16().requires_grad_() for h in (4, 2, 2))
    o = core_attention()(q, k, v, None)
    assert o.shape == (tokens, batch, 64)
    o.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


def test_A24_one_token_gives_its_value() -> None:
    q, k, v = (torch.randn(1, 2, h, 16, generator=torch.Generator().manual_seed(h)).bfloat16() for h in (4, 2, 2))
    o = core_attention()(q, k, v, None).view(1, 2, 4, 16).float()
    assert torch.allclose(o, v.repeat_interleave(2, 2).float(), rtol=0.05, atol=0.05)
