"""What a review's numbers mean: quantiles from histograms, ratios of sums, verdicts, alignment of two runs, bad input."""

import json

import numpy as np
import pytest
from fake_dumps import KINDS, dump_path, lognormal_hist, metadata, site_name, write_arm, write_dump, write_run

from dm_plugin.dump import DumpError, NewerSchema, TruncatedDump, read_file
from dm_plugin.review.collect import collect
from dm_plugin.review.compare import compare, crossed, thresholds
from dm_plugin.review.measure import MEASURES, hist_quantile, resolve, top_gain
from dm_plugin.review.runs import discover
from dm_plugin.review.verdict import judge, verdicts


def arm_of(path):
    problems = []
    (arm,) = discover([path], problems)
    assert problems == []
    return arm


def test_quantiles_of_a_histogram_match_the_values_that_filled_it() -> None:
    rng = np.random.default_rng(0)
    values = 10 ** rng.normal(-4, 1, 20_000)
    hist = np.zeros(242, np.int64)
    np.add.at(hist, np.clip(np.floor((np.log10(values) + 10) * 20).astype(int) + 1, 0, 241), 1)
    for q in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert abs(np.log10(hist_quantile(hist, q) / np.quantile(values, q))) < 0.03


def test_the_open_ends_of_a_histogram_are_said_not_invented() -> None:
    low, high, none = np.zeros((3, 242), np.int64)
    low[0], high[241] = 5, 5
    assert hist_quantile(low, 0.5) == 1e-10
    assert hist_quantile(high, 0.5) == np.inf
    assert np.isnan(hist_quantile(none, 0.5))
    with pytest.raises(ValueError, match="last axis must be 242"):
        hist_quantile(np.zeros(10), 0.5)


def test_top_gain_matches_the_definition_and_never_divides_by_zero() -> None:
    q = np.ones((2, 128))
    q[0, 7] = 2
    q[1] = 0
    share = top_gain(q, q, 1)
    assert share[0] == pytest.approx(16 / 143)
    assert np.isnan(share[1])


def test_a_review_forms_the_medians_that_were_written(tmp_path) -> None:
    arm = arm_of(write_arm(tmp_path, "matched", layers=3))
    data = collect(arm)
    assert data.sites == [site_name(i) for i in range(3)]
    assert data.first == [0, 10, 20, 30]
    assert np.log10(data.values["row_sum_pre.median"] / KINDS["matched"].pre) == pytest.approx(0, abs=0.2)
    assert data.values["gain_share.top1"][0, 0] == pytest.approx(16 / (16 + 15))
    assert data.values["codes.q.saturated"].max() == 0


def test_ranks_are_added_and_tensor_parallel_heads_joined(tmp_path) -> None:
    site = site_name(0)
    for rank, tp in ((0, 0), (1, 1), (2, 0)):  # ranks 0 and 2 are data-parallel copies of one slice of heads
        tensors = {
            f"{site}/row_sum_pre.num": np.array([1.0, 2.0]) + 10 * tp,
            f"{site}/row_sum_pre.den": np.array([100.0, 100.0]),
        }
        tensors[f"{site}/row_sum_pre.hist"] = lognormal_hist(1e-3)
        meta = metadata(5, rank, world=json.dumps({"tp_rank": tp, "tp_size": 2}))
        write_dump(tmp_path, 5, tensors, rank=rank, meta=meta)
    data = collect(arm_of(tmp_path), [MEASURES["row_sum_pre.ratio"], MEASURES["row_sum_pre.median"]])
    np.testing.assert_array_equal(data.recent.fields["row_sum_pre.num"], [[2.0, 4.0, 11.0, 12.0]])
    np.testing.assert_array_equal(data.recent.fields["row_sum_pre.den"], [[200.0, 200.0, 100.0, 100.0]])
    assert data.recent.fields["row_sum_pre.hist"].sum() == 3 * lognormal_hist(1e-3).sum()


@pytest.mark.parametrize(
    ("pre", "post", "key", "level", "text"),
    [
        (1.4e-7, 2.7e-3, np.nan, "ok", "delta matches"),
        (1e-10, np.nan, np.nan, "ok", "less than 1e-10"),
        (2e-4, 1e-3, np.nan, "watch", "cancel only to"),
        (1.1e-2, 1.2e-2, np.nan, "bad", "delta does not match"),
        (np.nan, np.nan, 4e-4, "ok", "no row sums from this backend"),
        (np.nan, np.nan, 5e-3, "watch", "more than a cast"),
        (np.nan, np.nan, 0.2, "bad", "spurious term"),
        (np.nan, np.nan, np.nan, "blind", "nothing recorded"),
    ],
)
def test_verdicts_follow_the_documented_lines(pre, post, key, level, text) -> None:
    got, _, sentence = judge(pre, post, key)
    assert got == level
    assert text in sentence


