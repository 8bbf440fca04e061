"""Real Transformer Engine on a machine without a GPU, in a process of its own: torch.cuda is made to look like one Hopper GPU.

python tests/te_jobs.py OUT NAME      run one job; OUT gets its result as JSON

te.DotProductAttention only asks whether there is a GPU and which; with our attention in it (the reference, asked for by name) no CUDA kernel
is reached. What is tested is the seam: selection, layouts, caches, logs, checkpoints. Needs transformer_engine and its torch extension.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
PLUGIN = "dm_plugin.integrations.transformer_engine"


def missing() -> str | None:
    """Why these jobs cannot run here, or None. Transformer Engine needs torch imported first: it brings the libraries."""
    probe = "import torch, transformer_engine.pytorch"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", probe], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"needs Transformer Engine: {done.stderr.strip().splitlines()[-1]}"


def run_job(out: Path, name: str, env: dict[str, str] | None = None, timeout: float = 200) -> dict[str, Any]:
    """Run a job of this file in a child process without a GPU; its result, with what it printed under "said"."""
    out.mkdir(parents=True, exist_ok=True)
    drop = (
        "NVTE_FLASH_ATTN",
        "NVTE_FUSED_ATTN",
        "NVTE_UNFUSED_ATTN",
        "NVTE_PLUGIN",
        "DM_PLUGIN_STRICT",
        "DM_PLUGIN_MODE",
    )
    clean = {k: v for k, v in os.environ.items() if k not in drop} | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(out), name],
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((out / f"{name}.json").read_text()) | {"said": done.stdout + done.stderr}


# ------------------------------------------------------------------------------------------- in the child
def looks_like_a_gpu(capability: tuple[int, int] = (9, 0)) -> None:
    import torch

    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="none", total_memory=1 << 37
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args, **kwargs: 0
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.set_num_threads(1)


def installed(**settings: Any) -> Any:
    """The plugin package, in place and set to the reference."""
    looks_like_a_gpu()
    import torch  # noqa: F401
    import transformer_engine.pytorch  # noqa: F401
    from dm_plugin.integrations import transformer_engine as plugin

    plugin.install(**{"impl": "reference", **settings})
    return plugin


def operands(
    layout: str = "sbhd", tokens: int = 64, batch: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 64
) -> Any:
    import torch

    gen = torch.Generator().manual_seed(3)
    size = lambda h: (tokens, batch, h, dim) if layout == "sbhd" else (batch, tokens, h, dim)  # noqa: E731
    q, k, v = (torch.randn(size(h), generator=gen).bfloat16().requires_grad_() for h in (heads, kv_heads, kv_heads))
    do = torch.randn((*size(heads)[:2], heads * dim), generator=gen).bfloat16()
    return q, k, v, do


def dpa(heads: int = 4, kv_heads: int = 2, dim: Any = 64, layout: str = "sbhd", **more: Any) -> Any:
    import transformer_engine.pytorch as te

    return te.DotProductAttention(heads, dim, num_gqa_groups=kv_heads, qkv_format=layout, **more)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("dm_plugin").addHandler(self)
        logging.getLogger("dm_plugin").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def job_context(out: Path) -> dict[str, Any]:
    """Context parallelism through te.DotProductAttention: two gloo ranks of this process's making, zigzag shards, against one device."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(out), "context_rank"], env=env))
    codes = [rank.wait(timeout=150) for rank in ranks]
    assert codes == [0, 0], codes
    return {f"rank {r}": json.loads((out / f"context_{r}.json").read_text()) for r in range(2)}


