"""dm_attn_func: the call, its refusals in one sentence, backend resolution, autograd behaviour."""

import gc
import weakref

import pytest
import torch
from cases import gaussian

import dm_plugin.attention as attention_module
from dm_plugin.attention import dm_attn_func, resolve_impl
from dm_plugin.support import AttnCall, why_not


def test_the_plain_call_works_unchanged() -> None:
    q, k, v, do = gaussian(64, 4, 2)
    o = dm_attn_func(q.requires_grad_(), k, v, causal=True, mode="matched")
    o.backward(do)
    assert o.shape == q.shape
    assert q.grad.shape == q.shape


BAD_CALLS = {
    "heads": (
        lambda q, k, v: (q, k[:, :, :2].repeat(1, 1, 2, 1)[:, :, :3], v[:, :, :1].expand(-1, -1, 3, -1)),
        {},
        "q has 4 heads and k has 3",
    ),
    "rank": (
        lambda q, k, v: (q[0], k, v),
        {},
        r"q has shape \(64, 4, 64\); it must be \(batch, tokens, heads, head_dim\)",
    ),
    "dtype": (lambda q, k, v: (q, k.float(), v), {}, "k has dtype torch.float32 and q torch.bfloat16"),
    "device": (lambda q, k, v: (q, k, v.to("meta")), {}, "v is on meta and q on cpu"),
    "kv tokens": (lambda q, k, v: (q, k, v[:, :10]), {}, "batch, tokens and heads must agree"),
    "batch": (lambda q, k, v: (q.expand(2, -1, -1, -1), k, v), {}, "q has batch 2 and k 1"),
    "q k head dim": (lambda q, k, v: (q[..., :32], k, v), {}, "q has head_dim 32 and k 64"),
    "v head dim": (lambda q, k, v: (q, k, v[..., :32]), {}, "head_dim=64 for q and k but 32 for v"),
    "integers": (lambda q, k, v: (q.int(), k.int(), v.int()), {}, "dtype int32 is not supported by the reference"),
    "mode": (
        lambda q, k, v: (q, k, v),
        {"mode": "exact"},
        "mode='exact' is not a delta; use one of matched, consistent, stale",
    ),
    "impl": (
        lambda q, k, v: (q, k, v),
        {"impl": "triton"},
        "impl='triton' is not known; use one of auto, sm90, reference",
    ),
    "sm90 on cpu": (lambda q, k, v: (q, k, v), {"impl": "sm90"}, "q is on cpu and the sm90 kernel needs a CUDA tensor"),
    "format": (lambda q, k, v: (q, k, v), {"fmt": "fp4"}, "fmt='fp4' is not a known format"),
    "offset": (
        lambda q, k, v: (q, k, v),
        {"causal": False, "causal_offset": 3},
        "causal_offset=3 was given with causal=False",
    ),
    "scale": (lambda q, k, v: (q, k, v), {"softmax_scale": float("nan")}, "softmax_scale=nan is not finite"),
    "hopper paper": (
        lambda q, k, v: (q, k, v),
        {"fmt": "paper", "accumulate": "hopper"},
        "accumulate='hopper' models the sm90 kernel",
    ),
    "accumulate": (lambda q, k, v: (q, k, v), {"accumulate": "fp16"}, "accumulate='fp16' is not known"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused_in_one_sentence(name: str) -> None:
    change, options, text = BAD_CALLS[name]
    q, k, v, _ = gaussian(64, 4)
    with pytest.raises(ValueError, match=text) as caught:
        dm_attn_func(*change(q, k, v), **options)
    assert "\n" not in str(caught.value)


def cuda_call(**changes: object) -> AttnCall:
    base = {
        "device": "cuda",
        "dtype": "bfloat16",
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": True,
        "arch": (9, 0),
    }
    return AttnCall(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"arch": (8, 0)}, "the GPU is sm_80 and the kernel needs sm_90"),
        ({"arch": (10, 0)}, "the GPU is sm_100"),
        ({"dtype": "float16"}, "dtype float16 is not supported by the sm90 kernel"),
        ({"head_dim": 96, "head_dim_v": 96}, r"head_dim=96 is not supported by the sm90 kernel \(64, 128, 256\)"),
        ({"fmt": "paper"}, "fmt='paper' is a format of the reference"),
        ({"mode": "matched_plain"}, "is a research mode of the reference"),
        ({"extras": ("softcap",)}, "softcap is not supported by dm_plugin"),
        ({"accumulate": "hopper"}, "is a model for the reference"),
    ],
)
def test_the_kernel_names_what_it_cannot_run(changes: dict[str, object], text: str) -> None:
    import re

    assert re.search(text, why_not(cuda_call(**changes)) or "")


def test_auto_never_runs_the_reference_for_a_cuda_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dm_plugin.support._library_missing", lambda: "the kernel library is not built; run make kernels"
    )
    resolve_impl.cache_clear()
    with pytest.raises(RuntimeError, match="not built.*impl='reference'"):
        resolve_impl(cuda_call(), "auto")
    assert resolve_impl(cuda_call(), "reference") == ("reference", "asked for")
    resolve_impl.cache_clear()


def test_a_decision_is_logged_once_a_configuration_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    resolve_impl.cache_clear()
    q, k, v, _ = gaussian(16, 2)
    with caplog.at_level("INFO", logger="dm_plugin"):
        for _ in range(3):
            dm_attn_func(q, k, v)
        dm_attn_func(q, k, v, mode="stale")
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert lines[0] == "attention backend reference (tensors on cpu: CPU simulation), mode matched, format sm90"


def test_the_environment_sets_the_default_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DM_PLUGIN_MODE", "stale")
    seen = []
    for options in ({}, {"mode": "matched"}):
        q, k, v, do = gaussian(16, 1)
        dm_attn_func(q.requires_grad_(), k, v, tap=lambda s: seen.append(s.backend), **options).backward(do)
    assert seen == ["reference:sm90:stale", "reference:sm90:matched"]


def test_a_tap_changes_no_bit_of_the_result() -> None:
    results = []
    for tap in (None, lambda stats: None):
        q, k, v, do = gaussian(130, 2)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = dm_attn_func(*leaves, tap=tap)
        o.backward(do)
        results.append([o.detach(), *(x.grad for x in leaves)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_taps_once_and_gives_the_same_bits(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    taps = []
    results = []
    for recompute in (False, True):
        q, k, v, do = gaussian(130, 2)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        call = lambda *t: dm_attn_func(*t, tap=taps.append)  # noqa: E731
        o = checkpoint(call, *leaves, use_reentrant=reentrant) if recompute else call(*leaves)
        o.backward(do)
        results.append([o.detach(), *(x.grad for x in leaves)])
    assert len(taps) == 2
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_nothing_of_a_call_outlives_its_backward() -> None:
    q, k, v, do = gaussian(64, 1)
    o = dm_attn_func(q.requires_grad_(), k, v)
    ctx = weakref.ref(o.grad_fn)
    o.backward(do)
    del o
    gc.collect()
    assert ctx() is None


def test_a_second_derivative_is_refused_not_guessed() -> None:
    q, k, v, _ = gaussian(16, 1, dtype=torch.float32)
    o = dm_attn_func(q.requires_grad_(), k, v)
    (g,) = torch.autograd.grad((o * o).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        g.sum().backward()


def test_importing_the_package_imports_no_torch_and_starts_nothing() -> None:
    import subprocess
    import sys

    code = "import sys, dm_plugin; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules; print(dm_plugin.__version__, dir(dm_plugin))"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = __import__("dm_plugin").nonsense
    assert attention_module.log.name == "dm_plugin"