def test_a_planted_layer_is_the_first_verdict(tmp_path) -> None:
    arm = write_arm(tmp_path, "matched", layers=24, layer_kind=lambda i: KINDS["stale" if i == 17 else "matched"])
    judged = verdicts(collect(arm_of(arm)))
    assert judged[0].site == site_name(17)
    assert judged[0].level == "bad"
    assert {v.level for v in judged[1:]} == {"ok"}


def test_compare_aligns_by_site_and_step_and_counts_what_is_missing(tmp_path) -> None:
    a = arm_of(write_arm(tmp_path, "matched", layers=4, steps=[0, 10, 20]))
    b = arm_of(write_arm(tmp_path, "stale", layers=3, steps=[10, 20, 30]))
    result = compare(a, b)
    assert result.steps == [10, 20]
    assert result.only_a == [site_name(3)]
    assert result.only_b == []
    limits = thresholds(["row_sum_pre=2", "key_col_sum.ratio=1e9"])
    found = crossed(result, limits)
    assert {line.measure.key for line, _ in found} == {"row_sum_pre.median"}
    assert found[0][0].factor > 1e4
    assert crossed(compare(a, a), limits) == []


def test_runs_without_anything_in_common_are_an_error(tmp_path) -> None:
    a, b = (arm_of(write_arm(tmp_path, n, steps=s)) for n, s in (("matched", [0]), ("stale", [7])))
    with pytest.raises(DumpError, match="no step in common"):
        compare(a, b)


@pytest.mark.parametrize("text", ["row_sum_pre", "row_sum_pre=x", "row_sum_pre=0", "rows=2"])
def test_bad_thresholds_are_named(text) -> None:
    with pytest.raises(ValueError, match="must look like|is no probe"):
        thresholds([text])


def test_probe_names_resolve_to_their_measure() -> None:
    assert resolve("row_sum") == "row_sum_pre.median"
    assert resolve("codes.q") == "codes.q.saturated"
    with pytest.raises(ValueError, match="is no probe; choose one of"):
        resolve("rowsum")


# ------------------------------------------------------------------------------------------------ bad input
def damage(tmp_path):
    """A run with one truncated, one foreign and one newer file among good ones."""
    run = write_run(tmp_path, ("matched",), steps=[0, 10, 20, 30])
    dumps = run / "matched" / "dumps"
    cut = dump_path(dumps, 10)
    cut.write_bytes(cut.read_bytes()[:-100])
    dump_path(dumps, 20).write_bytes(b"something else entirely, not a dump")
    tensors = {f"{site_name(0)}/row_sum_pre.num": np.ones(2)}
    write_dump(dumps, 40, tensors, meta=metadata(40) | {"dm_plugin.schema": "9"})
    return run


def test_bad_files_are_named_and_left_out_whole(tmp_path) -> None:
    (arm,) = discover([damage(tmp_path)], [])
    data = collect(arm)
    assert data.first == [0, 30]
    kinds = {type(p).__name__: str(p) for p in data.reader.problems}
    assert set(kinds) == {"TruncatedDump", "ForeignDump", "NewerSchema"}
    assert "is truncated" in kinds["TruncatedDump"]
    with pytest.raises((TruncatedDump, NewerSchema, DumpError)):
        collect(arm, strict=True)


def test_the_reviewer_and_read_file_agree_on_every_file(tmp_path) -> None:
    run = write_run(tmp_path, ("stale",), steps=[3])
    path = dump_path(run / "stale" / "dumps", 3)
    _, arrays = read_file(path)
    (arm,) = discover([run], [])
    data = collect(arm)
    for name, value in data.recent.fields.items():
        for i, site in enumerate(data.sites):
            np.testing.assert_array_equal(value[i], arrays[f"{site}/{name}"])


def test_a_dump_in_the_wrong_step_folder_is_left_out(tmp_path) -> None:
    write_dump(tmp_path, 7, {f"{site_name(0)}/row_sum_pre.num": np.ones(2)}, meta=metadata(8))
    data = collect(arm_of(tmp_path))
    assert data.first == []
    assert "holds step 8 but lies in the folder of step 7" in str(data.reader.problems[0])


@pytest.mark.parametrize(
    "kept", ["row_sum_pre.hist", "key_col_sum.num", "gain_share.q", "codes.q.amax", "records.count"]
)
def test_a_dump_with_few_fields_still_makes_a_page(tmp_path, kept) -> None:
    from dm_plugin.review.report import build_payload, render

    arm = write_arm(tmp_path, "matched", steps=[0])
    path = dump_path(arm / "dumps", 0)
    _, arrays = read_file(path)
    write_dump(arm / "dumps", 0, {k: v for k, v in arrays.items() if k.endswith(f"/{kept}")})
    assert "<!doctype html>" in render(build_payload([arm_of(arm)], [], title="few fields"))
