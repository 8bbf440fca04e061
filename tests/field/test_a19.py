"""A19: probes and torch.compile in either order; a probed step leaves the graph, the steps between stay in it."""

import logging
from pathlib import Path

import pytest
import torch

from dm_plugin import ProbeConfig, ProbeSession
from dm_plugin.review.collect import collect
from dm_plugin.review.measure import MEASURES
from dm_plugin.review.runs import discover

pytestmark = pytest.mark.megatron


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from megatron_jobs import core_attention

        self.core_attention = core_attention()
        self.layer_number = 1

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return self.core_attention(*qkv, None)


def operands() -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(64, 2, heads, 16, generator=gen).requires_grad_() for heads in (4, 2, 2)]


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_A19_records_appear_on_every_probed_step_and_the_values_do_not_change(tmp_path: Path, first: str) -> None:
    pytest.importorskip("megatron.core")
    torch._dynamo.reset()
    model, qkv = Layer(), operands()
    expected = model(*qkv)
    session = ProbeSession(ProbeConfig.default(freq=2), tmp_path, control=False)
    if first == "attach":
        session.attach(model)
    compiled = torch.compile(model, backend="eager")
    if first == "compile":
        compiled(*qkv).sum().backward()
        session.attach(model)
    for step in range(5):
        session.begin(step)
        o = compiled(*qkv)
        assert torch.equal(o, expected)
        o.sum().backward()
        session.step(step)
    session.close()
    (arm,) = discover([tmp_path], [])
    data = collect(arm, [MEASURES["row_sum_pre.median"]])
    assert [f.step for f in arm.files] == data.first == [0, 2, 4]
    assert (data.values["row_sum_pre.median"] < 1e-6).all()


def test_A19_fullgraph_says_that_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    from dm_plugin import graphs

    torch._dynamo.reset()

    def call(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if graphs.must_stay() else x

    with caplog.at_level(logging.WARNING, "dm_plugin"):
        assert torch.compile(call, backend="eager")(torch.zeros(1)).item() == 0
        assert not caplog.records
        torch._dynamo.reset()
        assert torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1
    assert "fullgraph=True hands out no row statistics" in caplog.text
