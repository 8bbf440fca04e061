"""The A/B runner: arms as commands, probes by request, interruption, failures and bad configs; and the real tiny job, resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dm_plugin import ab
from dm_plugin.dump import find_dumps, read_file

ROOT = Path(__file__).parent.parent
JOB = """
import json, sys, time
import numpy as np
from pathlib import Path
from dm_plugin.control import Watcher
from dm_plugin.dump import write_step
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, steps, level = Path(args["--out"]), int(args["--steps"]), float(args["--level"])
watcher = Watcher(out)
hist = np.zeros(242, np.int64); hist[int((np.log10(level) + 10) * 20) + 1] = 100
if args.get("--fail"): sys.exit("this arm cannot start: no such attention")
with open(out / "train.jsonl", "a") as log:
    for step in range(steps):
        patience = time.monotonic() + 60
        while step == 8 and not (out / "probe_request.json").exists() and time.monotonic() < patience:
            time.sleep(0.05)  # the runner may be slow to look
        if watcher.poll(step) is not None:
            site = "decoder.layers.0.self_attention.core_attention"
            write_step(out / "dumps", step, 0, {f"{site}/row_sum_pre.hist": hist}, {"dm_plugin.backend": "fake"})
        log.write(json.dumps({"step": step, "loss": 3 - 0.01 * step, "text": args.get("--text")}) + "\\n"); log.flush()
        time.sleep(float(args.get("--sleep", 0.05)))
"""


def config(tmp_path: Path, **changes) -> Path:
    import yaml

    (tmp_path / "job.py").write_text(JOB)
    tree = {
        "out": str(tmp_path / "run"),
        "steps": 20,
        "parallel": 2,
        "probe": {"after_step": 5},
        "command": ["{python}", "{here}/job.py", "--out", "{arm}", "--steps", "{steps}"],
        "arms": {"bf16": {"args": ["--level", "1e-3"]}, "matched": {"label": "Matched", "args": ["--level", 1e-7]}},
    } | changes
    path = tmp_path / "ab.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in tree.items() if v is not None}))
    return path


def test_arms_run_are_probed_on_request_and_summed_up(tmp_path, capsys) -> None:
    assert ab.run(config(tmp_path)) == 0
    run = tmp_path / "run"
    for name in ("bf16", "matched"):
        lines = [json.loads(x) for x in (run / name / "train.jsonl").read_text().splitlines()]
        assert [x["step"] for x in lines] == list(range(20))
        steps = [f.step for f in find_dumps(run / name / "dumps")]
        assert steps[0] >= 5
        assert steps[-1] == 19
    text = capsys.readouterr().out
    assert "Matched" in text
    assert "gap to bf16" in text
    assert "+0.0000" in text
    assert (run / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match="already holds a run; pass --resume"):
        ab.run(tmp_path / "ab.yaml")


def test_a_failing_arm_shows_the_end_of_its_log_and_the_others_go_on(tmp_path, capsys) -> None:
    arms = {"good": {"args": ["--level", "1e-3"]}, "bad": {"args": ["--level", "1", "--fail", "1"]}}
    assert ab.run(config(tmp_path, arms=arms)) == 1
    captured = capsys.readouterr()
    assert "arm bad failed" in captured.err
    assert "no such attention" in captured.err
    assert len((tmp_path / "run" / "good" / "train.jsonl").read_text().splitlines()) == 20


def test_only_and_text_are_passed_on(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    plan = ab.load(config(tmp_path), only=["matched"], text=text, resume=True)
    (arm,) = plan.arms
    assert arm.command[-3:] == ["--text", str(text), "--resume"]
    assert arm.command[:2] == [sys.executable, str(tmp_path / "job.py")]


BAD = {
    "arms": (None, "arms must be a mapping"),
    "steps": (0, "steps=0 must be a whole number"),
    "parallel": ("two", "parallel='two' must be a whole number"),
    "probe": ({"after": 3}, "unknown key 'after'; known keys are after_step"),
    "command": (None, "arm bf16 has no command"),
    "speed": (1, "unknown key 'speed'"),
}


@pytest.mark.parametrize("key", BAD)
def test_bad_configs_name_the_key(tmp_path, key) -> None:
    value, text = BAD[key]
    with pytest.raises(ValueError, match=text):
        ab.load(config(tmp_path, **{key: value}))


def test_unknown_arms_placeholders_and_texts_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="has no arm 'fp4'; its arms are bf16, matched"):
        ab.load(config(tmp_path), only=["fp4"])
    with pytest.raises(ValueError, match="placeholder that is not known"):
        ab.load(config(tmp_path, command=["{pyhton}"]))
    with pytest.raises(ValueError, match="is not a file"):
        ab.run(config(tmp_path), text=tmp_path / "nothing")


def test_ctrl_c_leaves_whole_files_and_says_how_to_go_on(tmp_path) -> None:
    arms = {"bf16": {"args": ["--level", "1e-3", "--sleep", "0.1"]}}
    path = config(tmp_path, arms=arms, steps=10_000)
    code = f"from dm_plugin import ab; import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(ab.run({str(path)!r}))"
    job = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: find_dumps(tmp_path / "run" / "bf16" / "dumps"))
    os.killpg(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "--resume goes on" in err
    for file in find_dumps(tmp_path / "run" / "bf16" / "dumps"):
        read_file(file.path)
    assert (tmp_path / "run" / "page.html").exists()


def wait_for(ready, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
    return found


@pytest.mark.megatron
def test_the_tiny_job_interrupted_and_resumed_equals_an_uninterrupted_one(tmp_path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    small = ["--tokens", "64", "--layers", "2", "--batch", "1", "--steps", "8", "--save-every", "100"]
    script = [sys.executable, str(ROOT / "examples" / "megatron_tiny.py"), "--attention", "matched", *small]
    whole = subprocess.Popen([*script, "--out", str(tmp_path / "whole")])
    job = subprocess.Popen([*script, "--out", str(tmp_path / "cut")])
    log = tmp_path / "cut" / "train.jsonl"
    try:
        # importing Megatron alone can take a minute on a busy machine
        wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2, 200)
        job.send_signal(signal.SIGINT)
        assert job.wait() in (0, 130)
        assert whole.wait() == 0
    finally:
        job.kill()
        whole.kill()
    subprocess.run([*script, "--out", str(tmp_path / "cut"), "--resume"], check=True)
    losses = [
        [json.loads(x)["loss"] for x in (tmp_path / n / "train.jsonl").read_text().splitlines()]
        for n in ("whole", "cut")
    ]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
