"""Time and memory of reviewing a large dump directory: 1,000 steps, 48 layers, about 1 MiB a file.

    python benchmarks/bench_review.py --json benchmarks/results/review_1gib.json

Writes the directory into a temporary folder, then runs `dm-plugin show` and `dm-plugin report` on it as whole processes and reads their
wall time and peak resident memory from the operating system. Bars: 10 s and 1 GiB each.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fake_dumps import write_big


def run(*args: str) -> tuple[float, float]:
    """(seconds, peak MiB) of one dm-plugin call; its exit code must be 0."""
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.execv(sys.executable, [sys.executable, "-m", "dm_plugin.cli", *args])
    _, status, usage = os.wait4(pid, 0)
    if status != 0:
        raise SystemExit(f"dm-plugin {' '.join(args)} failed with status {status}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--layers", type=int, default=48)
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--json", default=None, metavar="PATH")
    args = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dm-review-"))
    try:
        size = write_big(folder / "dumps", steps=args.steps, layers=args.layers)
        print(f"{size / 2**30:.2f} GiB in {args.steps} files of {args.layers} layers")
        body = {}
        for name, call in {
            "show": ["show", str(folder / "dumps")],
            "report": ["report", str(folder / "dumps"), "-o", str(folder / "page.html")],
        }.items():
            runs = sorted(run(*call) for _ in range(args.runs))
            seconds, peak = runs[len(runs) // 2][0], max(r[1] for r in runs)
            body[name] = {
                "seconds_median": round(seconds, 2),
                "peak_mib": round(peak),
                "runs": [round(r[0], 2) for r in runs],
            }
            verdict = "ok" if seconds < 10 and peak < 1024 else "MISSES THE BAR"
            print(f"{name}: {seconds:.1f} s (median of {args.runs}), peak {peak:.0f} MiB: {verdict}")
        body["page_kib"] = round((folder / "page.html").stat().st_size / 1024)
        if args.json:
            record = {
                "what": "review of a large dump directory",
                "command": " ".join(["python", *sys.argv]),
                "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
                "python": platform.python_version(),
                "gib": round(size / 2**30, 3),
                "steps": args.steps,
                "layers": args.layers,
                "bars": {"seconds": 10, "peak_mib": 1024},
                **body,
            }
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
