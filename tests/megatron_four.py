"""A four-rank Megatron job on the CPU (tensor 2 x pipeline 2, real pipeline schedule), probed by file while it runs.

python tests/megatron_four.py OUT NAME      one rank (RANK, WORLD_SIZE, MASTER_* set); NAME: plain, asked, hurt
Writes OUT/NAME/rank_{r}.json with the losses of the last stage. In `asked` and `hurt` rank 0 writes the requests as an operator would;
in `hurt` the dump folder is made unwritable, and the request file is broken, in the middle.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
from megatron_cpu import gpt, megatron_on_cpu  # noqa: E402
from megatron_jobs import TINY, batch, dm  # noqa: E402

STEPS, START, COUNT = 9, 2, 3


def operator(step: int, run: Path, name: str) -> None:
    """What somebody at a shell does between two steps."""
    from dm_plugin import control

    if step == 1:
        control.send(run, "start", start_step=START, steps=COUNT, layers="1-2")
    if step == 6 and name == "asked":
        control.send(run, "start", start_step=7)
    if step == 7 and name == "asked":
        control.send(run, "stop")
    if step == 3 and name == "hurt":  # a vanished folder, and nothing can be made in its place
        run.rename(run.with_name("gone"))
        run.write_text("not a folder")
    if step == 6 and name == "hurt":
        run.unlink()
        run.mkdir()
        (run / control.REQUEST).write_text('{"schema": 1, "action": "sta')


def main(out: Path, name: str) -> None:
    from dm_plugin.integrations.megatron import attach_probes
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.set_num_threads(1)
    with megatron_on_cpu(tp=2, pp=2):
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        model = gpt(
            **TINY | {"layers": 4},
            tp=2,
            edit_spec=dm(),
            model={"pre_process": first, "post_process": last},
            pipeline_model_parallel_size=2,
        )
        setup = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
        ddp = DistributedDataParallel(model.config, setup, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run = out / name / "dumps"
        run.mkdir(parents=True, exist_ok=True)
        session = attach_probes(ddp, None, run) if name != "plain" else None
        schedule, losses = get_forward_backward_func(), []

        def forward(data: Any, chunk: Any) -> Any:
            x, y = next(data)
            o = chunk(x, torch.arange(64).expand(len(x), -1), None, labels=y)
            return o, lambda each: (each.float().mean(), {"loss": each.detach().float().mean()})

        for step in range(STEPS):
            dist.barrier()
            if dist.get_rank() == 0 and name != "plain":
                operator(step, run, name)
            dist.barrier()
            if session is not None:
                session.begin(step)
            ddp.zero_grad_buffer()
            x, y = batch(step)
            micro = iter(zip(x.split(1), y.split(1), strict=True))
            done = schedule(
                forward_step_func=forward,
                data_iterator=micro,
                model=[ddp],
                num_microbatches=4,
                seq_length=64,
                micro_batch_size=1,
                forward_only=False,
            )
            finalize_model_grads([ddp], None)
            for p in model.parameters():
                p.grad = p.main_grad.to(p.dtype)
            optimizer.step()
            for p in model.parameters():
                p.grad = None
            if session is not None:
                session.step(step)
            losses.append([float(d["loss"]) for d in done] if last else [])
        lost = session.dumps.lost_total if session is not None and session.dumps is not None else 0
        if session is not None:
            session.close()
    (out / name / f"rank_{os.environ['RANK']}.json").write_text(json.dumps({"losses": losses, "lost": lost}))


if __name__ == "__main__":
    partial(main, Path(sys.argv[1]), sys.argv[2])()