def job_context_rank(out: Path) -> dict[str, Any]:
    plugin = installed()
    import torch
    import torch.distributed as dist

    from dm_plugin import dm_attn_func

    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    chunks = torch.arange(512).chunk(4)  # 128 tokens: one scale block of queries
    keep = torch.cat([chunks[rank], chunks[3 - rank]])
    for layout in ("sbhd", "bshd"):
        for mask in ("causal", "no_mask"):
            full = operands(layout, tokens=512)
            axis = 0 if layout == "sbhd" else 1
            mine = [x.detach().index_select(axis, keep).requires_grad_() for x in full[:3]]
            module = dpa(layout=layout, return_max_logit=True)
            module.set_context_parallel_group(dist.group.WORLD, [0, 1], None)
            o, top = module(*mine, attn_mask_type=mask)
            grads = torch.autograd.grad(o, mine, full[3].index_select(axis, keep))
            swap = (lambda x: x.transpose(0, 1)) if layout == "sbhd" else (lambda x: x)
            whole, whole_top = dm_attn_func(
                *(swap(x) for x in full[:3]), causal=mask == "causal", impl="reference", return_max_logit=True
            )
            whole = swap(whole).flatten(2)
            expected = torch.autograd.grad(whole, full[:3], full[3])
            same = torch.equal(o, whole.index_select(axis, keep)) and torch.allclose(top, whole_top)
            errors = [
                float((a - b.index_select(axis, keep)).float().norm() / b.float().norm())
                for a, b in zip(grads, expected, strict=True)
            ]
            found[f"{layout} {mask}"] = {"same": same, "errors": errors}
    (out / f"context_{rank}.json").write_text(json.dumps({"found": found, "backend": plugin.backend_of()}))
    dist.barrier()
    dist.destroy_process_group()
    return {}


def job_layouts(_: Path) -> dict[str, Any]:
    """Every layout and mask against dm_attn_func, bit by bit."""
    plugin = installed()
    import torch

    from dm_plugin import dm_attn_func

    same = {}
    for layout in ("sbhd", "bshd"):
        for mask in ("causal", "no_mask", "causal_bottom_right"):
            q, k, v, do = operands(layout)
            o = dpa(layout=layout)(q, k, v, attn_mask_type=mask)
            grads = torch.autograd.grad(o, (q, k, v), do)
            swap = (lambda x: x.transpose(0, 1)) if layout == "sbhd" else (lambda x: x)
            direct = swap(
                dm_attn_func(*(swap(x) for x in (q, k, v)), causal=mask != "no_mask", impl="reference")
            ).flatten(2)
            expected = torch.autograd.grad(direct, (q, k, v), do)
            same[f"{layout} {mask}"] = torch.equal(o, direct) and all(map(torch.equal, grads, expected))
    packed = torch.randn(64, 2, 3, 4, 64).bfloat16()
    q, k, v = (packed[:, :, i] for i in range(3))
    o = dpa(4, 4)(q, k, v, attn_mask_type="causal")
    direct = dm_attn_func(*(x.transpose(0, 1) for x in (q, k, v)), impl="reference").transpose(0, 1).flatten(2)
    same["packed views"] = torch.equal(o, direct)
    q, k, v, _do = operands()
    o, top = dpa(return_max_logit=True)(q, k, v, attn_mask_type="causal")
    scores = torch.einsum("sbhd,tbhd->bhst", q.float(), k.float().repeat_interleave(2, 2)) / 8
    exact = scores.masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf).amax((0, 2, 3))
    return {"same": same, "max_logit_error": float((top - exact).abs().max()), "status": plugin.status()}


def job_triples(_: Path) -> dict[str, Any]:
    """Which backend each on/off triple of TE's switches selects, set after import."""
    plugin = installed()
    lines = Lines()
    out = {}
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    for number in range(8):
        os.environ.update(zip(names, f"{number:03b}", strict=True))
        plugin.refresh()
        q, k, v, _do = operands()
        problem = refusal(lambda q=q, k=k, v=v: dpa()(q, k, v, attn_mask_type="causal"))
        out[f"{number:03b}"] = {"backend": plugin.backend_of(), "problem": problem}
    return {"triples": out, "lines": lines.lines}


