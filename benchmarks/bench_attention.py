"""Times the sm90 kernel against torch's cuDNN BF16 attention in the same run, interleaved, on random data.

    python3 benchmarks/bench_attention.py [--suite headline] [--shape B,H,G,D,T[,full]]... [--reps 20] [--peers fa3,fa4,te_fp8] [--json FILE]

Every number is the median over `reps` rounds of one CUDA-event time; a round runs every arm once, in order, so that throttling hits all
alike. Pre-passes are inside fwd and bwd, and also listed alone. fwd keeps what backward needs; `fwd_only` does not. TFLOP/s counts
4 B H T^2 D for forward (half of it when causal) and 2.5 times that for backward, for every arm. Before any timing the kernel is compared
with FP64 and with reference.py; the benchmark refuses to time a kernel that is wrong (exit code 2). `--suite headline` ends with the speed
goals and where the run stands against them; a peer that did not run is named there and under `absent`.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from _suites import SUITES, standing  # noqa: E402
from oracle import attention, rel  # noqa: E402

from dm_plugin import ops, reference  # noqa: E402
from dm_plugin.delta import MODES  # noqa: E402
from dm_plugin.formats import SM90  # noqa: E402

BOUNDS = {"o": 0.055, "dq": 0.072, "dk": 0.072, "dv": 0.055}
PEERS = ("fa3", "fa4", "te_fp8")
Arm = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """One attention problem, q (batch, tokens, heads, dim), k and v with kv_heads."""

    batch: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    causal: bool = True

    @classmethod
    def parse(cls, text: str) -> "Shape":
        parts = text.split(",")
        if len(parts) not in (5, 6):
            raise SystemExit(f"--shape {text} is not B,H,G,D,T or B,H,G,D,T,full")
        return cls(*map(int, parts[:5]), causal=len(parts) == 5 or parts[5] != "full")

    @property
    def text(self) -> str:
        sizes = ",".join(map(str, (self.batch, self.heads, self.kv_heads, self.dim, self.tokens)))
        return sizes if self.causal else f"{sizes},full"

    @property
    def forward_flop(self) -> float:
        return 4.0 * self.batch * self.heads * self.tokens**2 * self.dim * (0.5 if self.causal else 1.0)

    def call(self, mode: str) -> reference.Call:
        return reference.Call(SM90, self.dim**-0.5, 0 if self.causal else None, mode)

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gen = torch.Generator(device="cuda").manual_seed(seed)
        size = lambda n: (self.batch, self.tokens, n, self.dim)  # noqa: E731
        draw = lambda n: torch.randn(size(n), generator=gen, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads), draw(self.heads)


def gate(dim: int, causal: bool) -> dict[str, object]:
    """Errors against FP64 at T = 4096 beside the reference's; `ok` says whether the kernel may be timed."""
    shape = Shape(1, 4, 2, dim, 4096, causal)
    q, k, v, do = shape.tensors(seed=1)
    call = shape.call("matched")
    out = ops.forward(q, k, v, call, probe=True)
    back = ops.backward(do, out.for_backward(), shape.tokens, call, probe=True)
    truth = attention(q, k, v, do, call.offset)
    fwd = reference.forward(q, k, v, call)
    grads, _ = reference.backward(fwd.saved, do, call)
    mine = {"o": out.o, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    sim = {"o": fwd.o, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    errors = {n: round(rel(mine[n], getattr(truth, n)), 5) for n in mine}
    of_reference = {n: round(rel(sim[n], getattr(truth, n)), 5) for n in sim}
    stats = ops.row_stats(out, back, call, shape.tokens, shape.tokens)
    ratio = (stats.row_sum.abs() / stats.row_abs_sum)[..., 1:]
    worst = float((stats.row_sum.abs() / (stats.row_abs_sum + stats.delta.abs())).nan_to_num(0.0).max())
    median = float(ratio.median())
    close = all(errors[n] <= max(BOUNDS[n], 1.05 * of_reference[n]) for n in errors)
    result = {
        "errors_fp64": errors,
        "reference_fp64": of_reference,
        "row_residual_median": median,
        "row_residual_contract_max": worst,
    }
    return {**result, "ok": close and median <= 1e-7 and worst <= 1e-6}


def dm_arms(shape: Shape, x: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """fwd, bwd a mode, fwd+bwd through autograd, and the pre-passes alone."""
    q, k, v, do = x
    call = shape.call("matched")
    saved = ops.forward(q, k, v, call).for_backward()
    arms: Arm = {
        "fwd": lambda: ops.forward(q, k, v, call, keep=True),
        "fwd_only": lambda: ops.forward(q, k, v, call, keep=False),
        "prepass_qkv": lambda: (
            ops.quantise(k, keys=True, center=True),
            ops.quantise(v, keys=True, center=True),
            ops.quantise(q, keys=False),
        ),
        "prepass_do": lambda: torch.ops.dm_plugin.quantise_grad(do, *saved[:3], False),
    }
    for mode in MODES:
        arms[f"bwd_{mode}"] = partial(ops.backward, do, saved, shape.tokens, shape.call(mode))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    arms["fwd_bwd_matched"] = lambda: torch.autograd.grad(ops.attention(*leaves, call)[0], leaves, do)
    return {f"dm.{name}": arm for name, arm in arms.items()}


def autograd_arms(
    name: str, run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor
) -> dict[str, Callable[[], object]]:
    """fwd, bwd and fwd+bwd of a differentiable attention function."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    kept = run(*leaves)
    return {
        f"{name}.fwd": lambda: run(*leaves),
        f"{name}.bwd": lambda: torch.autograd.grad(kept, leaves, do, retain_graph=True),
        f"{name}.fwd_bwd": lambda: torch.autograd.grad(run(*leaves), leaves, do),
    }


def cudnn_arms(shape: Shape, x: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    q, k, v, do = (t.transpose(1, 2) for t in x)
    group = shape.heads != shape.kv_heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=group)

    return autograd_arms("cudnn_bf16", run, q, k, v, do)


def peer_arms(name: str, shape: Shape, x: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Arms of an optional peer. Raises ImportError when it is not installed."""
    q, k, v, do = x
    if name == "fa3":
        from flash_attn_interface import flash_attn_func as fa3  # type: ignore[import-not-found]

        return autograd_arms(name, lambda *t: _first(fa3(*t, causal=shape.causal)), q, k, v, do)
    if name == "fa4":
        from flash_attn.cute import flash_attn_func as fa4  # type: ignore[import-not-found]

        return autograd_arms(name, lambda *t: _first(fa4(*t, causal=shape.causal)), q, k, v, do)
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common.recipe import DelayedScaling  # type: ignore[import-not-found]

    mask = "causal" if shape.causal else "no_mask"
    layer = te.DotProductAttention(
        shape.heads, shape.dim, num_gqa_groups=shape.kv_heads, qkv_format="bshd", attn_mask_type=mask
    )
    recipe = DelayedScaling(fp8_dpa=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return layer(q, k, v).unflatten(-1, (shape.heads, shape.dim))

    return autograd_arms(name, run, q, k, v, do)


def import_te() -> None:
    """Load Transformer Engine before torch's first cuDNN call: it links against the system's cuDNN, whose symbols clash with a newer one in place."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return  # peer_arms meets the same error and records it under `absent`


def _first(x: object) -> Tensor:
    return x[0] if isinstance(x, tuple) else x  # type: ignore[return-value]


def measure(arms: Arm, reps: int) -> dict[str, dict[str, float]]:
    """Median, minimum and 90th percentile in ms of each arm, interleaved."""
    for arm in arms.values():
        arm()
        arm()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(reps):
        for name, arm in arms.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            arm()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {
        n: {"ms": statistics.median(t), "min": min(t), "p90": sorted(t)[int(0.9 * (len(t) - 1))]}
        for n, t in times.items()
    }


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes above what was allocated before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def clocks() -> str:
    """What the card says of itself (read only)."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi did not answer: {error}"
    return done.stdout.strip()


def bench(shape: Shape, reps: int, peers: list[str]) -> dict[str, object]:
    """One shape: times, TFLOP/s, ratios to cuDNN BF16 and peak memory."""
    x = shape.tensors()
    arms = {**cudnn_arms(shape, x), **dm_arms(shape, x)}
    absent = {}
    for peer in peers:
        try:
            arms |= peer_arms(peer, shape, x)
        except (ImportError, RuntimeError, ValueError, AssertionError, OSError) as error:
            absent[peer] = f"{type(error).__name__}: {error}"[:200]
    before = clocks()
    times = measure(arms, reps)
    after = clocks()
    base = {kind: times[f"cudnn_bf16.{kind}"]["ms"] for kind in ("fwd", "bwd", "fwd_bwd")}
    for name, t in times.items():
        kind = "fwd_bwd" if "fwd_bwd" in name else "bwd" if ".bwd" in name else "fwd"
        if "prepass" in name:
            continue
        t["tflops"] = shape.forward_flop * {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5}[kind] / t["ms"] / 1e9
        t["speed_of_cudnn_bf16"] = base[kind] / t["ms"]
    memory = {name: peak_memory(arms[name]) for name in arms if "fwd_bwd" in name}
    return {
        "shape": asdict(shape),
        "times": times,
        "peak_bytes": memory,
        "clocks_before": before,
        "clocks_after": after,
        "absent": absent,
    }


def show(result: dict[str, object]) -> None:
    print(result["shape"], "|", result["clocks_before"], "->", result["clocks_after"])
    times: dict[str, dict[str, float]] = result["times"]  # type: ignore[assignment]
    for name, t in times.items():
        extra = f"{t['tflops']:8.0f} TFLOP/s  {t['speed_of_cudnn_bf16']:5.2f} of cuDNN BF16" if "tflops" in t else ""
        print(f"  {name:24s} {t['ms']:9.3f} ms  (min {t['min']:.3f}, p90 {t['p90']:.3f}) {extra}")
    print(
        "  peak MiB of fwd+bwd:",
        {n: round(b / 2**20) for n, b in result["peak_bytes"].items()},
        "absent:",
        result["absent"],
    )  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shape", action="append", help="B,H,G,D,T or B,H,G,D,T,full; may be repeated (default 1,64,8,128,16384)"
    )
    parser.add_argument("--suite", choices=sorted(SUITES), help="a named set of shapes, before those of --shape")
    parser.add_argument("--reps", type=int, default=20, help="rounds; the median is reported")
    parser.add_argument(
        "--peers",
        default=",".join(
            p
            for p in PEERS
            if importlib.util.find_spec(
                {"fa3": "flash_attn_interface", "fa4": "flash_attn", "te_fp8": "transformer_engine"}[p]
            )
        ),
        help="fa3,fa4,te_fp8 (default: those installed)",
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "benchmarks/results/bench_attention.json", help="where the numbers go"
    )
    args = parser.parse_args()
    ok, reason = ops.available()
    if not ok or not torch.cuda.is_available():
        print(reason or "no CUDA GPU: nothing to time", file=sys.stderr)
        return 3
    peers = [p for p in args.peers.split(",") if p]
    if "te_fp8" in peers:
        import_te()
    texts = [*SUITES.get(args.suite, ()), *(args.shape or [])]
    shapes = [Shape.parse(s) for s in texts or ["1,64,8,128,16384"]]
    gates = {f"D{d}{'' if c else ' full'}": gate(d, c) for d, c in sorted({(s.dim, s.causal) for s in shapes})}
    print(json.dumps(gates, indent=1))
    if not all(g["ok"] for g in gates.values()):
        print("the correctness gate failed: nothing is timed", file=sys.stderr)
        return 2
    results, goals = [], []
    for shape in shapes:
        results.append(bench(shape, args.reps, peers))
        show(results[-1])
        times: dict[str, dict[str, float]] = results[-1]["times"]  # type: ignore[assignment]
        goals += standing(shape.text, {name: t["ms"] for name, t in times.items()})
        torch.cuda.empty_cache()
    for s in goals:
        print(s.text)
    report = {
        "command": " ".join(["python3", *sys.argv]),
        "build": ops.build_info(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "reps": args.reps,
        "gate": gates,
        "goals": [{**s.goal._asdict(), "arm": s.arm, "speed": s.speed} for s in goals],
        "results": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
