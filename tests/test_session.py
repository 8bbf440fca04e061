"""ProbeSession: nothing when off, exact sums when on, nothing left behind. Field cases of hooks: field/test_hook_cases.py."""

import gc
import json
import logging
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from probe_session import dumps_of, hooks, session_for
from tiny_model import Model, OtherCore, OurCore, train
from torch import nn

from dm_plugin import control
from dm_plugin.config import ProbeConfig
from dm_plugin.dump import find_dumps, read_file
from dm_plugin.recorder import Recorder
from dm_plugin.refusals import refusals
from dm_plugin.session import ProbeSession, process_rank, scalars

SITE = "decoder.layers.0.self_attention.core_attention"


@pytest.mark.parametrize("core", [OurCore, OtherCore])
def test_probes_on_or_off_give_bitwise_equal_losses(core, tmp_path) -> None:
    plain = train(Model(core=core))
    model = Model(core=core)
    with session_for(model, tmp_path) as session:
        assert train(model, session) == plain
    assert len(find_dumps(tmp_path)) == 3


@pytest.mark.parametrize("core", [OurCore, OtherCore])
def test_off_means_no_hook_and_detach_leaves_nothing(core, tmp_path) -> None:
    model = Model(core=core)
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    session = session_for(model, tmp_path, freq=2)
    assert hooks(model) == 0
    assert session.begin(2)
    assert hooks(model) == 2
    session.step(2)
    assert hooks(model) == 0
    assert not session.begin(3)
    assert hooks(model) == 0
    session.begin(4)
    session.detach()
    assert hooks(model) == 0
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    ref = weakref.ref(session)
    session.close()
    del session
    gc.collect()
    assert ref() is None


def test_sums_of_microbatches_are_the_sums_of_their_parts(tmp_path) -> None:
    parts = []
    for start in range(2):
        model = Model()
        session = session_for(model, tmp_path / f"{start}")
        gen = torch.Generator().manual_seed(1)
        xs = [torch.randn(24, 2, 32, generator=gen).requires_grad_() for _ in range(2)]
        session.begin(0)
        model(xs[start]).square().mean().backward()
        session.step(0)
        session.close()
        parts.append(dumps_of(tmp_path / f"{start}")[0][1])
    model = Model()
    with session_for(model, tmp_path / "both") as session:
        train(model, session, steps=1, microbatches=2)
    both = dumps_of(tmp_path / "both")[0][1]
    for key, x in both.items():
        if key.endswith((".max", ".amax")):
            np.testing.assert_array_equal(x, np.fmax(parts[0][key], parts[1][key]))
        elif "gain_share" not in key:
            np.testing.assert_allclose(x, parts[0][key] + parts[1][key], rtol=1e-12, err_msg=key)


def test_the_record_says_what_the_row_statistics_say(tmp_path) -> None:
    model = Model(layers=1)
    stats = []
    with session_for(model, tmp_path) as session:
        session.begin(0)
        core = model.decoder.layers[0].self_attention.core_attention
        inner = core.tap
        core.tap = lambda s: (stats.append(s), inner(s))
        model(torch.randn(40, 2, 32, requires_grad=True)).square().mean().backward()
        session.step(0)
    ((meta, arrays),) = dumps_of(tmp_path)
    (s,) = stats
    site = "decoder.layers.0.self_attention.core_attention"
    np.testing.assert_allclose(arrays[f"{site}/row_sum_pre.num"], s.row_sum.abs().double().sum((0, 2)), rtol=1e-12)
    assert (arrays[f"{site}/row_sum_pre.excluded"] == 2).all()  # the first token of two sequences sees one key
    assert arrays[f"{site}/row_sum_pre.hist"].sum() == arrays[f"{site}/row_sum_pre.count"].sum() == 2 * 4 * 39
    np.testing.assert_array_equal(arrays[f"{site}/row_sum_post.hist_top_p"].sum(0), arrays[f"{site}/row_sum_post.hist"])
    ratio = (s.row_sum_cast.abs() / s.row_abs_sum_cast)[..., 1:]
    hist = arrays[f"{site}/row_sum_post.hist"]
    place = np.searchsorted(np.cumsum(hist), hist.sum() / 2)
    assert abs(-10 + (place - 0.5) / 20 - ratio.median().log10().item()) < 0.06
    sharp = arrays[f"{site}/row_sum_signed.sharpened"] + arrays[f"{site}/row_sum_signed.flattened"]
    assert (sharp <= 80).all()
    assert arrays[f"{site}/key_col_sum.num"].shape == (2, 8)
    assert (arrays[f"{site}/codes.q.count"], arrays[f"{site}/codes.ds.nonfinite"]) == (40 * 2 * 4 * 8, 0)
    assert meta["dm_plugin.backend"] == "reference:sm90:matched"
    assert meta["dm_plugin.lost"] == "0"