def job_refusals(_: Path) -> dict[str, Any]:
    """A03 with our backend asked for, one property at a time; then the same with it switched off, and with fall-backs allowed."""
    plugin = installed()
    import torch
    from dm_plugin.integrations.transformer_engine import selector

    q, k, v, _do = operands()
    thd = [x.detach()[:, 0] for x in (q, k, v)]
    cu = torch.tensor([0, 32, 64], dtype=torch.int32)
    cases = {
        "head_dim 192/128": lambda: dpa(4, 4, (192, 128))(
            *(torch.randn(64, 2, 4, d).bfloat16() for d in (192, 192, 128)), attn_mask_type="causal"
        ),
        "dropout": lambda: dpa(attention_dropout=0.1)(q, k, v, attn_mask_type="causal"),
        "arbitrary mask": lambda: dpa()(
            q, k, v, attn_mask_type="arbitrary", attention_mask=torch.zeros(2, 1, 64, 64, dtype=torch.bool)
        ),
        "padding mask": lambda: dpa()(q, k, v, attn_mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu),
        "alibi": lambda: dpa()(q, k, v, attn_mask_type="causal", core_attention_bias_type="alibi"),
        "sliding window": lambda: dpa()(q, k, v, attn_mask_type="causal", window_size=(16, 0)),
        "packed": lambda: dpa(layout="thd")(
            *thd, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cu, cu_seqlens_kv=cu
        ),
        "sinks": lambda: dpa_on_cpu(softmax_type="off-by-one")(q, k, v, attn_mask_type="causal"),
    }

    def dpa_on_cpu(**more: Any) -> Any:
        zeros = torch.zeros
        torch.zeros = lambda *a, **kw: zeros(
            *a, **{x: y for x, y in kw.items() if x != "device"}
        )  # device="cuda" of the sink
        try:
            return dpa(**more)
        finally:
            torch.zeros = zeros

    strict = {name: refusal(case) for name, case in cases.items()}
    reached: list[str] = []
    stock = selector.State.stock_selector
    selector.State.stock_selector = lambda params: (reached.append(params.attn_mask_type), stock(params))[1]
    off = {}
    os.environ["NVTE_FLASH_ATTN"] = "0"
    for name, case in cases.items():
        plugin.refresh()
        before = len(reached)
        problem = refusal(case)
        off[name] = {"stock": len(reached) > before, "ours": "dm_plugin" in problem}
    del os.environ["NVTE_FLASH_ATTN"]
    os.environ["DM_PLUGIN_STRICT"] = "0"
    lines = Lines()
    allowed = {}
    for name, case in cases.items():
        plugin.refresh()
        before = len(reached)
        problem = refusal(case)
        allowed[name] = {"stock": len(reached) > before, "ours": "dm_plugin" in problem}
    plugin.configure(impl="auto")
    params = types.SimpleNamespace(
        qkv_layout="sbhd_sbhd_sbhd", attn_mask_type="causal", max_seqlen_q=64, max_seqlen_kv=64, attention_dropout=0.0,
        is_training=True, qkv_type=torch.Tensor, qkv_dtype=torch.bfloat16, num_heads=4, num_gqa_groups=2, head_dim_qk=128,
        head_dim_v=128, window_size=(-1, 0),
    )  # fmt: skip
    kernel = {}
    for name, change in (
        ("head_dim 96", {"head_dim_qk": 96, "head_dim_v": 96}),
        ("float16", {"qkv_dtype": torch.float16}),
    ):
        kernel[name] = selector.decide(types.SimpleNamespace(**vars(params) | change)).reason
    looks_like_a_gpu((8, 0))
    kernel["sm80"] = selector.decide(params).reason
    os.environ["DM_PLUGIN_STRICT"] = "1"
    kernel["sm80 at build"] = refusal(dpa)
    return {"strict": strict, "off": off, "allowed": allowed, "kernel": kernel, "lines": lines.lines}


def job_selection_cache(_: Path) -> dict[str, Any]:
    """A23: alternating configurations, a cross-attention and a switched-off call between, each against a module used for nothing else."""
    plugin = installed()
    import torch

    lines = Lines()
    kinds = {"c1": {"tokens": 128, "dim": 64}, "c2": {"tokens": 128, "dim": 128}}
    fresh = {name: dpa(dim=kind["dim"])(*operands(**kind)[:3], attn_mask_type="causal") for name, kind in kinds.items()}
    plugin.refresh()
    modules = {name: dpa(dim=kind["dim"]) for name, kind in kinds.items()}
    order, same = ("c1", "c2", "c1", "cross", "c2", "off", "c1", "c2"), []
    for name in order:
        if name == "cross":
            q, _, _, _ = operands(tokens=64)
            k, v = operands(tokens=96)[1:3]
            modules["c1"](q, k, v, attn_mask_type="no_mask")
        elif name == "off":
            os.environ["NVTE_FLASH_ATTN"] = "0"
            plugin.refresh()
            refusal(lambda: modules["c1"](*operands(**kinds["c1"])[:3], attn_mask_type="causal"))
            del os.environ["NVTE_FLASH_ATTN"]
            plugin.refresh()
        else:
            o = modules[name](*operands(**kinds[name])[:3], attn_mask_type="causal")
            same.append(torch.equal(o, fresh[name]))
    return {"same": same, "lines": [x for x in lines.lines if x.startswith("attention backend dm_plugin")]}


