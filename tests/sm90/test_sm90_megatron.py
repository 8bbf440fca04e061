"""Megatron-Core training on a Hopper GPU through examples/megatron_te.py: bitwise equal losses where they must be.

DM_TEST_STEPS (default 24) is the length of each run; runs share the GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
pytest.importorskip("megatron.core", reason="needs megatron-core")
pytestmark = [pytest.mark.te, pytest.mark.megatron]
ROOT = Path(__file__).resolve().parents[2]
STEPS = int(os.environ.get("DM_TEST_STEPS", "24"))
HALF = STEPS // 2


def start(out: Path, arm: str = "dm_matched", **flags: object) -> subprocess.Popen[str]:
    words = [
        x
        for key, value in flags.items()
        for x in (f"--{key.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples/megatron_te.py"), "--arm", arm, "--out", str(out)]
    return subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*jobs: subprocess.Popen[str]) -> list[str]:
    said = [job.communicate(timeout=250)[0] for job in jobs]
    for job, text in zip(jobs, said, strict=True):
        assert job.returncode == 0, text[-3000:]
    return said


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "train.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    probes = root / "probes.yaml"
    probes.write_text(
        "all:\n  enabled: True\n  layers: {layer_name_regex_pattern: '.*'}\n  dm_plugin:\n    DumpAttentionProbes: {enabled: True, freq: 4}\n"
    )
    jobs = [start(root / model / name, model=model, steps=STEPS, **flags) for model in ("gpt", "hybrid") for name, flags in {
        "plain": {},
        "core_attn": {"recompute": "core_attn"},
        "full": {"recompute": "full"},
        "probed": {"probes": probes},
    }.items()]  # fmt: skip
    jobs += [
        start(root / "bf16", steps=STEPS, linears="bf16"),
        start(root / "half", steps=HALF, save_every=HALF, linears="bf16"),
        start(root / "swap", steps=HALF, save_every=HALF, arm="te_bf16"),
        start(root / "back", steps=HALF, save_every=HALF, linears="bf16"),
    ]
    finish(*jobs)
    finish(
        start(root / "half", steps=STEPS, resume=True, linears="bf16"),
        start(root / "swap", steps=STEPS, resume=True, linears="bf16"),
        start(root / "back", steps=STEPS, resume=True, arm="te_bf16"),
    )
    return root


@pytest.mark.parametrize("model", ["gpt", "hybrid"])
def test_A01_losses_are_bitwise_equal_across_recompute_and_probes(runs: Path, model: str) -> None:
    plain = losses(runs / model / "plain")
    assert len(plain) == STEPS
    assert plain[-1] < plain[0] - 1
    for name in ("core_attn", "full", "probed"):
        assert losses(runs / model / name) == plain, name


def test_the_probed_run_left_every_fourth_step_of_every_layer(runs: Path) -> None:
    from dm_plugin.review.collect import collect
    from dm_plugin.review.measure import MEASURES
    from dm_plugin.review.runs import discover

    for model in ("gpt", "hybrid"):
        (arm,) = discover([runs / model / "probed"], [])
        data = collect(arm, [MEASURES["row_sum_pre.median"]])
        values = data.values["row_sum_pre.median"]
        assert values.shape == (-(-STEPS // 4), 4)
        assert (values < 1e-6).all()
        assert data.backend == "sm90:matched"


def test_resume_equals_the_uninterrupted_run(runs: Path) -> None:
    # BF16 linear layers: Transformer Engine's delayed scaling of its own FP8 linears does not resume bit by bit
    assert losses(runs / "half") == losses(runs / "bf16")


@pytest.mark.parametrize("name", ["swap", "back"])
def test_A05_the_attention_can_be_swapped_in_the_middle_of_a_run(runs: Path, name: str) -> None:
    curve = losses(runs / name)
    assert len(curve) == STEPS
    assert abs(curve[HALF] - curve[HALF - 1]) < 0.5
    assert curve[-1] < curve[0] - 1


def test_the_log_says_which_backend_ran(runs: Path) -> None:
    about = json.loads((runs / "gpt" / "plain" / "backend.json").read_text())
    assert about["backend"] == "te:dm_plugin:matched"
    assert all(d["ours"] for d in about["plugin"]["decisions"])
    assert json.loads((runs / "back" / "backend.json").read_text())["backend"].startswith("te:FusedAttention:F16")
