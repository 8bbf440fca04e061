"""The loss gap of an attention arm over several seeds: examples/megatron_te.py, every arm and seed a process, gaps paired by seed.

    python3 benchmarks/ab_seeds.py [--seeds 2,3,4] [--arms te_bf16,te_fp8_linears,te_fp8,dm_stale,dm_matched] [--model gpt] [--steps 200] [--json FILE]

loss of a run = mean over its last `--last` steps; gap = loss(arm) - loss(base), the same seed, hence the same initialisation and data;
mean and standard deviation are over seeds. Runs share the GPU, so no time is reported.
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


def spread(values: list[float]) -> dict[str, Any]:
    return {
        "each": [round(v, 5) for v in values],
        "mean": round(statistics.mean(values), 5),
        "sd": round(statistics.stdev(values), 5) if len(values) > 1 else None,
    }


def gaps(losses: dict[str, dict[int, float]], base: str) -> dict[str, Any]:
    """Losses by arm and seed -> the gap of each arm to `base`, over the seeds that both finished."""
    of_base = losses.get(base, {})
    return {
        arm: spread([mine[s] - of_base[s] for s in sorted(mine.keys() & of_base.keys())])
        for arm, mine in losses.items()
        if arm != base and mine.keys() & of_base.keys()
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", default="2,3,4")
    p.add_argument("--arms", default=ARMS)
    p.add_argument("--model", default="gpt")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--last", type=int, default=20)
    p.add_argument("--json", type=Path, default=None)
    args = p.parse_args()
    arms, seeds = args.arms.split(","), [int(s) for s in args.seeds.split(",")]
    losses: dict[str, dict[int, float]] = {arm: {} for arm in arms}
    about: dict[str, Any] = {}
    failed = False
    with tempfile.TemporaryDirectory() as tmp:
        jobs = {}
        for seed in seeds:
            for arm in arms:
                out = Path(tmp) / f"{arm}_{seed}"
                command = [sys.executable, "-W", "ignore", str(ROOT / "examples/megatron_te.py"), "--arm", arm, "--out", str(out)]  # fmt: skip
                command += ["--model", args.model, "--seed", str(seed), "--steps", str(args.steps), "--save-every", "0"]
                with open(f"{out}.log", "wb") as log:
                    jobs[arm, seed] = out, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for (arm, seed), (out, job) in jobs.items():
            if job.wait():
                failed = True
                print(f"{arm}, seed {seed}, ended with code {job.returncode}:\n{Path(f'{out}.log').read_text()[-1500:]}", file=sys.stderr)  # fmt: skip
                continue
            lines = (out / "train.jsonl").read_text().splitlines()[-args.last :]
            losses[arm][seed] = statistics.mean(json.loads(line)["loss"] for line in lines)
            about = json.loads((out / "backend.json").read_text())
    tables = {base: gaps(losses, base) for base in ("te_bf16", "te_fp8_linears") if base in losses}
    for base, rows in tables.items():
        for arm, row in rows.items():
            print(f"{arm:15s} - {base:15s} {row['mean']:+.4f} (sd {row['sd']})  {row['each']}")
    if args.json is not None:
        record = {"what": "ab_seeds", "command": " ".join(["python3", *sys.argv]), **{k: about.get(k) for k in ("device", "versions", "shape")}}  # fmt: skip
        record |= {"last": args.last, "losses": losses, "gaps": tables}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
