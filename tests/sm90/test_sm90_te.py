"""Our kernel as the backend of the real te.DotProductAttention on a Hopper GPU."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import attention, rel
from torch import Tensor

from dm_plugin import dm_attn_func

te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
pytestmark = pytest.mark.te
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    from dm_plugin.integrations import transformer_engine as package

    package.install()
    yield package
    package.uninstall()


@pytest.fixture(autouse=True)
def _switches(plugin: Any) -> Iterator[None]:
    yield
    for name in (*SWITCHES, "DM_PLUGIN_STRICT"):
        os.environ.pop(name, None)
    plugin.configure(mode="matched")


def operands(
    tokens: int = 512,
    batch: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 128,
    seed: int = 0,
    layout: str = "sbhd",
) -> list[Tensor]:
    gen = torch.Generator("cuda").manual_seed(seed)
    size = lambda h: (tokens, batch, h, dim) if layout == "sbhd" else (batch, tokens, h, dim)  # noqa: E731
    draw = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16, generator=gen)  # noqa: E731
    qkv = [draw(*size(h)).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    return [*qkv, draw(*size(heads)[:2], heads * dim)]


def module(heads: int = 8, kv_heads: int = 2, dim: int = 128, layout: str = "sbhd", **more: Any) -> Any:
    return te.DotProductAttention(heads, dim, num_gqa_groups=kv_heads, qkv_format=layout, **more)


def through(m: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: str = "causal") -> list[Tensor]:
    o = m(q, k, v, attn_mask_type=mask)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


def direct(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool = True, mode: str = "matched") -> list[Tensor]:
    o = dm_attn_func(*(x.transpose(0, 1) for x in (q, k, v)), causal, mode).transpose(0, 1).flatten(2)
    return [o, *torch.autograd.grad(o, (q, k, v), do)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_it_is_dm_attn_func_bit_by_bit(plugin: Any, dim: int, mask: str) -> None:
    x = operands(dim=dim)
    assert same(through(module(dim=dim), *x, mask=mask), direct(*x, causal=mask == "causal"))
    assert plugin.backend_of() == "te:dm_plugin:matched"


@pytest.mark.parametrize("mode", ["stale", "consistent", "matched"])
def test_the_mode_is_ours_whatever_autocast_says(plugin: Any, mode: str) -> None:
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    plugin.configure(mode=mode)
    x, m = operands(), module()
    plain = through(m, *x)
    assert same(plain, direct(*x, mode=mode))
    for recipe in (DelayedScaling(), DelayedScaling(fp8_dpa=True), Float8CurrentScaling()):
        with te.autocast(enabled=True, recipe=recipe):
            assert same(through(m, *x), plain)


def test_every_triple_of_switches_runs_what_it_says(plugin: Any) -> None:
    x, found = operands(), {}
    for number in range(8):
        os.environ.update(zip(SWITCHES, f"{number:03b}", strict=True))
        plugin.refresh()
        try:
            through(module(), *x)
            found[f"{number:03b}"] = plugin.backend_of().partition(" ")[0]
        except ValueError as error:
            found[f"{number:03b}"] = str(error)[:41]
    ours, fused = "te:dm_plugin:matched", "te:FusedAttention:F16"
    assert found == {
        "000": "No dot product attention backend is avail",
        "001": "te:UnfusedDotProductAttention",
        "010": fused,
        "011": fused,
        **dict.fromkeys(("100", "101", "110", "111"), ours),
    }


def test_torch_compile_fullgraph_gives_the_same_bits(plugin: Any) -> None:
    torch._dynamo.reset()
    x, m = operands(), module()
    graph = torch.compile(lambda q, k, v: m(q, k, v, attn_mask_type="causal"), fullgraph=True)
    o = graph(*x[:3])
    assert same([o, *torch.autograd.grad(o, x[:3], x[3])], through(m, *x))


def test_a19_a_probed_call_leaves_the_graph_and_comes_back(plugin: Any, tmp_path: Any) -> None:
    from dm_plugin import ProbeConfig, ProbeSession

    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention, self.layer_number = module(), 1

        def forward(self, *qkv: Tensor) -> Tensor:
            return self.core_attention(*qkv, attn_mask_type="causal")

    layer, x = Layer(), operands()
    compiled = torch.compile(layer)
    expected = through(layer.core_attention, *x)
    with ProbeSession(ProbeConfig.default(freq=2), tmp_path, control=False).attach(layer) as session:
        for step in range(4):
            session.begin(step)
            o = compiled(*x[:3])
            assert same([o, *torch.autograd.grad(o, x[:3], x[3])], expected)
            recorded = any("row_sum_pre" in key for key in session._recorder._sums)
            assert recorded == (step % 2 == 0)
            session.step(step)


def test_cuda_graphs_replay_on_new_inputs(plugin: Any) -> None:
    x, m = operands(), module()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        through(m, *x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = through(m, *x)
    for seed in (1, 2):
        with torch.no_grad():
            for mine, new in zip(x, operands(seed=seed), strict=True):
                mine.copy_(new)
        graph.replay()
        assert same(out, through(m, *x))


def test_make_graphed_callables(plugin: Any) -> None:
    expected = through(module(), *operands())
    x = operands()  # leaves that no other stream has differentiated
    graphed = te.make_graphed_callables(module().cuda(), tuple(x[:3]))
    o = graphed(*x[:3])
    assert same([o, *torch.autograd.grad(o, x[:3], x[3])], expected)


def test_cpu_offload_brings_back_the_same_bits(plugin: Any) -> None:
    gen = torch.Generator("cuda").manual_seed(4)
    x = torch.randn(1024, 2, 1024, device="cuda", dtype=torch.bfloat16, generator=gen).requires_grad_()
    linears, m = (
        [te.Linear(1024, 1024, params_dtype=torch.bfloat16, device="cuda") for _ in range(3)],
        module(kv_heads=8),
    )

    def run(offload: bool) -> list[Tensor]:
        if offload:
            context, sync = te.get_cpu_offload_context(
                enabled=True, num_layers=2, model_layers=3, offload_activations=True, offload_weights=False
            )
        h: Tensor = x
        for _ in range(3):
            if offload:
                with context:
                    h = m(*(linear(h).view(1024, 2, 8, 128) for linear in linears), attn_mask_type="causal")
                h = sync(h)
            else:
                h = m(*(linear(h).view(1024, 2, 8, 128) for linear in linears), attn_mask_type="causal")
        return [h, *torch.autograd.grad(h, [x, *(linear.weight for linear in linears)], torch.ones_like(h))]

    assert same(run(True), run(False))


def test_max_logit_is_that_of_the_scores(plugin: Any) -> None:
    q, k, v, _ = operands()
    _, top = module(return_max_logit=True)(q, k, v, attn_mask_type="causal")
    scores = torch.einsum("sbhd,tbhd->bhst", q.double(), k.double().repeat_interleave(4, 2)) * 128**-0.5
    hidden = torch.ones(512, 512, dtype=torch.bool, device="cuda").triu(1)
    exact = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    assert top.shape == (8,)
    assert float((top.double() - exact).abs().max()) < 0.25  # logits of 4 to 5 from E4M3 operands


# batch, tokens, heads, key heads, mask: Transformer Engine's own FP8 attention configurations with head_dim 128
CONFIGS = {
    "fp8_7": (1, 2048, 1, 1, "causal"),
    "fp8_8": (2, 2048, 24, 24, "causal"),
    "fp8_7 full": (1, 2048, 1, 1, "no_mask"),
    "fp8_12": (1, 8192, 32, 4, "causal"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_TEs_own_fp8_configurations_at_its_tolerance_and_at_ours(plugin: Any, name: str) -> None:
    batch, tokens, heads, kv_heads, mask = CONFIGS[name]
    x = operands(tokens, batch, heads, kv_heads)
    m = module(heads, kv_heads)
    ours = through(m, *x, mask=mask)
    assert plugin.backend_of() == "te:dm_plugin:matched"
    os.environ["NVTE_FLASH_ATTN"] = "0"
    plugin.refresh()
    bf16 = through(m, *x, mask=mask)
    limits = (0.06, 0.075, 0.075, 0.06)
    for mine, theirs, limit in zip(ours, bf16, limits, strict=True):
        a, b = mine.float(), theirs.float()
        spread = max(a.max(), b.max()) - min(a.min(), b.min())
        assert float((a - b).square().mean().sqrt()) < 0.11 * float(spread)  # TE's rule
        assert rel(a, b) < limit  # ours: what E4M3 operands cost
    dk = ours[2].float()
    assert float(dk.sum(0).abs().sum() / dk.abs().sum()) < 1.5e-3  # keys shifted by a constant change nothing


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_TEs_padded_configurations_are_refused_in_one_sentence(plugin: Any, mask: str) -> None:
    q, k, v, _ = operands()
    cu = torch.tensor([0, 300, 700], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=f"attn_mask_type={mask}"):
        module()(q, k, v, attn_mask_type=mask, cu_seqlens_q=cu, cu_seqlens_kv=cu)


def test_against_fp64(plugin: Any) -> None:
    q, k, v, do = operands(tokens=1024, batch=1)
    o, dq, dk, dv = through(module(), q, k, v, do)
    swap = lambda x: x.transpose(0, 1)  # noqa: E731
    truth = attention(*(swap(x.detach()) for x in (q, k, v)), swap(do.view(1024, 1, 8, 128)), 0)
    for mine, name, limit in ((o.view_as(q), "o", 0.055), (dq, "dq", 0.072), (dk, "dk", 0.072), (dv, "dv", 0.055)):
        assert rel(swap(mine), getattr(truth, name)) < limit


def test_stock_fp8_is_seen_by_a_probe_through_its_key_gradient(plugin: Any, tmp_path: Any) -> None:
    from transformer_engine.common.recipe import DelayedScaling, Format

    from dm_plugin import ProbeConfig, ProbeSession
    from dm_plugin.review.collect import collect
    from dm_plugin.review.measure import MEASURES
    from dm_plugin.review.runs import discover

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention, self.layer_number = module(), 1

    layer, x = Layer(), operands(tokens=2048)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", fp8_dpa=True)
    ratios = {}
    for name in ("stock", "ours"):
        os.environ["NVTE_FLASH_ATTN"] = "0" if name == "stock" else "1"
        plugin.refresh()
        with ProbeSession(ProbeConfig.default(freq=1), tmp_path / name, control=False).attach(layer) as session:
            for step in range(3):
                session.begin(step)
                with te.autocast(enabled=name == "stock", recipe=recipe):
                    o = layer.core_attention(*x[:3], attn_mask_type="causal")
                o.backward(x[3])
                session.step(step)
        (arm,) = discover([tmp_path / name], [])
        data = collect(arm, [MEASURES["key_col_sum.ratio"]])
        ratios[name] = float(data.values["key_col_sum.ratio"][-1].max())
        assert data.backend.startswith("te:FusedAttention:FP8" if name == "stock" else "sm90:matched")
    assert ratios["stock"] > 2e-3
    assert ratios["ours"] < ratios["stock"] / 3
