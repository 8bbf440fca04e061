"""Recorder: taps wait for no device, drain moves one buffer a kind of number, and every value comes back as it went."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dm_plugin.config import PROBES
from dm_plugin.recorder import Recorder, not_given
from dm_plugin.stats import CodeStats, RowStats

WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")


def stats(device: str = "cpu", **changes) -> RowStats:
    def x(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    codes = CodeStats(x(), *[torch.ones((), dtype=torch.long, device=device) for _ in range(4)])
    rows = dict.fromkeys(
        ("row_sum", "row_abs_sum", "row_sum_cast", "row_abs_sum_cast", "delta", "top_p", "entropy"), x(2, 4, 8)
    )
    keys = {"max_logit": x(2, 4), "key_col_sum": x(2, 2, 16), "key_abs_sum": x(2, 2, 16)}
    return RowStats(**{**rows, **keys, "codes": dict.fromkeys(("q", "ds"), codes), "backend": "test", **changes})


def record_twice(device: str) -> Recorder:
    recorder, s, dk = Recorder(), stats(device), torch.ones(8, 2, 2, 16, device=device)
    for _ in range(2):
        recorder.add("a", s, PROBES)
        recorder.add_key_gradient("b", dk)
    return recorder


def test_a_tap_reads_no_value_back_and_builds_no_tensor_from_host_data(monkeypatch) -> None:
    def never(*args, **kwargs):
        raise AssertionError("a tap made the host wait for the device")

    with monkeypatch.context() as patch:
        for name in WAITS:
            patch.setattr(Tensor, name, never)
        for name in ("tensor", "as_tensor", "from_numpy"):  # on a GPU these are copies that block
            patch.setattr(torch, name, never)
        record_twice("cpu")


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch cannot make fake CUDA tensors")
def test_on_a_gpu_no_operation_of_a_tap_crosses_to_the_host() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Spy(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
            copies = func.overloadpacket.__name__ in ("_to_copy", "copy_")
            if (copies and len(devices) > 1) or func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
                self.seen.append(str(func))
            return out

    with FakeTensorMode(allow_non_fake_inputs=True), Spy() as spy:
        record_twice("cuda")
    assert spy.seen == []


def test_drain_moves_one_buffer_a_kind_of_number_and_starts_afresh(monkeypatch) -> None:
    from dm_plugin import recorder as module

    moved = []
    real = module.to_numpy
    monkeypatch.setattr(module, "to_numpy", lambda x: moved.append(x.dtype) or real(x))
    recorder = record_twice("cpu")
    record = recorder.drain()
    assert sorted(map(str, moved)) == ["torch.float64", "torch.int64"]
    assert recorder.drain() == {}
    assert (record["a/records.count"], record["b/records.count"], record["a/row_sum_pre.num"][0]) == (2, 2, 32.0)
    assert record["a/max_logit.max"].tolist() == [1.0] * 4


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcdefg"),
        st.tuples(
            st.lists(st.integers(0, 3), max_size=3), st.sampled_from([torch.float64, torch.int64, torch.float32])
        ),
        max_size=7,
    )
)
def test_every_shape_and_kind_comes_back_under_its_key(shapes) -> None:
    gen = torch.Generator().manual_seed(0)
    fields = {f"p.{k}": (torch.rand(shape, generator=gen) * 99).to(dtype) for k, (shape, dtype) in shapes.items()}
    recorder = Recorder()
    recorder._merge("s", fields)
    record = recorder.drain()
    assert list(record) == [f"s/{name}" for name in fields]
    for name, x in fields.items():
        assert record[f"s/{name}"].shape == tuple(x.shape)
        np.testing.assert_array_equal(record[f"s/{name}"], x.numpy())


def test_a_field_left_out_by_a_backend_is_named_not_guessed() -> None:
    s = stats(entropy=None, key_abs_sum=None, delta=None)
    want = {"entropy": "entropy", "key_col_sum": "key_abs_sum", "delta_gap": "delta"}
    assert not_given(s, PROBES) == want
    recorder = Recorder()
    recorder.add("a", s, PROBES)
    assert not {key.split("/")[1].split(".")[0] for key in recorder.drain()} & set(want)
