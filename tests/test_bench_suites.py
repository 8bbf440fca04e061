"""The benchmark's goals are held against the right arm, and an absent peer is said, not passed over."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from _suites import GOALS, HEADLINE, SUITES, standing
from bench_attention import Shape

OURS = {"dm.fwd": 4.0, "dm.bwd_matched": 10.0, "dm.bwd_stale": 8.5, "dm.fwd_bwd_matched": 14.0}


def test_best_bf16_is_the_fastest_arm_that_ran():
    ms = {**OURS, "cudnn_bf16.fwd": 6.0, "fa4.fwd": 5.2, "cudnn_bf16.bwd": 10.2, "fa4.bwd": 11.0}
    ms |= {"cudnn_bf16.fwd_bwd": 16.0, "te_fp8.fwd_bwd": 28.0}
    rows = {(s.goal.kind, s.goal.peer): s for s in standing(HEADLINE[0], ms)}
    assert rows["fwd", "bf16"].arm == "fa4.fwd"
    assert rows["fwd", "bf16"].speed == pytest.approx(1.3)
    assert rows["bwd", "bf16"].arm == "cudnn_bf16.bwd"
    assert rows["bwd", "bf16"].text.endswith("speed 1.02  MISSED")
    assert rows["fwd_bwd", "te_fp8"].text.endswith("speed 2.00  met")
    assert rows["bwd", "dm_stale"].speed == pytest.approx(0.85)


def test_an_absent_peer_is_neither_met_nor_missed():
    (row,) = [s for s in standing(HEADLINE[0], {**OURS, "cudnn_bf16.fwd": 6.0}) if s.goal.peer == "te_fp8"]
    assert (row.arm, row.speed) == (None, None)
    assert "te_fp8 did not run" in row.text
    assert "met" not in row.text


def test_every_headline_shape_has_a_goal():
    assert {goal.shape for goal in GOALS} == set(HEADLINE)
    assert standing("1,8,8,128,512", OURS) == []
    assert len(set(SUITES["growth"])) == len(SUITES["growth"])


@pytest.mark.parametrize("text", [shape for shapes in SUITES.values() for shape in shapes] + ["1,8,8,64,512,full"])
def test_a_shape_is_named_as_it_was_written(text):
    """Goals find their shape by its name: another spelling would drop them without a word."""
    assert Shape.parse(text).text == text
