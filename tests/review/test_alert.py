"""`dm-plugin alert`: the layers that are past a line, told once, with an exit code that a script can use."""

from pathlib import Path

import pytest
from fake_dumps import KINDS, write_arm
from typer.testing import CliRunner

from dm_plugin.cli import app


def call(*args: object, code: int) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """24 layers, matched but for layer 17, which is stale."""
    return write_arm(
        tmp_path, "job", kind=KINDS["matched"], layers=24, layer_kind=lambda i: KINDS["stale" if i == 17 else "matched"]
    )


def test_the_one_wrong_layer_of_24_is_named_and_nothing_else(planted: Path, tmp_path: Path) -> None:
    text = call("alert", planted, "--alert-cmd", f'echo "$DM_SITE $DM_STEP $DM_MEASURE" >> {tmp_path}/told', code=1)
    assert text.count("above") == 1
    assert "layer 17 at step 30: row_sum_pre.median" in text
    assert (tmp_path / "told").read_text().split() == [
        "decoder.layers.17.self_attention.core_attention",
        "30",
        "row_sum_pre.median",
    ]


def test_a_healthy_run_is_quiet_and_a_run_without_dumps_too(tmp_path: Path) -> None:
    assert "no layer is past a line" in call("alert", write_arm(tmp_path, "matched"), code=0)
    (tmp_path / "new").mkdir()
    assert "no layer is past a line" in call("alert", tmp_path / "new", code=0)


def test_a_backend_without_row_sums_is_judged_by_its_key_columns(tmp_path: Path) -> None:
    kind = KINDS["bf16"].__class__(key=5e-2, tap=False)
    assert "key_col_sum.ratio" in call("alert", write_arm(tmp_path, "stock", kind=kind, layers=1), code=1)


def test_lines_of_ones_own(planted: Path) -> None:
    assert "max_logit.max" in call("alert", planted, "--above", "max_logit=40", code=1)
    assert "no layer" in call("alert", planted, "--above", "max_logit=400", code=0)
    assert "must look like max_logit=100" in call("alert", planted, "--above", "max_logit", code=2)
    assert "'rows' is no probe" in call("alert", planted, "--above", "rows=1", code=2)
    assert "is not a folder" in call("alert", planted / "nowhere", code=2)


def test_a_failing_alert_command_is_said(planted: Path) -> None:
    assert "the alert command ended with exit code 3" in call("alert", planted, "--alert-cmd", "exit 3", code=1)
