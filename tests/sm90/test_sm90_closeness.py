"""Three-way closeness: kernel, reference (the same casts in torch) and FP64; and the places where they must agree to the bit."""

import math

import pytest
import torch
from helpers import DIMS, TO_FP64, bits_equal, inputs, kernel, make_call, means_of, simulate, to_reference
from oracle import attention, rel

from dm_plugin import ops, reference

SPREADS = (1.0, 4.0)


@pytest.mark.parametrize("offset", [0, None])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("d", DIMS)
def test_three_ways(d, spread, offset):
    """O, dQ, dK, dV: near the reference, and no farther from FP64 than E4M3 costs."""
    q, k, v, do = inputs(t=640, h=4, g=2, d=d, spread=spread, seed=1)
    call = make_call(d, offset)
    run = kernel(q, k, v, do, call)
    ref, grads, _ = simulate(q, k, v, do, call, run)
    truth = attention(q, k, v, do, offset)
    lse = ops.lse(run.out, 640, call)
    assert float((lse - ref.lse).abs().max()) * math.log2(math.e) <= (2e-3 if spread == 1.0 else 2e-2)
    bound = {1.0: 0, 4.0: 1}[spread]
    for name, got, sim, fp64 in (
        ("o", run.o, ref.o, truth.o),
        ("dq", run.dq, grads.dq, truth.dq),
        ("dk", run.dk, grads.dk, truth.dk),
        ("dv", run.dv, grads.dv, truth.dv),
    ):
        to_truth, to_sim = rel(got, fp64), rel(got, sim)
        cost = rel(sim, fp64)  # what the casts alone cost on these inputs
        assert to_truth <= max(TO_FP64[name][bound], 1.03 * cost), (
            f"{name} is {to_truth:.4f} from FP64, the reference {cost:.4f}"
        )
        assert to_truth <= 1.1 * cost + 1e-3
        assert to_sim <= to_reference(d), f"{name} is {to_sim:.1e} from the reference"


@pytest.mark.parametrize("mode", ["stale", "consistent", "matched"])
@pytest.mark.parametrize("d", DIMS)
def test_modes_against_the_hopper_model(d, mode):
    """With the tensor core's own accumulation in the reference the gradients agree far below E4M3 noise, delta by delta."""
    q, k, v, do = inputs(t=384, h=2, d=d, spread=2.0, seed=2)
    call = make_call(d, 0, mode, accumulate="hopper")
    run = kernel(q, k, v, do, call)
    ref, grads, stats = simulate(q, k, v, do, call, run)
    assert rel(run.o, ref.o) <= 2e-3
    for name in ("dq", "dk", "dv"):
        assert rel(getattr(run, name), getattr(grads, name)) <= 5e-3, name
    used = {"stale": run.back.delta_stale, "consistent": run.back.delta_consistent, "matched": run.back.delta}[mode][
        ..., :384
    ]
    assert rel(used, stats.delta) <= 3e-3
    assert rel(run.back.delta_stale[..., :384], stats.delta_stale) <= 3e-3
    assert rel(run.back.delta_consistent[..., :384], stats.delta_consistent) <= 3e-3


@pytest.mark.parametrize("offset", [0, None])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("d", DIMS)
def test_scores_are_bitwise_the_model(d, spread, offset):
    """The row maximum of S equals the hopper model's to the bit in every row: S, its scale and the mask are exact."""
    q, k, v, _ = inputs(t=500, h=2, d=d, spread=spread, seed=3)
    call = make_call(d, offset, accumulate="hopper")
    out = ops.forward(q, k, v, call)
    with means_of(out, call):
        ref = reference.forward(q, k, v, call)
    assert bits_equal(out.m2[..., :500], ref.saved.m2.reshape(1, 2, 500))


@pytest.mark.parametrize("d", DIMS)
def test_dp_is_bitwise_the_model(d):
    """One key a sequence and q = 0 make P = 1, so the probe's row sum is dP - delta: equal to the model's to the last bit."""
    q, k, v, do = inputs(t=128, t_k=1, b=16, h=4, d=d, seed=4)
    q = torch.zeros_like(q)
    call = make_call(d, None, "stale", center=False, accumulate="hopper")
    run = kernel(q, k, v, do, call, probe=True)
    dp = _dp_of_codes(run, do, d)
    want = (dp.double() - run.back.delta_stale.double()).float()
    assert bits_equal(run.back.rows[0], want)


