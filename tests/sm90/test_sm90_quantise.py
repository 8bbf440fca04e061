"""The pre-pass: codes and scales equal the reference's to the bit, images hold them in the right places, edges behave."""

import pytest
import torch
from helpers import DIMS, inputs, kernel, make_call, row_codes, same, token_codes, values

from dm_plugin import ops
from dm_plugin.casts import fold_scales, p_exponent
from dm_plugin.quantise import quantise, token_mean


def draw(t, d, heads=3, b=2, seed=0, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(b, t, heads, d, generator=gen) * torch.exp(torch.randn(b, t, 1, 1, generator=gen) * 2) * scale
    return x.bfloat16().cuda()


def check(x, keys, center=False):
    """Codes, scales, both images and padding of one pre-pass against the reference (guards pitfalls 2 and 6: wrong swizzle, pi, 448/0)."""
    d, t = x.shape[3], x.shape[1]
    got = ops.quantise(x, keys=keys, center=center, probe=True)
    real = x.transpose(1, 2).float().cpu()
    if center:
        real = real - got.mean.cpu()[:, :, None]
    want = quantise(real, 64 if keys else 128)
    codes = row_codes(got.row, d).cpu()
    assert same(values(codes[:, :, :t]), want.codes)
    assert (codes[:, :, t:] & 0x7F == 0).all(), "padding rows hold codes"
    assert torch.equal(token_codes(got.token, d, keys_halves(d)).cpu(), codes), "the token image is not the row image"
    block = 64 if keys else 128
    blocks = -(-t // block)
    assert torch.equal(got.scale[..., :blocks].cpu(), want.scale[..., ::block, 0])
    assert (got.scale[..., blocks:] == 1).all()
    saturated = (want.codes.abs() == 448).sum()
    under = ((want.codes == 0) & (real != 0)).sum()
    bad = want.codes.isnan().sum()
    assert got.stats[:3].tolist() == [int(saturated), int(under), int(bad)]
    amax = torch.where(torch.isfinite(real), real.abs(), 0.0).amax()
    assert float(got.stats[3].to(torch.int32).view(torch.float32)) == float(amax)
    return got, want


def keys_halves(d):
    return d == 256


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("t", [1, 63, 64, 65, 127, 128, 129, 200, 385])
def test_codes_and_images_are_exact(t, d):
    for keys, center in ((False, False), (True, False), (True, True)):
        check(draw(t, d), keys, center)


@pytest.mark.parametrize("d", DIMS)
def test_means_are_those_of_fp64(d):
    x = draw(1000, d) + 3.0
    got = ops.quantise(x, keys=True, center=True).mean
    torch.testing.assert_close(got.double(), x.transpose(1, 2).double().mean(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[:, :, None], token_mean(x.transpose(1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", DIMS)
def test_folds(d):
    """Fold records: max, rho, log2 rho and the guard at a ratio of 16, with empty halves left out."""
    x = draw(640, d, heads=1, b=1)
    x[:, 64:128] *= 64.0
    x[:, 128:192] = 0
    x[:, 576:] = 0
    got, want = check(x, True)
    want_fold = fold_scales(want, 128)
    fold = got.fold.cpu()[0, 0]
    rho = want_fold.rho[0, 0, ::64].reshape(-1, 2)
    assert torch.equal(fold[:, 3:5], rho)
    torch.testing.assert_close(fold[:, 5:7], torch.log2(rho), rtol=1e-6, atol=1e-7)
    filled = (x.cpu()[0, :, 0].unflatten(0, (-1, 2, 64)).float().abs().amax((2, 3))) > 0
    scales = torch.where(filled, want.scale[0, 0, ::64, 0].reshape(-1, 2), 0.0)
    assert torch.equal(fold[:, 2], torch.where(filled.any(1), scales.amax(1), 1.0))
    assert (fold[want_fold.pairs[0, 0], 7] == 1).all()
    assert fold[0, 7] == 0, "a ratio of 64 must not be folded"


@pytest.mark.parametrize("keys", [False, True])
def test_extremes(keys):
    """Zero blocks, subnormal blocks, huge values and NaN or Inf stay in their own places and never divide by zero."""
    x = draw(512, 128, heads=2, b=1)
    x[:, 128:256] = 0
    x[:, 256:384] = 1e-39
    x[:, 300, 1, 7] = 3e38
    check(x, keys)
    x[0, 5, 0, 3], x[0, 6, 1, 4], x[0, 400, 0, 9] = float("nan"), float("inf"), float("-inf")
    got, _ = check(x, keys)
    assert int(got.stats[2]) == 3
    if keys:
        check(x, True, center=True)


def test_strides():
    """Slices of a fused projection, transposes, expanded and stride-2 tensors give the bits of their contiguous copies."""
    fused = draw(130, 128, heads=6, b=2)
    wide = draw(130, 256, heads=2, b=2)
    views = [
        fused[:, :, 1:3],
        fused.transpose(1, 2)[:, :5].transpose(1, 2)[:, 3:],
        wide[..., ::2],
        wide[..., 3:131],
        fused[:1, :1, :1, :].expand(2, 130, 3, 128),
        fused.new_ones(()).expand(2, 65, 3, 128),
        fused.permute(1, 0, 2, 3),
    ]
    for x in views:
        for keys in (False, True):
            a = ops.quantise(x, keys=keys, center=keys)
            b = ops.quantise(x.contiguous(), keys=keys, center=keys)
            assert all(torch.equal(u, w) for u, w in zip(a, b, strict=True))


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("t", [1, 100, 257])
def test_grad_prepass(t, d):
    """dO images, <dO,O>, <dO_hat,O>, lambda and E of the 128-query blocks; rows without a key get lambda +inf and delta 0."""
    o, do = draw(t, d, seed=1), draw(t, d, seed=2)
    rows = -(-t // 128) * 128
    gen = torch.Generator().manual_seed(3)
    m2 = torch.full((2, 3, rows), -torch.inf)
    m2[..., :t] = torch.randn(2, 3, t, generator=gen) * 3
    lse2 = m2 + torch.rand(2, 3, rows, generator=gen) * 6
    lse2[0, 1, 0], m2[0, 1, 0] = -torch.inf, -torch.inf
    row, token, scale, stale, cons, lam, e_pow, stats = torch.ops.dm_plugin.quantise_grad(
        do, o, lse2.cuda(), m2.cuda(), True
    )
    real = do.transpose(1, 2).float().cpu()
    want = quantise(real, 128)
    codes = row_codes(row, d).cpu()
    assert same(values(codes[:, :, :t]), want.codes)
    assert torch.equal(token_codes(token, d, False).cpu(), codes)
    assert torch.equal(scale.cpu(), want.scale[..., ::128, 0])
    oo = o.transpose(1, 2).double().cpu()
    empty = torch.isneginf(lse2)
    for got, a in ((stale, real.double()), (cons, (want.codes * want.scale).double())):
        truth = (a * oo).sum(-1).masked_fill(empty[..., :t], 0.0)
        torch.testing.assert_close(
            got[..., :t].cpu().double(), truth, rtol=1e-5, atol=1e-5 * float((a * oo).abs().sum(-1).max())
        )
        assert (got[..., t:] == 0).all()
    e = p_exponent(lse2, m2)
    want_lambda = torch.where(empty, torch.inf, lse2 - e)
    assert torch.equal(lam.cpu(), want_lambda)
    assert torch.equal(e_pow.cpu(), torch.exp2(-e[..., ::128]))
    assert int(stats[0]) == int((want.codes.abs() == 448).sum())


@pytest.mark.parametrize("d", DIMS)
def test_saved_images_are_the_prepass(d):
    """What forward keeps for backward is what the pre-pass alone gives."""
    q, k, v, do = inputs(t=200, h=4, g=2, d=d)
    out = kernel(q, k, v, do, make_call(d)).out
    for x, keys, row, scale in (
        (q, False, out.q_row, out.q_scale),
        (k, True, out.k_row, out.k_scale),
        (v, True, out.v_row, out.v_scale),
    ):
        alone = ops.quantise(x, keys=keys, center=keys)
        assert torch.equal(alone.row, row)
        assert torch.equal(alone.scale, scale)
    want = torch.einsum("bthd,bhd->bht", q.double(), out.k_mean.double().repeat_interleave(2, 1))
    torch.testing.assert_close(out.q_dot[..., :200].double(), want, rtol=1e-4, atol=1e-4)
