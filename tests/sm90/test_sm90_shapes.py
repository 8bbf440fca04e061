"""Every tile edge, every head layout, long sums and one-hot rows."""

import pytest
import torch
from helpers import DIMS, bits_equal, inputs, kernel, make_call, simulate, to_reference
from oracle import attention, rel

from dm_plugin import ops

SQUARE = (1, 2, 63, 64, 65, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 385, 1000)
RECTANGLES = (
    (1, 300, None),
    (300, 1, None),
    (1, 257, 256),
    (65, 200, 135),
    (200, 65, -135),
    (333, 200, -133),
    (129, 513, 384),
    (400, 130, -270),
    (130, 400, 0),
    (257, 257, 300),
)
HEADS = ((4, 1), (6, 3), (16, 2), (3, 3), (5, 1))


def near_reference(q, k, v, do, d, offset):
    call = make_call(d, offset, accumulate="hopper")  # S to the bit: a code then flips only on a last bit of exp2
    run = kernel(q, k, v, do, call)
    ref, grads, _ = simulate(q, k, v, do, call, run)
    for name, got, want in (
        ("o", run.o, ref.o),
        ("dq", run.dq, grads.dq),
        ("dk", run.dk, grads.dk),
        ("dv", run.dv, grads.dv),
    ):
        assert torch.isfinite(got).all(), f"{name} has a non-finite value"
        error = float((got.double() - want.double()).norm())
        assert error <= to_reference(d) * float(want.double().norm()) + 1e-6, f"{name} {error:.1e}"
    return run


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("t", SQUARE)
def test_lengths(t, d):
    """Causal and full at every edge of the 64- and 128-token tiles (guards pitfalls 5 and 8)."""
    q, k, v, do = inputs(t=t, h=2, d=d, seed=t)
    near_reference(q, k, v, do, d, 0)
    near_reference(q, k, v, do, d, None)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(("t", "t_k", "offset"), RECTANGLES)
def test_rectangles(t, t_k, offset, d):
    """Tq != Tk, any causal offset, rows that see no key: those give O = 0, gradient 0, LSE -inf."""
    q, k, v, do = inputs(t=t, t_k=t_k, h=2, d=d, seed=t + t_k)
    run = near_reference(q, k, v, do, d, offset)
    if offset is not None and offset < 0:
        blind = min(t, -offset)
        assert (run.o[:, :blind] == 0).all()
        assert (run.dq[:, :blind] == 0).all()
        assert torch.isneginf(ops.lse(run.out, t, make_call(d, offset))[..., :blind]).all()


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(("h", "g"), HEADS)
def test_grouped_heads_and_batches(h, g, d):
    """dK, dV are sums over the query group; batches and heads do not mix: each equals the call on its own slice to the bit."""
    q, k, v, do = inputs(t=200, h=h, g=g, d=d, b=3, seed=h)
    run = near_reference(q, k, v, do, d, 0)
    r = h // g
    one = kernel(q[1:2, :, :r], k[1:2, :, :1], v[1:2, :, :1], do[1:2, :, :r], make_call(d, 0))
    assert bits_equal(one.o, run.o[1:2, :, :r])
    assert bits_equal(one.dq, run.dq[1:2, :, :r])
    assert bits_equal(one.dk, run.dk[1:2, :, :1])
    assert bits_equal(one.dv, run.dv[1:2, :, :1])


@pytest.mark.parametrize("d", DIMS)
def test_one_hot_rows_copy_v(d):
    """Each query attends one key: O is that key's V code to the bit of BF16, dV is that query's dO (guards wrong pi and swizzle)."""
    t = 256
    gen = torch.Generator().manual_seed(0)
    perm = torch.randperm(t, generator=gen)
    k = torch.randn(1, t, 1, d, generator=gen).sign()
    q = 16.0 * k[:, perm]
    v, do = torch.randn(1, t, 1, d, generator=gen), torch.randn(1, t, 1, d, generator=gen)
    v[:, ::64, :, 0] = 6.0  # every 64-key block has one scale, so that no ratio is folded into P
    q, k, v, do = (x.bfloat16().cuda() for x in (q, k, v, do))
    call = make_call(d, None, center=False)
    run = kernel(q, k, v, do, call)
    from helpers import row_codes, values

    v_hat = values(row_codes(run.out.v_row, d)) * run.out.v_scale.repeat_interleave(64, -1)[..., None]
    assert rel(run.o.transpose(1, 2), v_hat[:, :, perm.cuda()]) < 3e-3
    do_hat = ops.quantise(do, keys=False)
    do_hat = values(row_codes(do_hat.row, d)) * do_hat.scale.repeat_interleave(128, -1)[..., None]
    want = torch.empty_like(do_hat)
    want[:, :, perm.cuda()] = do_hat
    assert rel(run.dv.transpose(1, 2), want) < 3e-3


