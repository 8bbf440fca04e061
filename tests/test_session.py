"""ProbeSession: nothing when off, exact sums when on, nothing left behind; and the field cases of hooks (A02, A08, A16)."""

import gc
import json
import logging
import weakref

import numpy as np
import pytest
import torch
from tiny_model import Model, OtherCore, OurCore, train
from torch import nn

from dm_plugin import control
from dm_plugin.config import ProbeConfig
from dm_plugin.dump import find_dumps, read_file
from dm_plugin.recorder import Recorder
from dm_plugin.session import ProbeSession, scalars

RECOMPUTE = ["none", "selective", "selective non-reentrant", "full", "full non-reentrant"]


def session_for(model: nn.Module, out, freq: int = 1, **options) -> ProbeSession:
    return ProbeSession(ProbeConfig.default(freq=freq), out, **options).attach(model)


def dumps_of(out) -> list[tuple[dict, dict]]:
    return [read_file(f.path) for f in find_dumps(out)]


def hooks(model: nn.Module) -> int:
    count = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
    return count + sum(getattr(m, "tap", None) is not None for m in model.modules())


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


@pytest.mark.parametrize("core", [OurCore, OtherCore])
def test_A02_recompute_counts_once_and_changes_no_recorded_bit(core, tmp_path) -> None:
    """4 layers x 3 microbatches: 12 records a step whatever is recomputed, values bitwise equal in all five runs."""
    runs = []
    for kind in RECOMPUTE:
        model = Model(layers=4, core=core)
        with session_for(model, tmp_path / kind) as session:
            train(model, session, steps=1, microbatches=3, recompute=kind)
        ((_, arrays),) = dumps_of(tmp_path / kind)
        counts = {k: int(x) for k, x in arrays.items() if k.endswith("records.count")}
        assert list(counts.values()) == [3] * 4, kind
        runs.append(arrays)
    for other in runs[1:]:
        assert other.keys() == runs[0].keys()
        for key, x in runs[0].items():
            np.testing.assert_array_equal(other[key], x, err_msg=key)


def test_A08_zero_centred_and_plain_gains_give_the_same_share_and_all_zero_is_one_over_d(tmp_path) -> None:
    from dm_plugin.residuals import gain_share

    w = torch.zeros(128)
    w[7] = 1.0
    plain, centred = Model(width=512, heads=4), Model(width=512, heads=4, zero_centered=True)
    for model, value in ((plain, 1 + w), (centred, w)):
        for layer in model.decoder.layers:
            layer.self_attention.q_layernorm.weight.data.copy_(value)
            layer.self_attention.k_layernorm.weight.data.copy_(value)
    shares = []
    for model in (plain, centred):
        site = ProbeSession(ProbeConfig(), None, control=False).attach(model).sites[0]
        shares.append(gain_share(*site.gains()).item())
    assert shares[0] == shares[1] == pytest.approx(16 / 143, abs=1e-6)
    for layer in centred.decoder.layers:
        layer.self_attention.q_layernorm.weight.data.zero_()
        layer.self_attention.k_layernorm.weight.data.zero_()
    site = ProbeSession(ProbeConfig(), None, control=False).attach(centred).sites[0]
    assert gain_share(*site.gains()).item() == 1 / 128
    assert gain_share(torch.zeros(8), torch.zeros(8)).item() == 0.0


def test_A16_two_hundred_probed_steps_hold_no_more_memory_than_ten(tmp_path) -> None:
    model = Model(layers=2)
    with session_for(model, tmp_path, freq=10) as session:
        alive = []
        for rounds in (10, 190):
            train(model, session, steps=rounds, tokens=8)
            model.zero_grad(set_to_none=True)
            gc.collect()
            alive.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
        assert alive[1] <= alive[0]
    x = torch.randn(8, 2, 32, requires_grad=True)
    session = session_for(model, tmp_path / "b")
    session.begin(0)
    y = model(x)
    ctx = weakref.ref(find_node(y.grad_fn, "_ReferenceBackward"))
    y.sum().backward()
    session.step(0)
    del y
    gc.collect()
    assert ctx() is None
    session.close()


def find_node(node, name: str):
    """The first autograd node of that type below `node`."""
    stack = [node]
    while stack:
        node = stack.pop()
        if type(node).__name__ == name:
            return node
        stack += [n for n, _ in node.next_functions if n is not None]
    raise AssertionError(f"no {name}")


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


def test_a_failing_probe_is_a_warning_and_training_goes_on(tmp_path, caplog, monkeypatch) -> None:
    plain = train(Model())
    monkeypatch.setattr(Recorder, "add", lambda *a: 1 / 0)
    model = Model()
    with session_for(model, tmp_path) as session, caplog.at_level(logging.WARNING, logger="dm_plugin"):
        assert train(model, session) == plain
    assert "training goes on" in caplog.text


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


def test_an_idle_step_costs_less_than_50_microseconds(tmp_path) -> None:
    import time

    session = session_for(Model(layers=2), tmp_path, freq=10**9)
    session.begin(1)
    times = []
    for step in range(2, 402):
        start = time.perf_counter()
        session.begin(step)
        session.step(step)
        times.append(time.perf_counter() - start)
    session.close()
    assert sorted(times)[200] < 50e-6
