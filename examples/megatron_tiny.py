"""Train a small Megatron-Core GPT on text, byte by byte, on the CPU, with one kind of attention and probes that can be switched on live.

    python examples/megatron_tiny.py --attention matched --out runs/x/matched --steps 120

--attention bf16      Megatron's own DotProductAttention on operands and output rounded to BF16, FP32 arithmetic
            stock     Transformer Engine's FP8 attention (DelayedScaling), emulated; its delta is the saved-output shortcut
            stale | consistent | matched      the sm90 kernel's casts, simulated, with that delta
The rest of the model is FP32, which a CPU runs fastest.

Writes <out>/train.jsonl (one line a step), <out>/dumps/ (probes), <out>/checkpoint.pt (every --save-every steps and at the end). The job
watches <out>/probe_request.json: `dm-plugin probe start <out> --steps 20` switches probes on. Ctrl-C leaves all three whole; --resume
goes on, with the same losses as an uninterrupted run.
"""

import argparse
import fcntl
import hashlib
import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from megatron_cpu import causal_mask, gpt, megatron_on_cpu

ATTENTION = ("bf16", "stock", "stale", "consistent", "matched")
SAME = (
    "attention",
    "seed",
    "tokens",
    "batch",
    "layers",
    "lr",
    "warmup",
    "threads",
)  # what a resumed run may not change
MEGABYTE = 1 << 20


def corpus(path: str | None, limit: int = 8 * MEGABYTE) -> Tensor:
    """Bytes to train on: a file, or the Python standard library's own sources in name order."""
    if path:
        data = Path(path).read_bytes()
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            p for p in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")) if "test" not in str(p.relative_to(root))
        ]
        data = b"".join(p.read_bytes() for p in files if "site-packages" not in p.parts)
    if len(data) < 4096:
        raise SystemExit(f"the text has {len(data)} bytes; give at least 4096 to train on")
    return torch.frombuffer(bytearray(data[:limit]), dtype=torch.uint8).long()


def batch(data: Tensor, step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Tokens and labels [batch, tokens] of a step; depends on the seed and the step alone, so every arm and a resumed run agree."""
    gen = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(0, len(data) - args.tokens - 1, (args.batch,), generator=gen)
    rows = torch.stack([data[s : s + args.tokens + 1] for s in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def build(args: argparse.Namespace) -> Any:
    """The model with the attention that was asked for."""
    from dm_plugin.integrations.megatron import with_dm_attention

    if args.attention == "bf16":
        return gpt(tokens=args.tokens, layers=args.layers, recompute=args.recompute, edit_spec=with_bf16_operands)
    fmt, mode = ("stock", "stale") if args.attention == "stock" else ("sm90", args.attention)
    edit = lambda spec: with_dm_attention(spec, mode=mode, fmt=fmt)  # noqa: E731
    return gpt(tokens=args.tokens, layers=args.layers, recompute=args.recompute, edit_spec=edit)


def with_bf16_operands(spec: Any) -> Any:
    """Megatron's own attention, its inputs and output rounded to BF16."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class BF16DotProductAttention(DotProductAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            q, k, v = (x.bfloat16().float() for x in (query, key, value))
            return super().forward(q, k, v, *args, **kwargs).bfloat16().float()

    spec.submodules.self_attention.submodules.core_attention = BF16DotProductAttention
    return spec


def learning_rate(step: int, args: argparse.Namespace) -> float:
    return args.lr * min(1.0, (step + 1) / args.warmup)


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if not args.resume and (out / "train.jsonl").exists():
        raise SystemExit(f"{out} already holds a run; pass --resume to go on with it or choose another --out")
    stop: list[int] = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: stop.append(number))  # finish the step, save, leave
    with alone(out), megatron_on_cpu(seed=args.seed):
        return train(args, out, stop)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Two jobs in one folder would mix their records: the second one stops here."""
    with open(out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another process is training in {out}; wait for it or choose another --out") from None
        yield


def train(args: argparse.Namespace, out: Path, stop: list[int]) -> int:
    from dm_plugin.integrations.megatron import attach_probes

    data = corpus(args.text)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    setup = {name: getattr(args, name) for name in SAME} | {"text": hashlib.sha256(data.numpy().tobytes()).hexdigest()}
    start = load(out / "checkpoint.pt", model, optimizer, setup) if args.resume else 0
    trim(out / "train.jsonl", start)
    stock = args.attention == "bf16"
    session = attach_probes(
        model, args.probes, out / "dumps", control=out, backend="megatron:DotProductAttention:bf16" if stock else ""
    )
    mask = causal_mask(args.tokens) if stock else None
    positions = torch.arange(args.tokens).expand(args.batch, -1)
    with session, open(out / "train.jsonl", "a") as log:
        for step in range(start, args.steps):
            began = time.perf_counter()
            probed = session.begin(step)
            tokens, labels = batch(data, step, args)
            model.zero_grad(set_to_none=True)
            loss = model(tokens, positions, mask, labels=labels).float().mean()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            optimizer.step()
            session.step(step)
            line = {
                "step": step,
                "loss": float(loss),
                "grad_norm": norm,
                "time": time.perf_counter() - began,
                "probed": probed,
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            done = step + 1
            if stop or done == args.steps or done % args.save_every == 0:
                save(out / "checkpoint.pt", done, model, optimizer, setup)
            if done == args.steps:
                reads = f"`dm-plugin show {out}` and `dm-plugin report {out} -o page.html` read its dumps"
                asks = f"no step was probed: `dm-plugin probe start {out}` asks a job while it runs, --probes FILE from the start"
                print(f"trained {done} steps into {out}; {reads if (out / 'dumps').exists() else asks}")
            if stop:
                print(f"interrupted after step {step}; --resume goes on from step {done}", file=sys.stderr)
                return 130
    return 0


def save(path: Path, step: int, model: Any, optimizer: torch.optim.Optimizer, setup: dict[str, Any]) -> None:
    """Atomic: a killed save leaves the previous checkpoint."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "setup": setup,
    }
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save(state, part)
    os.replace(part, path)


def load(path: Path, model: Any, optimizer: torch.optim.Optimizer, setup: dict[str, Any]) -> int:
    """Restore everything; the step to go on with (0 when there is no checkpoint yet). Exits in one sentence for a run of another kind."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=False)
    changed = [name for name, value in setup.items() if state["setup"][name] != value]
    if changed:
        was, now = state["setup"][changed[0]], setup[changed[0]]
        raise SystemExit(
            f"{path} was made with {changed[0]} {was}, not {now}; resume it with the same or choose another --out"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def trim(path: Path, start: int) -> None:
    """Drop lines of steps that will run again."""
    if path.exists():
        kept = [
            line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] < start
        ]
        part = path.with_name(f".{path.name}.tmp")
        part.write_text("".join(line + "\n" for line in kept))
        os.replace(part, path)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--attention", choices=ATTENTION, required=True)
    p.add_argument("--out", required=True, help="folder of this run")
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--text", default=None, help="file to train on; default: the standard library's sources")
    p.add_argument("--probes", default=None, help="probe YAML; default: probe on request only")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--warmup", type=int, default=20)
    p.add_argument("--recompute", choices=("none", "core_attn", "full"), default="none")
    p.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


if __name__ == "__main__":
    sys.exit(main())
