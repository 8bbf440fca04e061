"""A Megatron pretraining script run unchanged through the launcher, on a Hopper GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
pytest.importorskip("megatron.training", reason="needs megatron-core with megatron.training (0.19)")
pytestmark = [pytest.mark.te, pytest.mark.megatron]
ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
FLAGS = f"""--num-layers 4 --hidden-size 512 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 128
--ffn-hidden-size 1024 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS}
--normalization RMSNorm --qk-layernorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --bf16 --transformer-impl transformer_engine --lr 5e-4 --lr-decay-style constant --weight-decay 0.1
--clip-grad 1.0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0
--no-gradient-accumulation-fusion --no-create-attention-mask-in-dataloader --split 98,1,1 --ckpt-format torch_dist""".split()


def start(out: Path, port: int, *flags: str, launched: bool = True) -> subprocess.Popen[str]:
    script = str(ROOT / "examples/megatron_pretrain.py")
    head = ["-m", "dm_plugin.integrations.megatron.launch", script] if launched else [script]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    env |= {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }  # Megatron's warm-up compiles for a minute otherwise
    command = [sys.executable, "-W", "ignore", *head, *FLAGS, "--save", str(out), "--save-interval", "1000", *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", text)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("launch")
    dm = ("--use-dm-attention", "--attention-backend", "flash")
    jobs = {
        "matched": start(root / "matched", 29611, *dm),
        "probed": start(
            root / "probed", 29612, *dm, "--save-dm-probes-interval", "4", "--dm-mode", "matched,0-1=stale"
        ),
        "some": start(
            root / "some", 29613, "--use-dm-attention", "--dm-attention-layers", "0-1", "--attention-backend", "fused"
        ),
        "off": start(root / "off", 29614, "--attention-backend", "fused"),
        "stock": start(root / "stock", 29615, "--attention-backend", "fused", launched=False),
    }
    out = {name: job.communicate(timeout=250)[0] for name, job in jobs.items()}
    for name, job in jobs.items():
        assert job.returncode == 0, f"{name}: {out[name][-3000:]}"
    return out | {"root": str(root)}


def test_every_job_trains_all_its_steps(said: dict[str, str]) -> None:
    for name in ("matched", "probed", "some", "off", "stock"):
        curve = losses(said[name])
        assert len(curve) == STEPS, name
        assert curve[-1] < curve[0]


def test_without_our_flags_the_launcher_changes_nothing(said: dict[str, str]) -> None:
    assert losses(said["off"]) == losses(said["stock"])
    assert "dm_plugin, mode" not in said["off"]


def test_the_log_says_which_layers_are_ours_and_in_which_mode(said: dict[str, str]) -> None:
    assert "attention of every layer: dm_plugin, mode matched" in said["matched"]
    assert "attention of every layer: dm_plugin, mode matched, layers 0-1 stale" in said["probed"]
    assert "attention of layers 0-1 (the spec's own elsewhere): dm_plugin, mode matched" in said["some"]


def test_probe_dumps_show_each_layers_own_mode(said: dict[str, str]) -> None:
    from dm_plugin.review.collect import collect
    from dm_plugin.review.measure import MEASURES
    from dm_plugin.review.runs import discover

    (arm,) = discover([Path(said["root"]) / "probed" / "dm_probes"], [])
    data = collect(arm, [MEASURES["row_sum_pre.median"]])
    values = data.values["row_sum_pre.median"]
    assert [f.step for f in arm.files] == [0, 4, 8]
    assert (values[:, :2] > 1e-4).all()
    assert (values[:, 2:] < 1e-6).all()
    assert data.backend == "sm90:matched,sm90:stale"


def test_a_job_with_some_layers_is_neither_stock_nor_ours(said: dict[str, str]) -> None:
    curves = [losses(said[name]) for name in ("matched", "some", "stock")]
    assert curves[0] != curves[1] != curves[2]
