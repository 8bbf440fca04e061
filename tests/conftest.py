"""Every test runs on one torch thread (bitwise comparisons, two-core machines) and finds the helpers beside this file."""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    import torch

    torch.set_num_threads(1)
except ModuleNotFoundError:  # the review tests need no torch
    pass


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Megatron's parallel state in this process (one gloo rank), with its CUDA calls redirected; undone at the end."""
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
    from megatron_jobs import megatron_on_cpu

    with megatron_on_cpu():
        yield


@pytest.fixture(scope="session")
def megatron_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the two-rank jobs of megatron_jobs.py, run once for all test processes."""
    from megatron_jobs import run_ranks

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "megatron_ranks"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "rank_1.json").exists():
            run_ranks(folder)
    return folder


@pytest.fixture(scope="session")
def te_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """te_job(name, env) -> the result of a job of te_jobs.py, run once for all test processes."""
    from te_jobs import missing, run_job

    why = missing()
    if why:
        pytest.skip(why)
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def job(name: str, env: dict[str, str] | None = None) -> Any:
        tag = "_".join([name, *(f"{k}={v}" for k, v in sorted((env or {}).items()))]).replace(".", "-")
        folder = root / "te_jobs" / tag
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / "result.json"
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                done.write_text(json.dumps(run_job(folder, name, env)))
        return json.loads(done.read_text())

    return job
