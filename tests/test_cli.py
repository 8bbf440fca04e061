"""The command line as a user meets it: output, exit codes, one-sentence errors, and no torch."""

import json
import re
import subprocess
import sys

import pytest
from fake_dumps import KINDS, dump_path, write_arm, write_run
from typer.testing import CliRunner

from dm_plugin import control
from dm_plugin.cli import app

runner = CliRunner()


def call(*args, code: int = 0) -> str:
    result = runner.invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), layers=3, steps=range(0, 40, 10))


def test_show_prints_each_arm_and_defines_each_column(run) -> None:
    text = call("show", run)
    for word in ("matched", "stale", "layer 2", "median over rows and heads", "4 probed steps 0-30"):
        assert word in text
    assert "reference:sm90:stale" in text


def test_show_filters_by_site_step_and_probe(run) -> None:
    rows = [
        json.loads(x)
        for x in call(
            "show", run / "stale", "--site", "layers.1.", "--step", "20", "--probe", "row_sum", "--json"
        ).splitlines()
    ]
    assert [r["site"] for r in rows] == ["decoder.layers.1.self_attention.core_attention"]
    assert rows[0]["steps"] == 1
    assert 5e-3 < rows[0]["row_sum_pre.median"] < 0.1
    assert "key_col_sum.ratio" not in rows[0]
    header, *lines = call("show", run / "matched", "--csv").splitlines()
    assert header.startswith("arm,site,steps,row_sum_pre.median")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["show", "{run}/stale", "--step", "7"], "no dump of step 7; its steps are 0, 10, 20, 30"),
        (["show", "{run}/stale", "--site", "mlp"], "no site whose name contains 'mlp'"),
        (["show", "{run}/stale", "--probe", "rows"], "'rows' is no probe; choose one of"),
        (["show", "{run}/nowhere"], "does not exist; give a dump file"),
        (["compare", "{run}", "{run}/stale"], "holds several arms"),
        (["compare", "{run}/stale", "{run}/stale", "--fail-above", "row_sum"], "must look like row_sum_pre=2"),
        (["ab", "{run}/nothing.yaml"], "No such file"),
        (["probe", "start", "{run}/nowhere"], "is not a folder"),
        (["probe", "start", "{run}", "--layers", "x"], "neither a layer number nor a range"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_two(run, args, text) -> None:
    output = call(*(a.format(run=run) for a in args), code=2)
    assert text in output.replace("\n", " ")
    assert "Traceback" not in output


def test_compare_exits_one_when_a_threshold_is_crossed(run) -> None:
    assert "no threshold crossed" in call("compare", run / "matched", run / "matched", "--fail-above", "row_sum_pre=2")
    text = call("compare", run / "matched", run / "stale", "--fail-above", "row_sum_pre=2", code=1)
    assert "crossed row_sum_pre.median at layer" in text
    assert "B / A" in call("compare", run / "matched", run / "stale")


def test_report_writes_one_page_without_any_address_outside_itself(run, tmp_path) -> None:
    page = tmp_path / "sub" / "page.html"
    assert "4 arms" in call("report", run, "-o", page)
    text = page.read_text()
    assert not re.search(r"(?:src|href)=[\"'](?:https?:)?//", text)
    assert "@import" not in text
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])
    assert [a["name"] for a in data["arms"]] == ["bf16", "matched", "stale", "stock"]
    stale = next(a for a in data["arms"] if a["name"] == "stale")
    assert len(stale["series"]["row_sum_pre.median"]) == 3
    assert stale["verdicts"][0]["level"] == "bad"


def test_one_bad_file_is_left_out_loudly(tmp_path) -> None:
    run = write_run(tmp_path, ("matched",))
    path = dump_path(run / "matched" / "dumps", 10)
    path.write_bytes(path.read_bytes()[:-50])
    page = tmp_path / "page.html"
    text = call("report", run, "-o", page, code=2)
    assert "is truncated" in text
    assert "1 input left out" in page.read_text()
    call("report", run, "-o", page, "--skip-bad")
    call("show", run, code=2)


def test_an_unwritable_page_is_a_sentence(run, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in call("report", run, "-o", tmp_path / "file" / "page.html", code=2)


def test_probe_requests_reach_the_job_folder_and_status_shows_them(tmp_path) -> None:
    text = call("probe", "start", tmp_path, "--steps", 5, "--layers", "1-2", "--probes", "row_sum,key_col_sum")
    assert "asked the job" in text
    request, _ = control.status(tmp_path)
    assert (request["steps"], request["layers"], request["probes"]) == (5, "1-2", ["key_col_sum", "row_sum"])
    assert "no rank has reported" in call("probe", "status", tmp_path)
    control.Watcher(tmp_path, 3).report(8, "probing", 2, 1)
    assert "probing" in call("probe", "status", tmp_path)
    call("probe", "stop", tmp_path)
    assert control.status(tmp_path)[0]["action"] == "stop"


def test_doctor_says_what_runs_and_why_not() -> None:
    findings = {f["what"]: f for f in json.loads(call("doctor", "--json"))}
    assert findings["CPU tensors"]["found"] == "reference"
    assert findings["numpy"]["ok"] is True
    assert findings["transformer-engine"]["remark"].startswith("optional")
    assert "dm_plugin" in call("doctor")


def test_reviewing_needs_no_torch(run, tmp_path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing it now fails
        "from dm_plugin.cli import app\n"
        f"app(['report', {str(run)!r}, '-o', {str(tmp_path / 'p.html')!r}])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "p.html").exists()


def test_the_worst_layer_of_a_planted_fault_leads_the_page(tmp_path) -> None:
    write_arm(tmp_path, "matched", layers=24, layer_kind=lambda i: KINDS["stale" if i == 17 else "matched"])
    page = tmp_path / "page.html"
    call("report", tmp_path / "matched", "-o", page)
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)[1])
    (arm,) = data["arms"]
    assert arm["names"][arm["verdicts"][0]["site"]] == "layer 17"


def test_without_the_review_extra_the_entry_point_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from dm_plugin.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "dm-plugin needs typer, which is not installed; run pip install 'dm-plugin[review]'"
