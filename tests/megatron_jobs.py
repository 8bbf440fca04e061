"""Small Megatron-Core jobs on the CPU for the tests: single process inside pytest, two gloo ranks as processes of this file.

python tests/megatron_jobs.py OUT      one rank (RANK, WORLD_SIZE, MASTER_* set); writes OUT/rank_{r}.json
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from megatron_cpu import causal_mask, free_port, gpt, megatron_on_cpu, parallel  # noqa: E402

__all__ = ["causal_mask", "gpt", "megatron_on_cpu"]  # for the tests

TINY = {"vocab": 64, "tokens": 64, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128}
STEPS = 4


def core_attention(mode: str = "matched", **changes: Any) -> Any:
    """DMDotProductAttention alone, without process groups. changes: config fields, or constructor keywords of the attention."""
    from dm_plugin.integrations.megatron import configured
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = (
        "layer_number",
        "attn_mask_type",
        "attention_type",
        "attention_dropout",
        "k_channels",
        "v_channels",
        "pg_collection",
    )
    ctor = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    ctor |= {n: changes.pop(n) for n in names if n in changes}
    config = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16}
    config |= {"use_cpu_initialization": True, "attention_dropout": 0.0} | changes
    return configured(mode)(config=TransformerConfig(**config), **ctor)


def batch(step: int, tokens: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """[4, tokens] inputs and labels with something to learn: one random text, read from random places."""
    gen = torch.Generator().manual_seed(99)
    text = torch.randint(0, 64, (97,), generator=gen).repeat(4)
    starts = torch.randint(0, 97, (4,), generator=gen.manual_seed(step)).tolist()
    rows = torch.stack([text[s : s + tokens + 1] for s in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def dm(mode: str = "matched", layers: str | None = None) -> Callable[[Any], Any]:
    """A spec edit: our attention."""
    from dm_plugin.integrations.megatron import with_dm_attention

    return lambda spec: with_dm_attention(spec, layers, mode)


def train(
    model: Any, steps: int = STEPS, session: Any = None, mask: torch.Tensor | None = None, first: int = 0
) -> list[float]:
    """Losses of plain AdamW steps in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(first, first + steps):
        if session is not None:
            session.begin(step)
        x, y = batch(step)
        optimizer.zero_grad()
        loss = model(x, torch.arange(64).expand(4, -1), mask, labels=y).float().mean()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.step(step)
        losses.append(float(loss.detach()))
    return losses


