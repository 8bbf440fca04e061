"""Field cases of hooks and names: A02 recompute, A04 pipeline splits, A07 rows of one key, A08 zero-centred gains, A16 memory."""

import gc
import weakref

import numpy as np
import pytest
import torch
from cases import gaussian
from probe_session import dumps_of, session_for
from tiny_model import Model, OtherCore, OurCore, train
from torch import nn

from dm_plugin.attention import dm_attn_func
from dm_plugin.config import ProbeConfig
from dm_plugin.residuals import gain_share, row_sum
from dm_plugin.session import ProbeSession
from dm_plugin.sites import find_sites

RECOMPUTE = ["none", "selective", "selective non-reentrant", "full", "full non-reentrant"]
IDS = [f"decoder.layers.{i}.self_attention.core_attention" for i in range(12)]
SPLITS = {
    "PP=1": [range(1, 13)],
    "PP=4": [range(1, 4), range(4, 7), range(7, 10), range(10, 13)],
    "PP=4, last stage of 1": [range(1, 5), range(5, 9), range(9, 12), range(12, 13)],
    "PP=2 x VPP=2": [[*range(1, 4)], [*range(7, 10)], [*range(4, 7)], [*range(10, 13)]],
}


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


@pytest.mark.parametrize("split", SPLITS)
def test_A04_twelve_layers_keep_their_ids_in_every_pipeline_split(split: str) -> None:
    chunks = [Model(layers=list(numbers)) for numbers in SPLITS[split]]
    assert sorted((s.name for s in find_sites(chunks)), key=IDS.index) == IDS
    if split == "PP=2 x VPP=2":  # one rank holds two chunks
        assert [s.name for s in find_sites(chunks[:2])] == IDS[:3] + IDS[6:9]


def test_A04_a_prediction_layer_never_takes_a_decoder_id() -> None:
    model = Model(layers=12)
    mtp = Model(layers=[1]).decoder.layers[0]
    model.mtp = nn.Module()
    model.mtp.layers = nn.ModuleList([nn.Module()])
    model.mtp.layers[0].transformer_layer = mtp
    names = [s.name for s in find_sites(model)]
    assert names[:12] == IDS
    assert names[12:] == ["mtp.layers.0.transformer_layer.self_attention.core_attention"]


def test_A07_the_first_query_of_a_causal_row_is_counted_out_and_nothing_turns_into_nan() -> None:
    for t in (256, 1):
        q, k, v, do = gaussian(t, 1, d=128)
        stats = []
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = dm_attn_func(*leaves, tap=stats.append)
        o.backward(do)
        s = row_sum(stats[0].row_sum, stats[0].row_abs_sum, stats[0].top_p)
        assert s.excluded.item() == 1
        assert s.count.item() == t - 1
        assert torch.isfinite(s.num).all()
        assert s.hist.sum() == t - 1
        assert (leaves[0].grad[:, 0] == 0).all()
        if t == 1:
            assert (leaves[1].grad == 0).all()
            assert ((o - v).norm() / v.norm()) < 0.05