def test_a_backend_without_a_tap_gives_its_exact_key_column_sums_and_says_why_not_the_rest(tmp_path) -> None:
    model = Model(layers=1, core=OtherCore)
    keys = []
    core = model.decoder.layers[0].self_attention.core_attention
    core.register_forward_pre_hook(lambda m, args: args[1].retain_grad() or keys.append(args[1]))
    with session_for(model, tmp_path, backend="torch:sdpa") as session:
        train(model, session, steps=1)
    ((meta, arrays),) = dumps_of(tmp_path)
    site = "decoder.layers.0.self_attention.core_attention"
    dk = keys[0].grad.double()  # [T, B, G, D]
    np.testing.assert_allclose(arrays[f"{site}/key_col_sum.num"], dk.sum(0).abs().sum(0), rtol=1e-6)
    np.testing.assert_allclose(arrays[f"{site}/key_col_sum.den"], dk.abs().sum((0, 1)), rtol=1e-6)
    assert not any("row_sum" in key for key in arrays)
    reasons = json.loads(meta["dm_plugin.reasons"])[site]
    assert "hands out no row statistics" in reasons["row_sum"]
    assert meta["dm_plugin.backend"] == "torch:sdpa"


@pytest.mark.parametrize(
    ("config", "world", "text"),
    [
        ({"softmax_type": "learnable"}, {}, "attention sinks"),
        ({"attn_logit_softcapping": 30.0}, {}, "softcapped"),
        ({}, {"cp_size": 2}, "context-parallel"),
        ({"context_parallel_size": 2}, {}, "context-parallel"),  # a session that was told nothing of the world
    ],
)
def test_a_sum_that_is_not_zero_in_exact_arithmetic_is_refused_not_reported(config, world, text, tmp_path) -> None:
    model = Model(layers=1, core=OtherCore)
    for name, value in config.items():
        setattr(model.decoder.layers[0].self_attention.config, name, value)
    with session_for(model, tmp_path, world=world) as session:
        train(model, session, steps=1)
    ((meta, arrays),) = dumps_of(tmp_path)
    assert not any("key_col_sum" in key for key in arrays)
    (reasons,) = json.loads(meta["dm_plugin.reasons"]).values()
    assert text in reasons["key_col_sum"]


def test_bad_numbers_are_counted_and_spread_into_no_sum(tmp_path) -> None:
    model = Model(layers=1)
    with session_for(model, tmp_path) as session:
        session.begin(0)
        x = torch.randn(40, 2, 32)
        x[17, 0, 3] = float("nan")
        model(x.requires_grad_()).square().sum().backward()
        session.step(0)
    ((_, arrays),) = dumps_of(tmp_path)
    for key, value in arrays.items():
        assert np.isfinite(value).all(), key
    site = "decoder.layers.0.self_attention.core_attention"
    assert arrays[f"{site}/row_sum_pre.hist"][241] > 0
    assert arrays[f"{site}/codes.q.nonfinite"] > 0