def job_life(_: Path) -> dict[str, Any]:
    """install, adopt, uninstall; what is refused."""
    looks_like_a_gpu()
    import torch
    import transformer_engine.pytorch as te
    from dm_plugin.integrations import transformer_engine as plugin

    before_env = dict(os.environ)
    early = te.DotProductAttention(4, 64, num_gqa_groups=2)
    out: dict[str, Any] = {"inactive": refusal(plugin.assert_active), "before": plugin.status()["active"]}
    plugin.install(torch.nn.ModuleList([early]), impl="reference", mode="stale")
    q, k, v, _do = operands()
    early(q, k, v, attn_mask_type="causal")
    out["adopted"] = plugin.backend_of()
    out["again"] = plugin.install(mode="matched")["mode"]
    out["no attention"] = refusal(lambda: plugin.install(torch.nn.Linear(2, 2)))
    out["mode"] = refusal(lambda: plugin.configure(mode="fresh"))
    plugin.uninstall()
    out["after"] = plugin.status()
    out["class after"] = type(te.DotProductAttention(4, 64).flash_attention).__name__
    out["env changed"] = sorted(k for k in os.environ if os.environ[k] != before_env.get(k))
    return out


def job_nvte_plugin(_: Path) -> dict[str, Any]:
    """TE's own hook: NVTE_PLUGIN is in the environment before the first import."""
    looks_like_a_gpu()
    import transformer_engine.pytorch  # noqa: F401
    from dm_plugin.integrations import transformer_engine as plugin

    plugin.assert_active()
    plugin.configure(impl="reference")
    q, k, v, _do = operands()
    dpa()(q, k, v, attn_mask_type="causal")
    out = {"status": plugin.status(), "backend": plugin.backend_of()}
    plugin.uninstall()
    return out | {"after": plugin.status()["active"]}


def job_inspect(out: Path) -> dict[str, Any]:
    """One YAML for Transformer Engine's debug features and ours."""
    installed()
    import nvdlfw_inspect.api as debug_api
    import torch
    import transformer_engine
    from dm_plugin.integrations.transformer_engine import feature_dir

    yaml = out / "debug.yaml"
    yaml.write_text(
        "linears:\n  enabled: True\n  layers: {layer_types: [linear_fc1]}\n  transformer_engine:\n"
        "    LogTensorStats: {enabled: True, tensors: [weight], stats: [max], freq: 100}\n"
        "probes:\n  enabled: True\n  layers: {layer_name_regex_pattern: '.*core_attention'}\n  dm_plugin:\n"
        "    LogAttentionResiduals: {enabled: True, probes: [row_sum], freq: 1}\n"
        "    DumpAttentionProbes: {enabled: True, freq: 2}\n"
    )
    features = Path(transformer_engine.__file__).parent / "debug" / "features"
    debug_api.initialize(str(yaml), feature_dirs=[str(features), feature_dir()], log_dir=str(out))

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention = dpa()
            self.layer_number = 1

    class Writer:
        tags: dict[str, float] = {}  # noqa: RUF012

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.tags[f"{tag}@{step}"] = value

    model = torch.nn.ModuleDict({"self_attention": Attention()})
    writer = Writer()
    debug_api.dm_plugin.attach(model, out / "dumps", writer=writer, control=False)
    for _ in range(3):
        q, k, v, do = operands()
        model["self_attention"].core_attention(q, k, v, attn_mask_type="causal").backward(do)
        debug_api.step()
    debug_api.end_debug()
    return {"tags": sorted(writer.tags), "dumps": sorted(p.name for p in (out / "dumps").iterdir())}


