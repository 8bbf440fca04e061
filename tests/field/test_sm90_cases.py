"""Field cases A12, A13, A14, A18, A20, A21 and A22 on the sm90 kernel."""

import pytest
import torch
from cases import gaussian
from hopper import missing
from oracle import attention, rel

from dm_plugin import ops, reference
from dm_plugin.attention import dm_attn_func
from dm_plugin.formats import SM90

pytestmark = [pytest.mark.sm90, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def cuda(**kw):
    return tuple(x.cuda() for x in gaussian(**kw))


def grads(q, k, v, do, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = dm_attn_func(*leaves, impl="sm90", **options)
    o.backward(do)
    return [o.detach(), *(x.grad for x in leaves)]


def equal(a, b):
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_A12_slices_and_transposed_views_equal_contiguous_inputs():
    torch.manual_seed(0)
    qkv = torch.randn(512, 1, 18, 128, device="cuda").bfloat16().transpose(0, 1)
    q, k, v = qkv.split([16, 1, 1], dim=2)
    do = torch.randn(1, 512, 16, 128, device="cuda").bfloat16()
    assert not q.is_contiguous()
    assert equal(grads(q, k, v, do), grads(*(x.contiguous() for x in (q, k, v)), do))
    view = torch.randn(2, 4, 128, 64, device="cuda").bfloat16().transpose(1, 2)
    do = torch.randn(2, 128, 4, 64, device="cuda").bfloat16()
    assert equal(grads(view, view, view, do), grads(*[view.contiguous()] * 3, do))
    whole = torch.randn(1, 512, 18, 128, device="cuda").bfloat16().requires_grad_()
    o = dm_attn_func(*whole.split([16, 1, 1], dim=2))
    o.sum().backward()
    assert whole.grad.shape == whole.shape


@pytest.mark.parametrize("kind", ["expanded", "sliced", "strided"])
def test_A13_any_layout_of_the_incoming_gradient_gives_the_same_bits(kind):
    q, k, v, do = cuda(t=512, h=2, d=128)
    odd = {
        "expanded": lambda: torch.ones((), dtype=do.dtype, device="cuda").expand(do.shape),
        "sliced": lambda: torch.cat([do, do], 1)[:, 100:612],
        "strided": lambda: torch.stack([do, do * 3], -1)[..., 0],
    }[kind]()
    assert kind == "sliced" or not odd.is_contiguous()
    assert equal(grads(q, k, v, odd), grads(q, k, v, odd.contiguous()))


@pytest.mark.parametrize(("h", "g"), [(4, 1), (6, 3), (16, 2)])
def test_A14_key_gradients_are_the_sum_over_their_query_group(h, g):
    q, k, v, do = cuda(t=256, h=h, g=g, d=128)
    truth = attention(q, k, v, do)
    got = grads(q, k, v, do)
    assert rel(got[2], truth.dk) < 0.072
    assert rel(got[3], truth.dv) < 0.055


def test_A14_heads_that_do_not_divide_are_refused():
    q, k, v, _ = cuda(t=64, h=6, g=4, d=64)
    with pytest.raises(ValueError, match="6 heads and k has 4"):
        dm_attn_func(q, k, v)


def test_A18_a_large_key_channel_is_harmless_and_the_callers_key_is_untouched():
    q, k, v, do = cuda(t=512, h=2, d=128)
    k[..., 5] += 64
    before = k.clone()
    truth = attention(q, k, v, do)
    o, dq, _, _ = grads(q, k, v, do)
    assert torch.equal(k, before)
    assert rel(o, truth.o) < 0.055
    assert rel(dq[..., 5], truth.dq[..., 5]) <= 0.10
    call = reference.Call(SM90, 128**-0.5, 0, "matched")
    lse = ops.lse(ops.forward(q, k, v, call), 512, call)
    assert float((lse - truth.lse).abs().max()) < 0.25, "LSE is not that of the uncentred scores"


def test_A20_zero_blocks_and_one_huge_value_stay_finite_and_exact_zeros_stay_zero():
    q, k, v, do = cuda(t=512, h=2, d=128)
    k[:, 64:128], do[:, 128:256], v[:, 0:64] = 0, 0, 0
    v[0, 300, 0, 7] = 1e6
    got = grads(q, k, v, do)
    assert all(torch.isfinite(x).all() for x in got)
    assert (got[1][:, 128:256] == 0).all()
    for x, keys in ((q, False), (k, True), (v, True), (do, False)):
        assert int((ops.quantise(x, keys=keys, center=keys).row & 0x7F == 0x7F).sum()) == 0


@pytest.mark.parametrize("t", [1000, 257, 96, 97, 1])
def test_A21_lengths_off_the_tile_see_no_old_memory(t):
    q, k, v, do = cuda(t=t, h=2, d=128)
    results = []
    for fill in (0.0, float("nan")):
        torch.cuda.empty_cache()
        block = torch.full((2**31 // 4,), fill, device="cuda")
        del block
        results.append(grads(q, k, v, do))
    assert all(torch.isfinite(x).all() for x in results[1])
    assert equal(*results)


def test_A22_side_stream_and_graph_replay_equal_eager():
    q, k, v, do = cuda(t=384, h=4, g=2, d=128)
    want = grads(q, k, v, do)
    side = torch.cuda.Stream()
    late = [torch.zeros_like(x) for x in (q, k, v, do)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for x, y in zip(late, (q, k, v, do), strict=True):
            x.copy_(y)
        got = grads(*late)
    side.synchronize()
    assert equal(got, want)
    static = [x.clone().requires_grad_(i < 3) for i, x in enumerate((q, k, v, do))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = dm_attn_func(*static[:3])
        held = [o, *torch.autograd.grad(o, static[:3], static[3])]
    for seed in (1, 2, 3):
        fresh = [x * 2 for x in cuda(t=384, h=4, g=2, d=128, seed=seed)]
        with torch.no_grad():
            for x, y in zip(static, fresh, strict=True):
                x.copy_(y)
        graph.replay()
        assert equal(held, grads(*fresh))


def test_a_nan_or_inf_stays_in_its_own_rows_and_columns():
    """A NaN in one query row reaches that row of O and dQ and no other row of them; other heads are untouched."""
    q, k, v, do = cuda(t=300, h=2, d=128)
    clean = grads(q, k, v, do)
    q[0, 200, 1, 3] = float("nan")
    o, dq, dk, _ = grads(q, k, v, do)
    others = torch.arange(300, device="cuda") != 200
    assert o[0, 200, 1].isnan().all()
    assert torch.isfinite(o[0, others, 1]).all()
    assert torch.isfinite(dq[0, others, 1]).all()
    assert torch.equal(o[:, :, 0], clean[0][:, :, 0])
    assert torch.equal(dk[:, :, 0], clean[2][:, :, 0])
