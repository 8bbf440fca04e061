"""Four ranks (tensor 2 x pipeline 2) started, stopped and hurt by file while they train: megatron_four.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from megatron_jobs import ROOT, free_port

from dm_plugin import control
from dm_plugin.dump import find_dumps, read_file
from dm_plugin.review.collect import collect
from dm_plugin.review.measure import MEASURES
from dm_plugin.review.runs import discover

pytestmark = pytest.mark.megatron
NAMES = ("plain", "asked", "hurt")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("four")
    for name in NAMES:
        common = {
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests/megatron_four.py"), str(out), name]
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ | common | {"RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for r in range(4)
        ]
        try:
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for rank, text in zip(ranks, said, strict=True):
            assert rank.returncode == 0, text[-3000:]
        (out / f"{name}.txt").write_text("".join(said))
    return out


def found(jobs: Path, name: str) -> list[dict]:
    return [json.loads((jobs / name / f"rank_{r}.json").read_text()) for r in range(4)]


@pytest.mark.parametrize("name", ["asked", "hurt"])
def test_losses_are_bitwise_those_of_a_job_that_was_never_probed(jobs: Path, name: str) -> None:
    plain = [x["losses"] for x in found(jobs, "plain")]
    assert any(plain[3][0])
    assert [x["losses"] for x in found(jobs, name)] == plain


def test_every_rank_probes_exactly_the_steps_and_layers_that_were_asked_for(jobs: Path) -> None:
    run = jobs / "asked" / "dumps"
    assert [(f.step, f.rank) for f in find_dumps(run)] == [(step, rank) for step in (2, 3, 4) for rank in range(4)]
    (arm,) = discover([run], [])
    data = collect(arm, [MEASURES["row_sum_pre.median"]])
    assert data.sites == [f"decoder.layers.{i}.self_attention.core_attention" for i in (1, 2)]
    assert (data.values["row_sum_pre.median"] < 1e-6).all()
    worlds = [json.loads(read_file(f.path)[0]["dm_plugin.world"]) for f in find_dumps(run)[:4]]
    assert sorted((w["tp_rank"], w["pp_rank"]) for w in worlds) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    request, ranks = control.status(run)
    assert request is not None
    assert request["action"] == "stop"
    assert [r["state"] for r in ranks] == ["idle"] * 4
    assert all(r["written"] == 3 and r["lost"] == 0 for r in ranks)


def test_a_vanished_folder_and_a_broken_request_cost_records_not_the_job(jobs: Path) -> None:
    said = (jobs / "hurt.txt").read_text()
    assert said.count("probe_request.json is ignored: Unterminated string") == 4
    assert sum(x["lost"] for x in found(jobs, "hurt")) + len(find_dumps(jobs / "hurt" / "gone")) == 4
    for file in find_dumps(jobs / "hurt" / "gone"):
        assert read_file(file.path)[0]["dm_plugin.step"] == "2"