def _dp_of_codes(run, do, d):
    """dP of key 0 from the pre-pass's own codes, through the hopper model: [B, H, 128]."""
    from helpers import row_codes, values

    from dm_plugin.accumulate import hopper_dot

    alone = ops.quantise(do, keys=False)
    v_codes = values(row_codes(run.out.v_row, d))[:, :, :1]
    dot = hopper_dot(values(row_codes(alone.row, d)), v_codes)[..., 0]
    return _fma_scale(dot, alone.scale, run.out.v_scale[..., :1])


def _fma_scale(dot, do_scale, v_scale):
    """dot * fl(scale_do * scale_v), unrounded (the kernel subtracts delta in the same fused operation)."""
    return dot.double() * (do_scale * v_scale).double()


@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("d", DIMS)
def test_every_row_of_ds_sums_to_zero(d, spread):
    """Matched, before the cast: every row within 1e-6 of (sum |dS| + |delta|), the median far below; stale and consistent in order."""
    q, k, v, do = inputs(t=1024, h=4, g=2, d=d, spread=spread, seed=5)
    medians = {}
    for mode in ("matched", "consistent", "stale"):
        call = make_call(d, 0, mode)
        run = kernel(q, k, v, do, call, probe=True)
        stats = ops.row_stats(run.out, run.back, call, 1024, 1024)
        total, absolute = stats.row_sum[..., 1:], stats.row_abs_sum[..., 1:]
        medians[mode] = float((total.abs() / absolute).median())
        if mode == "matched":
            worst = float((stats.row_sum.abs() / (stats.row_abs_sum + stats.delta.abs())).nan_to_num(0.0).max())
            assert worst <= 1e-6, f"worst row {worst:.1e}"
    assert medians["matched"] <= 1e-7
    assert medians["matched"] < 1e-3 * medians["consistent"]
    assert medians["consistent"] < medians["stale"]


@pytest.mark.parametrize("d", DIMS)
def test_delta_is_the_fp64_sum(d):
    """delta against sum P dP in FP64 over the kernel's own codes and LSE."""
    q, k, v, do = inputs(t=512, h=2, d=d, spread=4.0, seed=6)
    call = make_call(d, 0, "matched", accumulate="hopper")
    run = kernel(q, k, v, do, call)
    with means_of(run.out, call):
        saved = reference.forward(q, k, v, call).saved
    lse2 = run.out.lse2[..., :512].reshape(2, 1, 512)
    s2 = reference._logits2(saved.q, saved.k, call)
    hidden = ~reference.visible_keys(512, 512, 0, q.device)
    p = torch.exp2(s2.double() - lse2.double().unsqueeze(-1)).masked_fill(hidden, 0.0)
    doc = reference.quantise(do.transpose(1, 2).reshape(2, 1, 512, d), 128)
    dp = (
        reference.dot(doc.codes, saved.v.codes, "hopper").double()
        * (doc.scale * saved.v.scale.transpose(-1, -2)).double()
    )
    want = ((p * dp).sum(-1) / p.sum(-1)).reshape(1, 2, 512)
    scale = (p * (dp - want.reshape(2, 1, 512, 1))).abs().sum(-1).reshape(1, 2, 512) + want.abs()
    error = float(((run.back.delta[..., :512] - want).abs() / scale).max())
    assert error <= 2e-6, f"{error:.1e}"


@pytest.mark.parametrize("d", DIMS)
def test_row_error_by_top_probability(d):
    """Saturated rows: the median row error of dQ does not blow up under matched, as it does under stale (numerics.md section 4)."""
    q, k, v, do = inputs(t=1024, h=4, d=d, spread=8.0, seed=7)
    truth = attention(q, k, v, do, 0)
    top = truth.p.amax(-1)  # [B, H, T]
    norm = truth.dq.norm(dim=-1).transpose(1, 2)
    error = {}
    for mode in ("stale", "matched"):
        run = kernel(q, k, v, do, make_call(d, 0, mode))
        row = (run.dq.double() - truth.dq).norm(dim=-1).transpose(1, 2)
        sharp = (top > 0.999) & (top < 1.0) & (norm > 0)
        error[mode] = float((row[sharp] / norm[sharp]).median())
    assert error["matched"] < 0.25 * error["stale"], error


