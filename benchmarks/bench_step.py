"""Step time of a 1B-class Megatron GPT under stock and our attention: examples/megatron_te.py, one process an arm.

    python3 benchmarks/bench_step.py [--tokens 8192,32768] [--arms te_bf16,te_fp8,dm_matched] [--layers 20] [--width 2048] [--json FILE]

A step is forward, backward and the optimizer on one sequence, timed on the host around the wait for its loss. The arms of a length are set up
side by side and train one after another, each with the GPU to itself; the figure is the median after `--skip` steps, which hold compilation
and amax history. speed = t(te_bf16) / t(arm): BF16 linear layers there, FP8 ones in every other arm, so te_fp8_linears is the base of attention.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ARMS = "te_bf16,te_fp8_linears,te_fp8,dm_stale,dm_matched"


def start(arm: str, tokens: int, folder: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """One arm; it waits for the lock of its length before it trains. Its output goes to a file, since a full pipe would hold up the lock."""
    flags: dict[str, Any] = {
        "layers": args.layers,
        "width": args.width,
        "steps": args.steps,
        "tokens": tokens,
        "batch": 1,
    }
    flags |= {"save-every": 0, "arm": arm, "out": folder / arm, "exclusive": folder / "gpu.lock"}
    words = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples/megatron_te.py"), "--nondeterministic", *words]
    with open(folder / f"{arm}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def read(folder: Path, skip: int) -> dict[str, Any]:
    """Median step and what ran, from the files that an arm leaves."""
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    about = json.loads((folder / "backend.json").read_text())
    times = [line["time"] for line in lines[skip:]]
    return {
        "ms": round(1e3 * statistics.median(times), 2),
        "min_ms": round(1e3 * min(times), 2),
        "max_ms": round(1e3 * max(times), 2),
        "tokens_per_s": round(lines[-1]["tokens"] / statistics.median(times)),
        "peak_mib": lines[-1]["peak_mib"],
        "last_loss": lines[-1]["loss"],
        **{name: about[name] for name in ("backend", "device", "versions", "parameters", "shape")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.steps <= args.skip:
        parser.error(f"--steps {args.steps} leaves nothing after --skip {args.skip}")
    results: dict[str, dict[str, Any]] = {}
    failed = False
    with tempfile.TemporaryDirectory() as tmp:
        for tokens in map(int, args.tokens.split(",")):
            folder = Path(tmp) / str(tokens)
            folder.mkdir()
            jobs = {arm: start(arm, tokens, folder, args) for arm in args.arms.split(",")}
            for arm, job in jobs.items():
                if job.wait():
                    said = (folder / f"{arm}.log").read_text(errors="replace")
                    failed = True
                    print(
                        f"{arm} at {tokens} tokens ended with code {job.returncode}:\n{said[-2000:]}", file=sys.stderr
                    )
                    continue
                results.setdefault(str(tokens), {})[arm] = read(folder / arm, args.skip)
    for tokens_text, arms in results.items():
        base = arms.get("te_bf16", {}).get("ms")
        for arm, r in arms.items():
            r["speed_of_te_bf16"] = None if base is None else round(base / r["ms"], 3)
            print(f"T={tokens_text:6s} {arm:15s} {r['ms']:9.1f} ms  {r['tokens_per_s']:8d} tokens/s  {r['peak_mib']:6d} MiB  "
                  f"speed {r['speed_of_te_bf16']}  {r['backend']}")  # fmt: skip
    if args.json is not None:
        record = {
            "what": "bench_step",
            "command": " ".join(["python3", *sys.argv]),
            "steps": args.steps,
            "skipped": args.skip,
        }
        args.json.write_text(json.dumps({**record, "tokens": results}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
