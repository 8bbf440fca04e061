"""Each example's claim, at a size that runs in seconds."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import recall  # noqa: E402
import row_error  # noqa: E402
import toy_rowsum  # noqa: E402
import toy_train  # noqa: E402
import worked_row as worked_example  # noqa: E402

from dm_plugin.review.worked_row import MODES, PRESETS, Choice, compare_modes, make_row, preset_row, round_to, work  # noqa: E402


def test_the_row_sum_is_exactly_its_named_roundings() -> None:
    for seed in range(40):
        for mode, r in compare_modes(make_row(seed), Choice()).items():
            assert abs(r.round_off) < 3e-6 * (r.abs_sum + abs(r.delta)), mode
    exact = Choice("stale", "none", "none", "none", "none")
    r = work(make_row(3), exact)
    assert r.probability == pytest.approx(0, abs=1e-6)  # P itself is kept in FP32
    assert r.gradient == r.storage == 0


def test_the_split_is_an_identity_in_fp64_at_1e_10() -> None:
    rng = np.random.default_rng(0)
    for seed in range(50):
        row = make_row(seed)
        p = np.exp(row.logits - row.logits.max())
        p /= p.sum()
        p_hat, do_hat = p + rng.normal(0, 0.01, 8), row.do + rng.normal(0, 0.05, 16)
        stale = (p * (row.v @ do_hat - row.do @ (p_hat @ row.v))).sum()
        split = do_hat @ ((p - p_hat) @ row.v) + (do_hat - row.do) @ (p_hat @ row.v)
        assert abs(stale - split) < 1e-10


def test_presets_are_what_their_notes_say() -> None:
    ratio = {p.key: abs(r.probability / r.gradient) for p in PRESETS for r in [work(preset_row(p.key), Choice())]}
    assert ratio["typical"] == pytest.approx(1.33, rel=0.01)
    assert ratio["lopsided"] == pytest.approx(71, rel=0.01)
    assert work(preset_row("sharp"), Choice()).p.max() > 0.8
    centred = work(preset_row("offset"), Choice(center_v=True)).ratio
    assert centred < work(preset_row("offset"), Choice()).ratio / 3
    survey = worked_example.survey(800)
    assert 0.005 < survey["share_lopsided"] < 0.04


def test_python_rounding_of_the_row_equals_torch() -> None:
    x = np.random.default_rng(0).normal(0, 30, 1000)
    for fmt, dtype in (("e4m3", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
        want = torch.tensor(x, dtype=torch.float64).to(dtype).double().numpy()
        np.testing.assert_array_equal(round_to(x, fmt), want)
    assert set(MODES) == {"stale", "consistent", "matched"}


def test_toy_rowsum_reproduces_the_published_sweep_at_one_seed() -> None:
    for spread, i in ((1.0, 0), (4.0, 2)):
        got = {m: toy_rowsum.measure(toy_rowsum.inputs(0, spread), "paper", m) for m in MODES}
        table = {k: v[0][i] for k, v in toy_rowsum.PUBLISHED.items()}
        assert got["stale"]["pre"] == pytest.approx(table["stale, before the cast"], rel=0.2)
        assert got["consistent"]["pre"] == pytest.approx(table["consistent, before the cast"], rel=0.2)
        assert got["matched"]["pre"] <= 1e-7
        assert got["matched"]["post"] == pytest.approx(table["matched, after the cast"], rel=0.2)
        assert got["matched"]["dq"] == pytest.approx(table["dQ error, matched"], rel=0.1)


@pytest.mark.parametrize("kind", toy_rowsum.INPUTS)
def test_matched_holds_on_inputs_that_gaussian_ones_hide(kind) -> None:
    x = toy_rowsum.inputs(1, 2.0, kind)
    stale, matched = (toy_rowsum.measure(x, "sm90", m) for m in ("stale", "matched"))
    assert matched["pre"] < 1e-6
    assert stale["pre"] > 1e-3
    assert matched["dq"] <= stale["dq"] * 1.01


def test_row_errors_by_bucket_follow_the_published_table() -> None:
    x = toy_rowsum.inputs(0, 8.0)
    for mode in MODES:
        before, after, top = row_error.row_errors(x, mode)
        bucket = torch.bucketize(top, row_error.EDGES.double(), right=True)
        for b in (0, 2, 4):
            ours = float(before[bucket == b].median())
            there = row_error.PUBLISHED["before"][mode][b]
            if mode == "matched":
                assert ours < 2 * there
            else:
                assert there / 2 < ours < there * 2
        assert float(after[bucket == 4].median()) == pytest.approx(row_error.PUBLISHED["after"][mode][4], rel=0.6)


def test_the_recall_offset_is_nothing_in_exact_arithmetic() -> None:
    gen = torch.Generator().manual_seed(0)
    anchor, keys, values, asked, labels = recall.draw(gen, plain=False)
    assert (asked[:, 1::2] == recall.KEYS).all()
    assert all(len(set(row.tolist())) == recall.PAIRS for row in keys)
    plain = [int(values[0][(keys[0] == k).nonzero()[0, 0]]) for k in asked[0, ::2]]
    assert labels[0, ::2].tolist() == plain
    named = (labels[:, 1::2] == anchor[:, None]).float().mean()
    assert 0.4 < named < 0.65  # half are random
    models = []
    for off in (0.0, 16.0):
        torch.manual_seed(0)
        models.append(recall.Recall(off, 0).double())
    x = models[0].embed(anchor, keys, values, asked)
    outs = [m(x, recall.ARMS["exact"]) for m in models]
    assert (outs[0] - outs[1]).abs().max() < 1e-9


def test_a_short_recall_run_learns_or_fails_by_the_delta() -> None:
    runs = {arm: recall.train(recall.Job(arm, 0, 16.0, False, 250)) for arm in ("stock", "stock-matched")}
    assert runs["stock-matched"]["tail"] < 1.0
    assert runs["stock"]["tail"] > 2.5
    assert runs["stock"]["max_logit"] > 2 * runs["stock-matched"]["max_logit"]
    assert math.isclose(math.log(recall.SYMBOLS), 3.47, abs_tol=0.01)


def test_toy_train_gives_the_same_start_to_every_variant_and_records_its_residual() -> None:
    data = toy_train.text_bytes(None)
    runs = {v: toy_train.train(v, 0, 4, data) for v in ("exact", "stale", "matched")}
    assert runs["exact"]["residual"] is None
    assert runs["matched"]["residual"] < 1e-6
    assert runs["stale"]["residual"] > 1e-4
    assert abs(runs["matched"]["tail"] - runs["exact"]["tail"]) < 0.02


def test_results_are_saved_with_what_is_needed_to_run_them_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["worked_row.py", "--row", "sharp", "--json", str(tmp_path / "r.json")])
    worked_example.main()
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["backend"] == "CPU simulation (reference)"
    assert {"torch", "numpy", "python", "dm_plugin"} <= record["versions"].keys()
    assert record["row"] == "sharp"


def test_the_gpu_examples_optimizer_resumes_bit_by_bit_while_its_rate_changes(tmp_path: Path) -> None:
    import copy

    from megatron_te import Masters

    def run(model: torch.nn.Module, optimizer: Masters, steps: range) -> None:
        for step in steps:
            gen = torch.Generator().manual_seed(step)
            x = torch.randn(8, 4, generator=gen).bfloat16()
            model.zero_grad(set_to_none=True)
            model(x).float().square().mean().backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
            optimizer.step()

    torch.manual_seed(0)
    first = torch.nn.Linear(4, 4).bfloat16()
    optimizer = Masters(first, 0.01)
    run(first, optimizer, range(3))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    saved = torch.load(tmp_path / "half.pt")
    second = copy.deepcopy(first)
    resumed = Masters(second, 0.01)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    run(first, optimizer, range(3, 7))
    run(second, resumed, range(3, 7))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
