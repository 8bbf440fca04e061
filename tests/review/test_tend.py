"""merge, prune and export change nothing that a review shows of what they keep."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from fake_dumps import KINDS, metadata, site_fields, site_name, write_dump, write_run
from typer.testing import CliRunner

from dm_plugin.cli import app
from dm_plugin.dump import find_dumps, read_file
from dm_plugin.review.collect import collect
from dm_plugin.review.measure import MEASURES
from dm_plugin.review.runs import discover


def call(*args: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Two steps of TP=2, PP=2, DP=2: heads split over tp, layers over pp, batches over dp."""
    rng = np.random.default_rng(0)
    for step in (0, 5):
        for rank in range(8):
            tp, pp, dp = rank % 2, rank // 2 % 2, rank // 4
            fields = site_fields(KINDS["stale"], rng, heads=2, kv_heads=1)
            world = json.dumps({"tp_rank": tp, "tp_size": 2, "pp_rank": pp, "pp_size": 2, "dp_rank": dp, "dp_size": 2})
            meta = metadata(step, rank, world=world, reasons=json.dumps({site_name(pp): {"codes": f"rank {rank}"}}))
            write_dump(
                tmp_path / "dumps", step, {f"{site_name(pp)}/{k}": v for k, v in fields.items()}, rank=rank, meta=meta
            )
    return tmp_path / "dumps"


def review(path: Path) -> dict[str, np.ndarray]:
    (arm,) = discover([path], [])
    return collect(arm).values


def test_merged_dumps_review_like_the_files_of_all_ranks(ranks: Path, tmp_path: Path) -> None:
    assert "merged 16 files of 8 ranks into 2" in call("merge", ranks, "-o", tmp_path / "merged")
    before, after = review(ranks), review(tmp_path / "merged")
    for key in MEASURES:
        np.testing.assert_allclose(before[key], after[key], rtol=1e-12, err_msg=key)
    (file, _) = find_dumps(tmp_path / "merged")
    head, arrays = read_file(file.path)
    assert head["dm_plugin.merged"] == "8"
    assert set(json.loads(head["dm_plugin.reasons"])) == {site_name(0), site_name(1)}
    assert arrays[f"{site_name(0)}/row_sum_pre.num"].shape == (4,)  # the heads of both tensor-parallel ranks
    assert "already holds dumps" in call("merge", ranks, "-o", tmp_path / "merged", code=2)


def test_a_broken_file_stops_a_merge_instead_of_thinning_it(ranks: Path, tmp_path: Path) -> None:
    path = find_dumps(ranks)[3].path
    path.write_bytes(path.read_bytes()[:-100])
    assert "is truncated" in call("merge", ranks, "-o", tmp_path / "merged", code=2)


def test_prune_says_first_and_deletes_only_when_told(tmp_path: Path) -> None:
    run = write_run(tmp_path, ["matched"], steps=range(0, 70, 10)) / "matched" / "dumps"
    assert "would delete 4 probed steps; --yes deletes them" in call("prune", run, "--keep", 3)
    assert len(find_dumps(run)) == 7
    assert "deleted 4 probed steps" in call("prune", run, "--keep", 3, "--yes")
    assert [f.step for f in find_dumps(run)] == [0, 30, 60]
    assert not list(run.glob(".iter*"))
    assert "keeps everything" in call("prune", run, "--keep", 1, code=2)
    assert "holds no dumps" in call("prune", tmp_path / "matched", "--keep", 2, code=2)


def test_prune_always_keeps_the_last_step(tmp_path: Path) -> None:
    run = write_run(tmp_path, ["matched"], steps=range(0, 60, 10)) / "matched" / "dumps"
    call("prune", run, "--keep", 3, "--yes")
    assert [f.step for f in find_dumps(run)] == [0, 30, 50]


def test_export_writes_what_show_prints(tmp_path: Path) -> None:
    run = write_run(tmp_path, ["stale", "bf16"], layers=2, steps=(0, 10))
    assert "(8 rows)" in call("export", run, "-o", tmp_path / "all.csv")
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["arm"], r["step"]) for r in rows} == {(a, s) for a in ("stale", "bf16") for s in ("0", "10")}
    values = review(run / "stale")["row_sum_pre.median"]
    found = [float(r["row_sum_pre.median"]) for r in rows if r["arm"] == "stale"]
    np.testing.assert_allclose(found, values.ravel())
    assert all(r["row_sum_pre.median"] == "" and r["key_col_sum.ratio"] for r in rows if r["arm"] == "bf16")
    assert "must end in .csv or .parquet" in call("export", run, "-o", tmp_path / "all.xls", code=2)


def test_export_to_parquet_where_pyarrow_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, ["stale"], layers=1, steps=(0,))
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        assert "needs pyarrow" in call("export", run, "-o", tmp_path / "x.parquet", code=2)
        return
    call("export", run, "-o", tmp_path / "x.parquet", "--probe", "row_sum_pre.median")
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet").column_names == [
        "arm",
        "step",
        "site",
        "row_sum_pre.median",
    ]
