"""Runs compute-sanitizer over small shapes of every kernel: memcheck, racecheck, synccheck.

python3 tests/sm90/sanitise.py [memcheck racecheck synccheck]      exit code 0: every tool found nothing
python3 tests/sm90/sanitise.py --work                              the workload alone (what the tools run)

memcheck and synccheck are clean. racecheck does not follow "__syncwarp, then one lane arrives on the mbarrier": it reports dkv's plainly
stored vectors (and dq's scalars) against their reads. With every lane arriving (the same kernels with barrier counts times 32) it finds nothing.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
TOOLS = ("memcheck", "racecheck", "synccheck")
SHAPES = ((130, 130, 0), (65, 200, 135), (200, 65, -135), (257, 257, None))


def work() -> None:
    import torch
    from helpers import DIMS, inputs, kernel, make_call

    for d in DIMS:
        for t, t_k, offset in SHAPES:
            for mode, probe in (("matched", True), ("stale", False)):
                q, k, v, do = inputs(t=t, t_k=t_k, h=2, g=1, d=d)
                run = kernel(q, k, v, do, make_call(d, offset, mode), probe)
                assert torch.isfinite(run.dq).all()
                assert torch.isfinite(run.dk).all()
    torch.cuda.synchronize()


def main() -> int:
    if "--work" in sys.argv:
        work()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    failed = []
    for tool in [t for t in sys.argv[1:] if t in TOOLS] or TOOLS:
        command = [
            sanitizer,
            f"--tool={tool}",
            "--error-exitcode=9",
            "--kernel-name",
            "kernel_substring=sm90",
            sys.executable,
            __file__,
            "--work",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = [line.strip("= ") for line in (done.stdout + done.stderr).splitlines() if "=========" in line]
        print(
            f"{tool}: exit {done.returncode};", lines[-1] if lines else (done.stdout + done.stderr)[-1500:], flush=True
        )
        if done.returncode:
            failed.append(tool)
            places = Counter(re.sub(r"\+0x[0-9a-f]+.*", "", line) for line in lines if " at " in line)
            print(*(f"  {n:5d} {place}" for place, n in places.most_common(40)), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