# ------------------------------------------------------------------------------------------- Megatron on top
def te_gpt(**config: Any) -> Any:
    """The tests' small GPT with Megatron's TEDotProductAttention in it, everything else local, in BF16."""
    import megatron.core.models.common.embeddings.rotary_pos_embedding as rotary
    import torch
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron_cpu import gpt
    from megatron_jobs import TINY

    rotary.torch = types.SimpleNamespace(**vars(torch) | {"cuda": types.SimpleNamespace(current_device=lambda: "cpu")})

    def edit(spec: Any) -> Any:
        if config.pop("core", "te") == "te":
            spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
        else:
            from dm_plugin.integrations.megatron import with_dm_attention

            spec = with_dm_attention(spec, impl="reference")
        return TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=WrappedTorchNorm)

    return gpt(**TINY, edit_spec=edit, dtype=torch.bfloat16, **{k: x for k, x in config.items() if k != "core"})


def job_megatron(out: Path) -> dict[str, Any]:
    """A01: losses and gradients of one step under recompute; A05: state dicts; probes through the plugin."""
    plugin = installed()
    import torch
    from dm_plugin.integrations.megatron import attach_probes
    from megatron_cpu import megatron_on_cpu
    from megatron_jobs import batch

    from dm_plugin.config import ProbeConfig

    def step(model: Any) -> list[Any]:
        x, y = batch(0)
        loss = model(x, torch.arange(64).expand(4, -1), None, labels=y).float().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    with megatron_on_cpu():
        torch.cuda.current_device = lambda: 0
        runs, modes = {}, {}
        lines = Lines()
        for recompute in ("none", "core_attn", "full"):
            torch.manual_seed(1)
            plugin.refresh()
            runs[recompute] = step(te_gpt(recompute=recompute))
            modes[recompute] = plugin.backend_of()
        same = {name: all(map(torch.equal, run, runs["none"])) for name, run in runs.items()}
        torch.manual_seed(1)
        stock = te_gpt()
        plugin.uninstall()
        torch.manual_seed(2)
        unplugged = te_gpt()
        plugin.install(impl="reference")
        ours = te_gpt(core="dm")
        keys = {name: sorted(m.state_dict()) for name, m in (("plugged", stock), ("stock", unplugged), ("spec", ours))}
        loads = {
            "stock into plugged": refusal(lambda: stock.load_state_dict(unplugged.state_dict(), strict=True)),
            "plugged into stock": refusal(lambda: unplugged.load_state_dict(stock.state_dict(), strict=True)),
            "stock into spec": refusal(lambda: ours.load_state_dict(unplugged.state_dict(), strict=True)),
            "spec into stock": refusal(lambda: unplugged.load_state_dict(ours.state_dict(), strict=True)),
        }
        spec_loss, plugged_loss = (float(step(m)[0]) for m in (ours, stock))
        every = ProbeConfig.default(freq=1)
        torch.manual_seed(1)
        probed_model = te_gpt()
        with attach_probes(probed_model, every, out / "megatron_dumps", control=False) as session:
            session.begin(0)
            probed = step(probed_model)
            session.step(0)
        from dm_plugin.review.collect import collect
        from dm_plugin.review.measure import MEASURES
        from dm_plugin.review.runs import discover

        (arm,) = discover([out / "megatron_dumps"], [])
        data = collect(arm, [MEASURES["row_sum_pre.median"]])
    return {
        "same": same,
        "modes": modes,
        "keys": keys,
        "loads": loads,
        "losses": [spec_loss, plugged_loss],
        "probed same": all(map(torch.equal, probed, runs["none"])),
        "backend": data.backend,
        "sites": data.sites,
        "row_sum": float(data.values["row_sum_pre.median"].max()),
        "lines": lines.lines,
    }


if __name__ == "__main__":
    folder, job = Path(sys.argv[1]), sys.argv[2]
    result = globals()[f"job_{job}"](folder)
    (folder / f"{job}.json").write_text(json.dumps(result, default=str))