@pytest.mark.parametrize(
    ("method", "core"), [("add", OurCore), ("add_key_gradient", OtherCore), ("set_gains", OurCore)]
)
def test_a_failing_probe_is_one_warning_and_a_reason_in_the_dump(method, core, tmp_path, caplog, monkeypatch) -> None:
    plain = train(Model(core=core))
    monkeypatch.setattr(Recorder, method, lambda *a: 1 / 0)
    model = Model(core=core)
    with session_for(model, tmp_path) as session, caplog.at_level(logging.WARNING, logger="dm_plugin"):
        assert train(model, session, microbatches=2) == train(Model(core=core), microbatches=2)
        assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    assert len(plain) == len(dumps_of(tmp_path)) == 3
    reasons = json.loads(dumps_of(tmp_path)[-1][0]["dm_plugin.reasons"])[SITE]
    assert "the probe failed (division by zero)" in reasons.values()


def test_a_record_that_cannot_be_built_counts_as_lost(tmp_path, caplog, monkeypatch) -> None:
    model = Model(layers=1)
    with session_for(model, tmp_path) as session, caplog.at_level(logging.WARNING, logger="dm_plugin"):
        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "drain", lambda *a: 1 / 0)
            train(model, session, steps=2)
        train(model, session, steps=1)
    assert caplog.text.count("is lost (division by zero); training goes on") == 1
    assert dumps_of(tmp_path)[0][0]["dm_plugin.lost"] == "2"


def test_a_hook_that_cannot_be_made_is_one_warning(tmp_path, caplog) -> None:
    model = Model(layers=2, core=OtherCore)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.supports_tap = True  # but it has no `tap`
    with session_for(model, tmp_path) as session, caplog.at_level(logging.WARNING, logger="dm_plugin"):
        train(model, session, steps=2)
    assert caplog.text.count("training goes on") == 1


def backward(model: nn.Module) -> None:
    model(torch.randn(16, 2, 32, requires_grad=True)).square().mean().backward()


def test_an_abandoned_step_and_a_late_backward_are_in_no_other_record(tmp_path) -> None:
    # guards: sums of a step that an exception cut short, added to the next probed step
    model = Model(layers=1)
    with session_for(model, tmp_path) as session:
        session.begin(0)
        late = model(torch.randn(16, 2, 32, requires_grad=True)).sum()
        backward(model)  # and step(0) never comes
        session.begin(1)
        late.backward()
        backward(model)
        session.step(1)
    ((_, arrays),) = dumps_of(tmp_path)
    assert arrays[f"{SITE}/records.count"] == 1


def test_a_probe_refused_by_a_layer_is_not_recorded(tmp_path) -> None:
    model = Model(layers=1)
    model.decoder.layers[0].self_attention.core_attention.refuse_probe = {"row_sum": "a sink takes a share"}
    with session_for(model, tmp_path) as session:
        train(model, session, steps=1)
    ((meta, arrays),) = dumps_of(tmp_path)
    assert json.loads(meta["dm_plugin.reasons"]) == {SITE: {"row_sum": "a sink takes a share"}}
    assert not [key for key in arrays if "row_sum_p" in key]
    assert f"{SITE}/entropy.num" in arrays


@pytest.mark.parametrize(
    "change", [{"softmax_type": "learnable"}, {"softmax_offset": torch.zeros(4)}, {"softcap": 30.0}]
)
def test_sinks_and_softcaps_are_seen_on_the_core_attention_too(change) -> None:
    model = Model(layers=1, core=OtherCore)
    attention = model.decoder.layers[0].self_attention
    for name, value in change.items():
        setattr(attention.core_attention, name, value)
    (site,) = ProbeSession(ProbeConfig(), None, control=False).attach(model).sites
    assert "key_col_sum" in refusals(site, ["key_col_sum"], {})
    del attention.config
    attention.core_attention = OtherCore(1)
    attention.core_attention.config = SimpleNamespace(softmax_type="off-by-one")
    (site,) = ProbeSession(ProbeConfig(), None, control=False).attach(model).sites
    assert "attention sinks" in refusals(site, ["key_col_sum"], {})["key_col_sum"]


