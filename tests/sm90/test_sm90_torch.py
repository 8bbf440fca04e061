"""The operators as torch sees them: opcheck, torch.compile, autograd, refusals before launch."""

import pytest
import torch
import torch.utils.checkpoint
from helpers import bits_equal, inputs, kernel, make_call

import dm_plugin
from dm_plugin import ops


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("d", [64, 128])
def test_opcheck(d):
    q, k, v, do = inputs(t=130, h=4, g=2, d=d)
    run = kernel(q, k, v, do, make_call(d, 0))
    package = torch.ops.dm_plugin
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for probe in (False, True):
        torch.library.opcheck(package.quantise.default, (k, True, True, None, True, True, probe), test_utils=tests)
        torch.library.opcheck(
            package.quantise.default, (q, False, False, run.out.k_mean, True, False, probe), test_utils=tests
        )
        torch.library.opcheck(package.quantise_grad.default, (do, *run.out.for_backward()[:3], probe), test_utils=tests)
        args = (*run.out.for_backward(), 130, d**-0.5, True, 0, 2, probe)
        torch.library.opcheck(package.attention_backward.default, (do, *args), test_utils=tests)
        for keep in (False, True):
            torch.library.opcheck(
                package.attention_forward.default,
                (q, k, v, d**-0.5, True, 0, True, True, 2, keep, probe),
                test_utils=tests,
            )
    torch.library.opcheck(
        package.attention_forward.default,
        (*leaves(q, k, v), d**-0.5, True, 0, True, True, 2, True, False),
        test_utils=tests,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    """No graph break, forward and backward, equal to eager to the bit."""
    torch._dynamo.reset()

    def loss(q, k, v, do):
        return (dm_plugin.dm_attn_func(q * 1.0, k, v) * do).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for t in (128, 200):
        q, k, v, do = inputs(t=t, h=2, d=128, seed=t)
        a, b = leaves(q, k, v), leaves(q, k, v)
        loss(*a, do).backward()
        compiled(*b, do).backward()
        assert all(bits_equal(x.grad, y.grad) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["matched", "consistent", "stale"])
def test_autograd_is_the_raw_call(mode):
    """dm_attn_func's gradients are attention_backward's; the tap fires once, in backward, and changes no bit."""
    q, k, v, do = inputs(t=257, h=4, g=2, d=128)
    run = kernel(q, k, v, do, make_call(128, 0, mode))
    for tap in (None, "probe"):
        seen = []
        a = leaves(q, k, v)
        o = dm_plugin.dm_attn_func(*a, mode=mode, tap=seen.append if tap else None)
        assert not seen
        o.backward(do)
        assert bits_equal(o.detach(), run.o)
        for x, name in zip(a, ("dq", "dk", "dv"), strict=True):
            assert x.grad.shape == x.shape
            assert bits_equal(x.grad, getattr(run, name)), name
        assert len(seen) == (1 if tap else 0)
    assert seen[0].backend == f"sm90:{mode}"


def test_no_grad_keeps_nothing():
    q, k, v, _ = inputs(t=256, h=2, d=128)
    with torch.no_grad():
        o = dm_plugin.dm_attn_func(q, k, v)
    a = leaves(q, k, v)
    assert bits_equal(o, dm_plugin.dm_attn_func(*a).detach())


def test_saved_tensors_with_checkpoint():
    """Recompute gives the same gradients; the tap fires once."""
    q, k, v, do = inputs(t=256, h=2, d=128)
    a, b, seen = leaves(q, k, v), leaves(q, k, v), []
    dm_plugin.dm_attn_func(*a).backward(do)
    torch.utils.checkpoint.checkpoint(
        lambda *x: dm_plugin.dm_attn_func(*x, tap=seen.append), *b, use_reentrant=False
    ).backward(do)
    assert all(bits_equal(x.grad, y.grad) for x, y in zip(a, b, strict=True))
    assert len(seen) == 1


def x(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.zeros(shape, dtype=dtype, device=device)


OK = (1, 8, 2, 64)


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        ((OK, "float16"), (OK, "float16"), (OK, "float16"), ("float16", "bfloat16")),
        ((OK, "float32"), (OK, "float32"), (OK, "float32"), ("float32", "bfloat16")),
        ((OK, "bfloat16"), (OK, "cpu"), (OK, "bfloat16"), ("k is on cpu",)),
        (((1, 8, 2, 96), "bfloat16"), ((1, 8, 2, 96), "bfloat16"), ((1, 8, 2, 96), "bfloat16"), ("96", "64, 128")),
        (((1, 8, 3, 64), "bfloat16"), (OK, "bfloat16"), (OK, "bfloat16"), ("3", "2")),
        (((2, 8, 2, 64), "bfloat16"), (OK, "bfloat16"), (OK, "bfloat16"), ("batch",)),
        ((OK, "bfloat16"), ((1, 9, 2, 64), "bfloat16"), (OK, "bfloat16"), ("v has shape", "k")),
        (((8, 2, 64), "bfloat16"), (OK, "bfloat16"), (OK, "bfloat16"), ("q has shape",)),
        ((OK, "bfloat16"), ((1, 8, 2, 128), "bfloat16"), ((1, 8, 2, 128), "bfloat16"), ("head_dim",)),
    ],
)
def test_bad_input_is_refused_by_name(q, k, v, words):
    """Both doors: the Python sentence, and the operator's own check for callers that come past it."""

    def make(spec):
        shape, kind = spec
        return x(*shape, device="cpu") if kind == "cpu" else x(*shape, dtype=getattr(torch, kind))

    q, k, v = make(q), make(k), make(v)
    with pytest.raises(ValueError, match=".") as python:
        dm_plugin.dm_attn_func(q, k, v, impl="sm90")
    with pytest.raises(RuntimeError) as native:
        torch.ops.dm_plugin.attention_forward(q, k, v, 0.1, True, 0, True, True, 2, True, False)
    for word in words:
        assert word in str(python.value) or word in str(native.value), (word, str(python.value), str(native.value))
    assert "want" in str(native.value)


def test_tampered_saved_tensors_are_refused():
    """Wrong shape, dtype, strides, alignment or device of what backward reads: named before launch."""
    q, k, v, do = inputs(t=130, h=2, d=64)
    out = ops.forward(q, k, v, make_call(64, 0))
    good = list(out.for_backward())
    names = ("o", "lse2", "m2", "q_row", "q_t", "q_scale", "k_row", "k_t", "k_scale", "k_fold", "v_row", "v_scale")
    for i, name in enumerate(names):
        for wrong in (good[i][..., :-1], good[i].cpu(), good[i].double(), good[i].repeat_interleave(2, -1)[..., ::2]):
            bad = [*good[:i], wrong, *good[i + 1 :]]
            with pytest.raises(RuntimeError, match=name):
                ops.backward(do, tuple(bad), 130, make_call(64, 0))
    shifted = torch.empty(good[3].numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(good[3].shape)
    with pytest.raises(RuntimeError, match="misaligned"):
        ops.backward(do, (*good[:3], shifted, *good[4:]), 130, make_call(64, 0))
    with pytest.raises(RuntimeError, match="dO has dtype float32, want bfloat16"):
        ops.backward(do.float(), tuple(good), 130, make_call(64, 0))


def test_build_info_names_compiler_and_flags():
    info = ops.build_info()
    assert info["nvcc"].startswith("13.")
    assert "fast_math" not in info["nvcc_flags"]
