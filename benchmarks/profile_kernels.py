"""What bounds each main kernel: Nsight Compute's counters for one forward and backward.

    python3 benchmarks/profile_kernels.py [--shape 1,64,8,128,16384] [--json FILE]

Every kernel of the pass is profiled once, with the counters of WANTED collected over several replays; the time is ncu's own, at the clocks
it finds (--clock-control none), so bench_attention's medians are the times to quote. Percentages are of the peak that the GPU sustains.
Exit code 3 when ncu is not there or gives nothing.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
)
WANTED = {  # a short name -> the first of these counters that this ncu knows
    "us": ("gpu__time_duration.sum",),
    "tensor %": (
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "issue %": ("sm__inst_issued.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct"),
    "fma %": ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active", "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"),
    "alu %": ("sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active", "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active"),
    "xu %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "smem %": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed", "l1tex__throughput.avg.pct_of_peak_sustained_active"),
    "l2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "dram %": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",),
}  # fmt: skip
EXTRA = sorted({name for names in WANTED.values() for name in names})


def work(shape_text: str) -> None:
    """One forward and one backward, after a small one that loads everything."""
    import torch
    from bench_attention import Shape

    from dm_plugin import ops

    for text in (",".join([*shape_text.split(",")[:4], "256"]), shape_text):
        shape = Shape.parse(text)
        q, k, v, do = shape.tensors()
        call = shape.call("matched")
        saved = ops.forward(q, k, v, call).for_backward()
        ops.backward(do, saved, shape.tokens, call)
        torch.cuda.synchronize()


def parse(text: str) -> list[dict[str, object]]:
    """Rows of ncu's raw page in CSV: the kernel, and every counter that is a number (in the unit that ncu names)."""
    start = text.find('"ID"')
    if start < 0:
        return []
    rows = csv.DictReader(io.StringIO(text[start:]))
    units = next(rows, {})
    out = []
    for row in rows:
        counters = {}
        for name, value in row.items():
            try:
                counters[name] = float((value or "").replace(",", ""))
            except ValueError:
                continue
        out.append({"kernel": row["Kernel Name"], "grid": row.get("Grid Size"), "counters": counters, "units": units})
    return out


def summarise(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """One line a launch: the short names of WANTED, and the three reasons for which warps waited longest."""
    lines = []
    for row in rows:
        counters: dict[str, float] = row["counters"]  # type: ignore[assignment]
        units: dict[str, str] = row["units"]  # type: ignore[assignment]
        line: dict[str, object] = {"kernel": row["kernel"]}
        for short, names in WANTED.items():
            name = next((n for n in names if n in counters), None)
            line[short] = (
                None
                if name is None
                else round(counters[name] * (microseconds(units.get(name, "")) if short == "us" else 1.0), 2)
            )
        waits = {n.split("issue_stalled_")[1].split("_per_")[0]: v for n, v in counters.items() if "issue_stalled_" in n and n.endswith("per_issue_active.ratio") and "not_issued" not in n}  # fmt: skip
        line["waits"] = {n: round(v, 2) for n, v in sorted(waits.items(), key=lambda x: -x[1])[:3]}
        lines.append(line)
    return lines


def microseconds(unit: str) -> float:
    return {
        "nsecond": 1e-3,
        "ns": 1e-3,
        "usecond": 1.0,
        "us": 1.0,
        "msecond": 1e3,
        "ms": 1e3,
        "second": 1e6,
        "s": 1e6,
    }.get(unit, 1.0)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="1,64,8,128,16384", help="B,H,G,D,T")
    p.add_argument("--json", type=Path, default=None)
    p.add_argument("--work", action="store_true", help="run the kernels, nothing else (what ncu is given)")
    args = p.parse_args()
    if args.work:
        work(args.shape)
        return 0
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        print("ncu (Nsight Compute) is not on this machine: nothing is profiled", file=sys.stderr)
        return 3
    # the small call's launches come first; its kernels have the same names, so the last launch of each name is kept
    command = [
        ncu,
        "--csv",
        "--page",
        "raw",
        "--clock-control",
        "none",
        "--kernel-name",
        "regex:(forward|forward256|delta|dq|dkv)_kernel",
    ]
    command += [x for s in SECTIONS for x in ("--section", s)] + ["--metrics", ",".join(EXTRA)]
    done = subprocess.run(
        [*command, sys.executable, __file__, "--work", "--shape", args.shape],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    rows = parse(done.stdout)
    last = {str(row["kernel"]): row for row in rows}
    if not last:
        print(
            f"ncu gave no counters (exit code {done.returncode}):\n{(done.stdout + done.stderr)[-2000:]}",
            file=sys.stderr,
        )
        return 3
    lines = summarise(list(last.values()))
    for line in lines:
        print(json.dumps(line))
    if args.json is not None:
        version = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout.split()
        record = {"what": "profile_kernels", "command": " ".join(["python3", *sys.argv]), "shape": args.shape}
        record |= {"ncu": version[-1] if version else None, "kernels": lines, "all": [{k: r[k] for k in ("kernel", "grid", "counters")} for r in last.values()]}  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