class Product(nn.Module):
    """A stand-in for attention over keys of any layout."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.qkv_format = layout

    def forward(self, query, key, value):
        return query * key


def key_record(out: Path, layout: str, shape: tuple[int, ...]) -> tuple[dict, dict]:
    parent = nn.Module()
    parent.core_attention = Product(layout)
    gen = torch.Generator().manual_seed(0)
    key, query = (torch.randn(shape, generator=gen) for _ in range(2))
    if layout.startswith("bshd"):
        key, query = key.transpose(0, 1), query.transpose(0, 1)
    with ProbeSession(ProbeConfig.default(freq=1), out).attach(parent) as session:
        session.begin(0)
        parent.core_attention(query, key.requires_grad_(), None).sum().backward()
        session.step(0)
    return dumps_of(out)[0]


def test_key_sums_run_over_tokens_in_either_layout_and_packed_keys_are_refused(tmp_path) -> None:
    sbhd = key_record(tmp_path / "s", "sbhd", (10, 3, 2, 8))[1]
    bshd = key_record(tmp_path / "b", "bshd_bshd_bshd", (10, 3, 2, 8))[1]
    assert sbhd["core_attention/key_col_sum.count"] == 3
    for key, value in sbhd.items():
        np.testing.assert_array_equal(bshd[key], value, err_msg=key)
    meta, arrays = key_record(tmp_path / "t", "thd_thd_thd", (10, 2, 8))
    assert not [key for key in arrays if "key_col_sum" in key]
    assert "are packed" in json.loads(meta["dm_plugin.reasons"])["core_attention"]["key_col_sum"]


def test_a_layer_without_a_backward_pass_and_a_field_not_given_leave_a_reason(tmp_path) -> None:
    model = Model(layers=1, core=OtherCore)
    with session_for(model, tmp_path / "none") as session:
        session.begin(0)
        with torch.no_grad():
            model(torch.randn(8, 1, 32))
        session.step(0)
    ((meta, _),) = dumps_of(tmp_path / "none")
    assert "no backward pass" in json.loads(meta["dm_plugin.reasons"])[SITE]["key_col_sum"]
    model = Model(layers=1)
    with session_for(model, tmp_path / "field") as session:
        session.begin(0)
        from test_recorder import stats

        model.decoder.layers[0].self_attention.core_attention.tap(stats(entropy=None))
        session.step(0)
    ((meta, _),) = dumps_of(tmp_path / "field")
    assert json.loads(meta["dm_plugin.reasons"])[SITE] == {"entropy": "test hands out no entropy on this rank"}


def test_a_section_that_matches_no_layer_is_said(caplog) -> None:
    text = "typo: {enabled: True, layers: {layer_name_regex_pattern: 'decoder.layer'}, dm_plugin: {DumpAttentionProbes: {enabled: True}}}"
    with caplog.at_level(logging.WARNING, logger="dm_plugin"):
        ProbeSession(ProbeConfig.from_yaml(text), None).attach(Model(layers=1))
    assert (
        f"section typo of the probe config matches no attention site; sites here are named like {SITE}" in caplog.text
    )


JOB = """
import sys
sys.path.insert(0, sys.argv[3])
import torch
from probe_session import session_for
from tiny_model import Model, train
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=int(sys.argv[2]), world_size=2)
model = Model(layers=2)
session = session_for(model, sys.argv[1])
train(model, session, steps=4)
"""


def test_a_job_without_rank_numbers_or_close_writes_every_ranks_last_dump_and_exits_cleanly(tmp_path) -> None:
    # guards: every rank writing as rank 0, of which readers keep the last; and the writer thread dying in the middle of a dump when the
    # interpreter ends (a lost record, at times an abort)
    job = [sys.executable, "-c", JOB, str(tmp_path / "dumps")]
    ranks = [subprocess.Popen([*job, str(rank), str(Path(__file__).parent)]) for rank in range(2)]
    assert [r.wait() for r in ranks] == [0, 0]
    assert [(f.step, f.rank) for f in find_dumps(tmp_path / "dumps")] == [(s, r) for s in range(4) for r in range(2)]


@pytest.mark.parametrize(("text", "want"), [("3", 3), ("", 0), ("x", 0)])
def test_before_torch_distributed_the_rank_is_that_of_the_environment(text, want, monkeypatch) -> None:
    monkeypatch.setenv("RANK", text)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert process_rank() == want
    assert ProbeSession(ProbeConfig(), None).rank == want
    assert ProbeSession(ProbeConfig(), None, rank=7).rank == 7


def test_a_request_file_starts_and_stops_probes_of_a_running_job(tmp_path) -> None:
    model = Model(layers=3)
    session = ProbeSession(ProbeConfig(), tmp_path / "dumps", control=tmp_path).attach(model)
    probed = []
    for step in range(12):
        if step == 3:
            control.send(tmp_path, "start", steps=2, layers="1-2", probes=["row_sum"])
        if step == 7:
            control.send(tmp_path, "start")
        if step == 9:
            control.send(tmp_path, "stop")
        if session.begin(step):
            probed.append((step, hooks(model)))
            model(torch.randn(8, 1, 32, requires_grad=True)).sum().backward()
        session.step(step)
        session.dumps.flush()  # a slow disk would overrun the queue of these quick steps
    session.close()
    assert probed == [(3, 2), (4, 2), (7, 3), (8, 3)]
    _, arrays = read_file(find_dumps(tmp_path / "dumps")[0].path)
    assert {k.split("/")[0].split(".")[2] for k in arrays} == {"1", "2"}
    assert {k.split("/")[1].split(".")[0] for k in arrays} == {"row_sum_pre", "row_sum_post", "records"}
    request, ranks = control.status(tmp_path)
    assert request["action"] == "stop"
    assert [r["state"] for r in ranks] == ["idle"]
    assert ranks[0]["written"] == 4


def test_scalars_go_to_any_writer_with_add_scalar_or_log(tmp_path) -> None:
    class Board:
        def __init__(self) -> None:
            self.seen: list = []

        def add_scalar(self, tag, value, step) -> None:
            self.seen.append((tag, value, step))

    class Wandb:
        def __init__(self) -> None:
            self.seen: list = []

        def log(self, values, step) -> None:
            self.seen += [(tag, value, step) for tag, value in values.items()]

    config = ProbeConfig.from_yaml(
        "a: {enabled: True, layers: {layer_types: [core_attention]}, dm_plugin: {LogAttentionResiduals: {enabled: True, probes: [row_sum], freq: 2}}}"
    )
    for writer in (Board(), Wandb()):
        model = Model(layers=1)
        with ProbeSession(config, None, writer=writer).attach(model) as session:
            train(model, session, steps=3)
        assert [s for *_, s in writer.seen] == [0, 0, 2, 2]
        values = {tag.rpartition("/")[2]: value for tag, value, _ in writer.seen}
        assert -10 < values["row_sum_pre_log10_median"] < -6
        assert -5 < values["row_sum_post_log10_median"] < -1
    assert scalars({"a/row_sum_pre.hist": np.zeros(242, np.int64)}) == {}


def test_a_model_without_attention_sites_is_refused() -> None:
    with pytest.raises(ValueError, match="no module with a core_attention"):
        ProbeSession(ProbeConfig(), None).attach(nn.Linear(2, 2))


def test_an_idle_step_of_48_layers_costs_less_than_50_microseconds(tmp_path) -> None:
    import time

    session = session_for(Model(layers=48), tmp_path, freq=10**9)
    session.begin(1)
    times = []
    for step in range(2, 402):
        start = time.perf_counter()
        session.begin(step)
        session.step(step)
        times.append(time.perf_counter() - start)
    session.close()
    assert sorted(times)[200] < 50e-6


def test_the_reason_for_the_backend_is_kept_in_every_dump(tmp_path) -> None:
    model = Model(layers=2)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.impl_reason = "asked for"
    with session_for(model, tmp_path) as session:
        train(model, session, steps=1)
    ((meta, _),) = dumps_of(tmp_path)
    assert meta["dm_plugin.impl_reason"] == "asked for"
