"""Field case A14 under tensor parallelism: dK and dV are summed over their query group when heads are split over two ranks."""

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from megatron_jobs import core_attention, cp_operands
from oracle import attention, rel

pytestmark = pytest.mark.megatron


def test_A14_two_ranks_hold_half_the_heads_each_and_their_key_gradients_are_the_groups_sum() -> None:
    # tensor parallelism gives each rank its query heads and the key heads they share; nothing is exchanged inside attention
    q, k, v, do = cp_operands()
    do = do.view(512, 2, 4, 16)
    for rank in (0, 1):
        heads, groups = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        leaves = [x.contiguous().requires_grad_() for x in (q[:, :, heads], k[:, :, groups], v[:, :, groups])]
        core = core_attention(num_attention_heads=4, num_query_groups=2, tensor_model_parallel_size=2)
        core(*leaves, None).backward(do[:, :, heads].flatten(2))
        truth = attention(*(x.transpose(0, 1) for x in (q, k, v, do)))
        assert rel(leaves[1].grad.transpose(0, 1), truth.dk[:, :, groups]) <= 0.10
        assert rel(leaves[2].grad.transpose(0, 1), truth.dv[:, :, groups]) <= 0.08


def test_A14_the_projection_gradients_of_two_ranks_are_those_of_one(megatron: None, megatron_ranks: Path) -> None:
    from megatron_jobs import TINY, batch, dm, found, gpt

    torch.manual_seed(1234)
    model = gpt(**TINY, edit_spec=dm())
    x, y = batch(0)
    model(x, torch.arange(64).expand(4, -1), None, labels=y).float().mean().backward()
    single = [float(p.grad.norm()) for n, p in model.named_parameters() if "linear_qkv.weight" in n]
    for layer, norm in enumerate(single):
        both = math.hypot(*(rank["tp"]["qkv_norms"][0][layer] for rank in found(megatron_ranks)))
        assert both == pytest.approx(norm, rel=3e-3)


def test_A14_heads_that_do_not_divide_are_refused_when_the_layer_is_built() -> None:
    with pytest.raises(ValueError, match="multiple of the number of key heads|num_query_groups"):
        core_attention(num_attention_heads=4, num_query_groups=3)