@pytest.mark.parametrize("d", DIMS)
def test_long_positive_sums_have_no_bias(d):
    """T = 32768, all of one sign: without promotion the 13-bit accumulator would lose percents (pitfall 4)."""
    t = 32768
    gen = torch.Generator(device="cuda").manual_seed(0)
    draw = lambda n: (torch.rand(1, n, 1, d, generator=gen, device="cuda") + 0.5).bfloat16()  # noqa: E731
    k, v, do = draw(t), draw(t), draw(256)
    q = torch.zeros_like(do)
    run = kernel(q, k, v, do, make_call(d, None, center=False))
    alone = ops.quantise(v, keys=True)
    from helpers import row_codes, values

    v_hat = values(row_codes(alone.row, d)).double() * alone.scale.double().repeat_interleave(64, -1)[..., None]
    want = v_hat.mean(2)  # [1, 1, D]
    bias = float(((run.o.double() - want[:, None]) / want[:, None]).mean())
    assert abs(bias) < 1e-3, f"O is biased by {bias:.1e}"
    q, k, v, do = torch.zeros(1, t, 1, d, device="cuda").bfloat16(), draw(128), draw(128), draw(t)
    run = kernel(q, k, v, do, make_call(d, None, center=False))
    alone = ops.quantise(do, keys=False)
    do_hat = values(row_codes(alone.row, d)).double() * alone.scale.double().repeat_interleave(128, -1)[..., None]
    want = do_hat.sum(2) / 128
    bias = float(((run.dv.double() - want[:, None]) / want[:, None]).mean())
    assert abs(bias) < 1e-3, f"dV is biased by {bias:.1e}"


@pytest.mark.parametrize("rows", ["queries", "keys"])
def test_offsets_beyond_32_bits(rows):
    """More than 2^31 elements in one tensor: its last unit equals the same unit run alone, to the bit."""
    t, heads, d = 262144, 72, 128
    big = torch.randn(1, t, heads, d, device="cuda", dtype=torch.bfloat16)
    small = torch.randn(1, 128, heads if rows == "keys" else 1, d, device="cuda", dtype=torch.bfloat16)
    call = make_call(d, None, center=False)
    if rows == "queries":
        grad = torch.randn_like(big)
        out = ops.forward(big, small, small, call)
        back = ops.backward(grad, out.for_backward(), 128, call)
        alone = kernel(big[:, -128:, -1:], small, small, grad[:, -128:, -1:], call)
        assert bits_equal(out.o[:, -128:, -1:], alone.o)
        assert bits_equal(back.dq[:, -128:, -1:], alone.dq)
    else:
        out = ops.forward(small, big, big, call)
        back = ops.backward(small, out.for_backward(), t, call)
        alone = kernel(small[:, :, -1:], big[:, :, -1:], big[:, :, -1:], small[:, :, -1:], call)
        assert bits_equal(out.o[:, :, -1:], alone.o)
        assert bits_equal(back.dk[:, -128:, -1:], alone.dk[:, -128:])
        assert torch.isfinite(back.dv).all()


@pytest.mark.parametrize("d", DIMS)
def test_shift_and_permutation(d):
    """Adding a constant vector to K moves neither O nor the gradients beyond E4M3 noise; permuting unmasked keys permutes dK."""
    q, k, v, do = inputs(t=256, h=2, d=d, seed=11)
    base, moved = (
        kernel(q, k, v, do, make_call(d, None)),
        kernel(q, (k.float() + 8.0).bfloat16(), v, do, make_call(d, None)),
    )
    truth = attention(q, (k.float() + 8.0).bfloat16(), v, do, None)
    assert rel(moved.o, truth.o) <= 0.06
    assert rel(moved.dq, truth.dq) <= 0.08
    whole = (
        torch.arange(256, device="cuda").reshape(2, 128).flip(0).reshape(-1)
    )  # swap the two units: scales stay with their blocks
    swapped = kernel(q, k[:, whole], v[:, whole], do, make_call(d, None))
    assert rel(swapped.o, base.o) <= 5e-3
    assert rel(swapped.dk, base.dk[:, whole]) <= 1e-2
