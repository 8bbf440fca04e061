"""Runs the Hopper suites and leaves junit and JSON under benchmarks/results/.

    python3 tests/sm90/run.py [--out DIR] [pytest arguments]        (`make test-gpu`)

Exit code: pytest's, or 2 when no test ran (no GPU, no kernels): a green run that tested nothing is not green.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    arguments = sys.argv[1:]
    out = ROOT / "benchmarks/results"
    if "--out" in arguments:
        at = arguments.index("--out")
        out = Path(arguments[at + 1])
        del arguments[at : at + 2]
    out.mkdir(parents=True, exist_ok=True)
    junit = out / "test_gpu.xml"
    start = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "sm90",
        "--durations=12",
        f"--junitxml={junit}",
        *(arguments or ["tests"]),
    ]
    code = subprocess.run(command, cwd=ROOT, env=importable(), check=False).returncode
    if junit.exists():
        junit.write_text(re.sub(r' hostname="[^"]*"', "", junit.read_text()).replace(f"{ROOT}/", ""))
    summary = {**count(junit), "seconds": round(time.monotonic() - start, 1), "exit": code, **environment()}
    (out / "test_gpu.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({k: summary[k] for k in ("passed", "failed", "skipped", "seconds", "gpu")}))
    return code if code else (0 if summary["passed"] else 2)


def importable() -> dict[str, str]:
    """An environment in which dm_plugin.integrations imports from a checkout that was not installed."""
    found = subprocess.run(
        [sys.executable, "-c", "import dm_plugin.integrations"], cwd=ROOT, capture_output=True, check=False
    )
    if found.returncode == 0:
        return dict(os.environ)
    home = Path(tempfile.mkdtemp(prefix="dm_plugin_path_"))
    (home / "dm_plugin").mkdir()
    for path in (*(ROOT / "dm_plugin").iterdir(), ROOT / "integrations"):
        (home / "dm_plugin" / path.name).symlink_to(path)
    return os.environ | {"PYTHONPATH": f"{home}:{os.environ.get('PYTHONPATH', '')}"}


def count(junit: Path) -> dict[str, object]:
    """Numbers and the names of what failed."""
    failed, skipped, passed = [], [], 0
    for case in ET.parse(junit).getroot().iter("testcase") if junit.exists() else ():
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif case.find("skipped") is not None:
            skipped.append(name)
        else:
            passed += 1
    return {"passed": passed, "failed": len(failed), "skipped": len(skipped), "failures": failed}


def environment() -> dict[str, object]:
    sys.path.insert(0, str(ROOT))
    import torch

    from dm_plugin import ops

    ok, reason = ops.available()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "library": ops.build_info() if ok else reason,
    }


if __name__ == "__main__":
    sys.exit(main())