def test_structured_inputs():
    """A key channel with offset 64, V with offset 16, heavy-tailed dO, saturated rows: within the bounds that plain inputs hold."""
    d = 128
    q, k, v, do = inputs(t=512, h=4, d=d, seed=8)
    offset_k, offset_v = k.clone(), v + 16.0
    offset_k[..., 5] += 64
    gen = torch.Generator(device="cuda").manual_seed(0)
    heavy = (do.float() * torch.exp(2 * torch.randn(do.shape[:3], device="cuda", generator=gen))[..., None]).bfloat16()
    cases = {
        "key offset": (q, offset_k, v, do),
        "v offset": (q, k, offset_v, do),
        "heavy dO": (q, k, v, heavy),
        "saturated": ((q.float() * 16).bfloat16(), k, v, do),
    }
    for name, (a, b, c, e) in cases.items():
        call = make_call(d, 0, accumulate="hopper")
        run = kernel(a, b, c, e, call, probe=True)
        ref, grads, _ = simulate(a, b, c, e, call, run)
        truth = attention(a, b, c, e, 0)
        loose = 3e-2 if name == "saturated" else to_reference(d)
        assert rel(run.o, ref.o) <= loose, name
        for grad in ("dq", "dk", "dv"):
            got = getattr(run, grad)
            assert rel(got, getattr(grads, grad)) <= loose, (name, grad)
            assert rel(got, getattr(truth, grad)) <= 2 * rel(getattr(grads, grad), getattr(truth, grad)) + 1e-3, (
                name,
                grad,
            )
        stats = ops.row_stats(run.out, run.back, call, 512, 512)
        assert float((stats.row_sum.abs() / (stats.row_abs_sum + stats.delta.abs())).nan_to_num(0.0).max()) <= 1e-6, (
            name
        )


@pytest.mark.parametrize("d", DIMS)
def test_probe_statistics(d):
    """RowStats of the probe build against the reference's; and the probe build computes the same gradients to the bit."""
    q, k, v, do = inputs(t=300, h=4, g=2, d=d, spread=2.0, seed=9)
    call = make_call(d, 0, accumulate="hopper")
    run, plain = kernel(q, k, v, do, call, probe=True), kernel(q, k, v, do, call)
    for name in ("o", "dq", "dk", "dv"):
        assert bits_equal(getattr(run, name), getattr(plain, name)), name
    got = ops.row_stats(run.out, run.back, call, 300, 300)
    _, _, want = simulate(q, k, v, do, call, run)
    for name in ("row_abs_sum", "row_abs_sum_cast", "top_p", "entropy"):
        a, b = getattr(got, name), getattr(want, name)
        assert rel(a, b) <= 5e-3, f"{name} {rel(a, b):.1e}"
    assert rel(got.row_sum_cast, want.row_sum_cast) <= 0.1  # a small difference of large codes
    assert rel(got.key_abs_sum, want.key_abs_sum) <= 5e-3
    assert float(got.key_col_sum.abs().sum() / got.key_abs_sum.sum()) <= 5e-3
    torch.testing.assert_close(
        got.max_logit, (attention(q, k, v, do, 0).lse * 0 + _max_logit(q, k)).amax(-1).float(), rtol=0.05, atol=0.05
    )
    for name in ("do", "p", "ds", "q", "k", "v"):
        a, b = got.codes[name], want.codes[name]
        assert int(a.count) == (int(b.count) if name in ("q", "k", "v", "do") else 4 * 300 * 301 // 2), name
        assert abs(int(a.saturated) - int(b.saturated)) <= 0.02 * int(b.saturated) + 8, name
        assert int(a.nonfinite) == 0
        assert math.isclose(float(a.amax), float(b.amax), rel_tol=0.05), name


def _max_logit(q, k):
    """Largest visible scaled score of each row [B, H, T], FP64."""
    kk = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    s = torch.einsum("bthd,bshd->bhts", q.double(), kk.double()) * q.shape[-1] ** -0.5
    t = q.shape[1]
    return s.masked_fill(torch.ones(t, t, device=q.device).triu(1).bool(), -torch.inf).amax(-1)
