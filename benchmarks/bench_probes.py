"""Cost of probes in a CPU training job: a small Megatron-Core GPT, steps probed and not probed in turn.

    python benchmarks/bench_probes.py --json benchmarks/results/probe_cost_cpu.json

off: a session is attached and the step is not probed (its whole cost is begin() and step(), timed alone too). on: every layer, all probes,
one dump a step. Times are medians of forward + backward + begin() + step(); the optimiser is left out. CPU simulation: the ratio is of the
simulated attention, not of the kernel.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from dm_plugin.integrations.megatron import attach_probes, with_dm_attention
from megatron_cpu import causal_mask, gpt, megatron_on_cpu
from megatron_tiny import with_bf16_operands

from dm_plugin.config import ProbeConfig

TOKENS, BATCH = 256, 2


def hooks(model: torch.nn.Module) -> int:
    """Hooks and taps that exist on the model now."""
    count = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
    return count + sum(getattr(m, "tap", None) is not None for m in model.modules())


def measure(name: str, rounds: int, out: str) -> dict[str, float]:
    edit = with_bf16_operands if name == "bf16" else lambda spec: with_dm_attention(spec, mode=name)
    model = gpt(tokens=TOKENS, edit_spec=edit)
    mask = causal_mask(TOKENS) if name == "bf16" else None
    tokens = torch.randint(0, 256, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    times: dict[str, list[float]] = {"off": [], "on": []}
    idle: list[float] = []
    with attach_probes(model, ProbeConfig.default(freq=2), Path(out) / name) as session:
        for step in range(2 * rounds + 2):
            began = time.perf_counter()
            probed = session.begin(step)
            begun = time.perf_counter()
            model.zero_grad(set_to_none=True)
            model(tokens, positions, mask, labels=tokens).float().mean().backward()
            ended = time.perf_counter()
            session.step(step)
            done = time.perf_counter()
            if hooks(model):
                raise SystemExit("hooks exist after the step")
            if step >= 2:
                times["on" if probed else "off"].append(done - began)
                if not probed:
                    idle.append(begun - began + done - ended)
    off, on = (statistics.median(times[k]) for k in ("off", "on"))
    return {"off_s": off, "on_s": on, "on_over_off": on / off, "idle_us": statistics.median(idle) * 1e6}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--json", default=None, metavar="PATH")
    args = p.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out, megatron_on_cpu():
        body = {name: measure(name, args.rounds, out) for name in ("bf16", "stale", "matched")}
    for name, r in body.items():
        print(
            f"{name}: off {r['off_s']:.3f} s, on {r['on_s']:.3f} s, ratio {r['on_over_off']:.3f}; an idle step costs {r['idle_us']:.0f} us"
        )
    if args.json:
        record = {
            "what": "cost of probes in a CPU training job",
            "command": " ".join(["python", *sys.argv]),
            "shape": {
                "layers": 4,
                "tokens": TOKENS,
                "batch": BATCH,
                "heads": 4,
                "kv_heads": 2,
                "head_dim": 64,
                "dtype": "float32",
            },
            "device": f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "results": body,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