# ------------------------------------------------------------------------------------------- two ranks
def run_ranks(out: Path, ranks: int = 2, timeout: float = 150) -> None:
    """Start this file once a rank; results go to `out`. Raises AssertionError with the output of a rank that failed."""
    out.mkdir(parents=True, exist_ok=True)
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(out)],
            env=os.environ | common | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]
    try:
        said = [job.communicate(timeout=timeout)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, text in zip(jobs, said, strict=True):
        assert job.returncode == 0, text[-3000:]


def found(out: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank found."""
    return [json.loads((out / f"rank_{r}.json").read_text()) for r in range(ranks)]


def rank_main(out: Path) -> None:
    torch.set_num_threads(1)
    with megatron_on_cpu(tp=2):
        results: dict[str, Any] = {"tp": parallel_training(out / "tp", tp=2)}
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()
        with parallel(cp=2):
            results["cp"] = parallel_training(out / "cp", cp=2)
            results["cp_attention"] = cp_attention(out)
        with parallel(pp=2):
            results["pp"] = site_names(pp=2)
        with parallel(pp=2, virtual_pp=2):
            results["vpp"] = site_names(pp=2, vpp=2)
        with parallel(tp=2):
            results["dist_checkpoint"] = dist_checkpoint(out / "checkpoint")
    rank = int(os.environ["RANK"])
    (out / f"rank_{rank}.json").write_text(json.dumps(results))


def parallel_training(dumps: Path, tp: int = 1, cp: int = 1) -> dict[str, Any]:
    """STEPS steps under Megatron's DDP with probes on the second, and the norm of the first qkv gradients."""
    from dm_plugin.integrations.megatron import attach_probes
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from dm_plugin import config

    model = gpt(**TINY, tp=tp, cp=cp, edit_spec=dm())
    setup = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    ddp = DistributedDataParallel(model.config, setup, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    every_step = config.ProbeConfig.default(freq=1)
    losses, norms = [], []
    with attach_probes(ddp, every_step, dumps) as session:
        for step in range(STEPS):
            if step == 1:
                session.begin(step)
            x, y = batch(step)
            positions = torch.arange(64).expand(4, -1)
            if cp > 1:
                chunks, rank = torch.arange(64).chunk(2 * cp), mpu.get_context_parallel_rank()
                keep = torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])
                x, y, positions = x[:, keep], y[:, keep], positions[:, keep]
            ddp.zero_grad_buffer()
            loss = ddp(x, positions, None, labels=y).float().mean()
            loss.backward()
            finalize_model_grads([ddp], None)
            for p in model.parameters():
                p.grad = p.main_grad.to(p.dtype)
            norms.append([float(p.grad.norm()) for n, p in model.named_parameters() if "linear_qkv.weight" in n])
            optimizer.step()
            for p in model.parameters():
                p.grad = None  # it aliases main_grad otherwise
            session.step(step)
            shown = loss.detach().clone()
            if cp > 1:
                dist.all_reduce(shown, group=mpu.get_context_parallel_group())
                shown /= cp
            losses.append(float(shown))
    return {"losses": losses, "qkv_norms": norms}


def cp_attention(out: Path) -> dict[str, Any]:
    """One attention of 512 tokens on zigzag shards, saved for comparison with the whole."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    core = core_attention(pg_collection=groups, context_parallel_size=2)
    records: list[Any] = []
    core.tap = records.append
    q, k, v, do = cp_operands()
    chunks, rank = torch.arange(512).chunk(4), groups.cp.rank()
    keep = torch.cat([chunks[rank], chunks[3 - rank]])
    leaves = [x[keep].requires_grad_() for x in (q, k, v)]
    o = core(*leaves, None)
    o.backward(do[keep])
    (stats,) = records
    sums = {
        n: getattr(stats, n) for n in ("row_sum", "row_abs_sum", "entropy", "max_logit", "key_col_sum", "key_abs_sum")
    }
    counts = {n: int(c.count) for n, c in stats.codes.items()}
    torch.save(
        {"keep": keep, "o": o.detach(), "grads": [x.grad for x in leaves], "stats": sums, "counts": counts},
        out / f"cp_{rank}.pt",
    )
    return {"records": len(records)}


def cp_operands() -> tuple[torch.Tensor, ...]:
    """q [512, 2, 4, 16], k and v [512, 2, 2, 16], dO [512, 2, 64], BF16."""
    gen = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(512, 2, *shape, generator=gen).bfloat16()  # noqa: E731
    return draw(4, 16), draw(2, 16), draw(2, 16), draw(64)


def site_names(pp: int, vpp: int | None = None) -> list[str]:
    """Names of this rank's attention sites in a pipeline of 4 layers."""
    from dm_plugin.integrations.megatron import attach_probes
    from megatron.core import parallel_state as mpu

    rank, chunks = mpu.get_pipeline_model_parallel_rank(), []
    for stage in range(vpp or 1):
        first, last = rank == 0 and stage == 0, rank == pp - 1 and stage == (vpp or 1) - 1
        more = {"vp_stage": stage} if vpp else {}
        sizes = {"pipeline_model_parallel_size": pp} | ({"virtual_pipeline_model_parallel_size": vpp} if vpp else {})
        model = {"pre_process": first, "post_process": last, **more}
        chunks.append(gpt(**TINY | {"layers": 4}, edit_spec=dm(layers="0,2"), model=model, **sizes))
    sites = attach_probes(chunks, None, None, control=False).sites
    return [f"{s.name} {'ours' if s.ours else 'stock'}" for s in sites]


def dist_checkpoint(folder: Path) -> dict[str, Any]:
    """Save with the stock attention, load into ours, through Megatron's distributed checkpoints."""
    from megatron.core import dist_checkpointing

    stock, ours = gpt(**TINY, tp=2), gpt(**TINY, tp=2, edit_spec=dm())
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(stock.sharded_state_dict(), str(folder))
    ours.load_state_dict(dist_checkpointing.load(ours.sharded_state_dict(), str(folder)))
    keys = sorted(ours.sharded_state_dict()), sorted(stock.sharded_state_dict())
    equal = all(torch.equal(a, b) for a, b in zip(stock.parameters(), ours.parameters(), strict=True))
    return {"equal": equal, "same_keys": keys[0] == keys[1], "core": [k for k in keys[0] if "core_attention" in k]}


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
