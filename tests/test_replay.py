"""Replay of captured operands: right against FP64, the same from a job and from its file, and invisible to the job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import attention
from tiny_model import Model, OtherCore, OurCore

from dm_plugin import ProbeConfig, ProbeSession, control, replay
from dm_plugin.dump import DumpError, find_dumps, read_file
from dm_plugin.review.measure import MEASURES


def capture(
    tokens: int = 96, heads: int = 3, dim: int = 32, causal: bool = True, spread: float = 1.0
) -> replay.Capture:
    gen = torch.Generator().manual_seed(1)
    draw = lambda h: torch.randn(tokens, h, dim, generator=gen)  # noqa: E731
    q, k, v, do = spread * draw(heads), draw(1), draw(1) + 1.0, draw(heads)
    return replay.Capture(*(x.bfloat16() for x in (q, k, v, do)), causal, dim**-0.5)


def value(fields: dict[str, np.ndarray], key: str) -> float:
    return float(MEASURES[key].form({name: np.asarray(x)[None] for name, x in fields.items()})[0])


@pytest.mark.parametrize("causal", [True, False])
def test_exact_is_the_oracle(causal: bool) -> None:
    c = capture(causal=causal)
    truth = attention(*(x.unsqueeze(0) for x in (c.q, c.k, c.v, c.do)), 0 if causal else None)
    found = replay.exact(c)
    for mine, name in ((found.dq, "dq"), (found.dk, "dk"), (found.dv, "dv")):
        assert torch.allclose(mine, getattr(truth, name)[0].double(), rtol=1e-9, atol=1e-12)


def test_each_arm_shows_its_delta_and_its_errors() -> None:
    fields = replay.replay(capture(tokens=192, dim=64, spread=2.0))
    rows = {arm: value(fields, f"replay_{arm}.median") for arm in replay.ARMS}
    assert rows["matched"] < 1e-7
    assert 1e-4 < rows["consistent"] < rows["stale"] < rows["stock"]
    assert value(fields, "replay_matched.gap") < 1e-6
    for arm in ("stale", "consistent", "matched"):
        assert 0.03 < value(fields, f"replay_{arm}.dq") < 0.12
    assert value(fields, "replay_stock.dq") > value(fields, "replay_matched.dq")
    assert 0.0 < value(fields, "replay_stale.push_sharpened") < 1.0
    assert value(fields, "replay_stale.push_consistency") == pytest.approx(1.0)  # one step pushes one way
    both = {key: x + replay.replay(capture(tokens=100, dim=64, spread=3.0))[key] for key, x in fields.items()}
    assert 0.0 < value(both, "replay_stale.push_consistency") < 1.0


def test_the_push_is_the_key_gradient_of_the_residual_alone() -> None:
    c = capture(tokens=40)
    p = replay.exact(c).p
    eps = torch.randn(3, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    spurious_dk = torch.einsum("hij,ihc->jc", eps.unsqueeze(-1) * p, c.q.double()) * c.scale
    total, sharpened = replay.push(c, p, eps)
    assert torch.allclose(total, (spurious_dk * c.k.double()[:, 0]).sum(0))
    part, _ = replay.push(c, p, eps.clamp(max=0))
    assert torch.allclose(sharpened, part)


def test_a_sample_is_one_sequence_one_key_head_and_rotates_with_the_step() -> None:
    x = {n: torch.randn(replay.TOKENS + 10, 2, h, 8) for n, h in (("q", 16), ("k", 2), ("v", 2), ("do", 16))}
    c = replay.sample(**x, step=5, causal=True, scale=1.0)
    assert c.q.shape == (replay.TOKENS, replay.HEADS, 8)
    assert torch.equal(c.k[:, 0], x["k"][: replay.TOKENS, 0, 1].bfloat16())
    assert torch.equal(c.q[:, 0], x["q"][: replay.TOKENS, 0, 8].bfloat16())
    with pytest.raises(ValueError, match="too long to replay"):
        replay.sample(**x, step=5, causal=False, scale=1.0)


def train(model: Model, session: ProbeSession | None, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        gen = torch.Generator().manual_seed(step)
        x = torch.randn(48, 2, 32, generator=gen)
        if session is not None:
            session.begin(step)
        for half in x.split(1, dim=1):
            loss = model(half).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.step(step)
    return losses


def build(core: type) -> Model:
    torch.manual_seed(0)
    model = Model(core=core)
    for module in model.modules():
        if isinstance(module, (OtherCore, OurCore)):
            module.attn_mask_type = "causal"
    return model


@pytest.mark.parametrize("core", [OurCore, OtherCore])
def test_a_running_job_of_any_backend_can_be_replayed_and_does_not_notice(tmp_path: Path, core: type) -> None:
    plain = train(build(core), None)
    model = build(core)
    with ProbeSession(ProbeConfig(), tmp_path).attach(model) as session:
        control.send(tmp_path, "start", steps=2, layers="1", probes=["key_col_sum", "replay"])
        assert train(model, session) == plain
    (first, second) = find_dumps(tmp_path)
    _, arrays = read_file(first.path)
    site = "decoder.layers.1.self_attention.core_attention"
    fields = {key.partition("/")[2]: x for key, x in arrays.items() if "/replay_" in key}
    assert {key.partition("/")[0] for key in arrays} == {site}
    assert value(fields, "replay_matched.median") < 1e-6
    files = [f.path for f in find_dumps(tmp_path / "captures")]
    assert len(files) == 2
    metadata, captures = replay.load(files[0])
    assert metadata["dm_plugin.backend"]
    again = replay.replay(captures[site])
    assert all(np.array_equal(again[key], fields[key]) for key in again)
    assert second.step == 1
    said = subprocess.run(
        [sys.executable, "-m", "dm_plugin.cli", "replay", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [json.loads(line) for line in said.splitlines()]
    assert [(x["arm"], x["site"]) for x in lines[:4]] == [(arm, site) for arm in replay.ARMS]
    assert lines[2]["median"] < 1e-6 < lines[0]["median"]


def test_what_cannot_be_replayed_says_why_in_the_dump(tmp_path: Path) -> None:
    model = build(OtherCore)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.attn_mask_type = "arbitrary"
    with ProbeSession(ProbeConfig(), tmp_path).attach(model) as session:
        control.send(tmp_path, "start", steps=1, probes=["replay", "key_col_sum"])
        train(model, session, 1)
    metadata, arrays = read_file(find_dumps(tmp_path)[0].path)
    reasons = json.loads(metadata["dm_plugin.reasons"])
    assert all("a mask of kind arbitrary is not replayed" in r["replay"] for r in reasons.values())
    assert not [key for key in arrays if "/replay_" in key]
    with pytest.raises(DumpError, match="holds no captured operands"):
        replay.load(find_dumps(tmp_path)[0].path)


def test_a_job_that_handles_the_signal_itself_keeps_its_handler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []
    own = lambda number, frame: heard.append(number)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, own)
    try:
        with ProbeSession(ProbeConfig(), tmp_path, control=False, on_signal=signal.SIGUSR1) as session:
            session.attach(build(OurCore))
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not session.begin(0)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is own
        assert "probes do not listen to signal 10 (the job handles it itself)" in caplog.text
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_asks_for_one_probed_step(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with ProbeSession(ProbeConfig(), tmp_path, control=False, on_signal=signal.SIGUSR1).attach(
        build(OurCore)
    ) as session:
        assert not session.begin(0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert session.begin(1)
        session.step(1)
        assert not session.begin(2)
    assert signal.getsignal(signal.SIGUSR1) == before
