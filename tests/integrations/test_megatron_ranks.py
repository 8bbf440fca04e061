"""Two gloo ranks: tensor, context and pipeline parallel Megatron-Core jobs under our attention, against one process."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from megatron_jobs import STEPS, TINY, core_attention, cp_operands, dm, found, gpt, train

from dm_plugin.dump import find_dumps, read_file

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


@pytest.fixture(scope="module")
def folder(megatron_ranks: Path) -> Path:
    return megatron_ranks


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict]:
    return found(folder)


@pytest.fixture(scope="module")
def single() -> list[float]:
    torch.manual_seed(1234)
    return train(gpt(**TINY, edit_spec=dm()), STEPS)


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_losses_of_two_ranks_equal_those_of_one(ranks: list[dict], single: list[float], kind: str) -> None:
    assert ranks[0][kind]["losses"] == ranks[1][kind]["losses"]
    for a, b in zip(ranks[0][kind]["losses"], single, strict=True):
        assert abs(a - b) < 5e-3  # sums in another order turn a few FP8 codes over


def test_context_parallel_attention_is_that_of_one_device(ranks: list[dict], folder: Path) -> None:
    # the gathered keys are in natural order, so K and V codes, and with whole 128-row chunks all codes, are those of one device
    whole = core_attention()
    records: list = []
    whole.tap = records.append
    q, k, v, do = cp_operands()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = whole(*leaves, None)
    o.backward(do)
    (stats,) = records
    parts = [torch.load(folder / f"cp_{r}.pt") for r in (0, 1)]
    for part in parts:
        keep = part["keep"]
        assert torch.equal(part["o"], o[keep])
        assert torch.equal(part["grads"][0], q.grad[keep])
        for mine, truth in zip(part["grads"][1:], (k.grad, v.grad), strict=True):
            assert (mine - truth[keep]).float().norm() / truth[keep].float().norm() < 6e-3  # BF16 partial sums
        for name in ("row_sum", "row_abs_sum", "entropy"):
            assert torch.equal(part["stats"][name], getattr(stats, name)[..., keep])
    logits = torch.maximum(parts[0]["stats"]["max_logit"], parts[1]["stats"]["max_logit"])
    assert torch.equal(logits, stats.max_logit)
    counts = [p["counts"] for p in parts]
    assert {n: counts[0].get(n, 0) + counts[1].get(n, 0) for n in counts[0]} == {
        n: int(c.count) for n, c in stats.codes.items()
    }


def test_context_parallel_key_sums_are_made_of_all_ranks_and_counted_once(ranks: list[dict], folder: Path) -> None:
    # guards: sums of a part of the keys, which are far from zero, and the same sum written by every rank
    first, second = (torch.load(folder / f"cp_{r}.pt")["stats"] for r in (0, 1))
    assert second["key_col_sum"] is None
    ratio = first["key_col_sum"].abs().sum() / first["key_abs_sum"].sum()
    assert float(ratio) < 5e-3


@pytest.mark.parametrize("kind", ["pp", "vpp"])
def test_A04_a_layer_has_one_name_in_every_pipeline_split(ranks: list[dict], kind: str) -> None:
    names = sorted(ranks[0][kind] + ranks[1][kind])
    site = "decoder.layers.{}.self_attention.core_attention {}"
    assert names == [site.format(i, "ours" if i in (0, 2) else "stock") for i in range(4)]


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_A06_each_rank_writes_its_own_files_and_they_add_up(ranks: list[dict], folder: Path, kind: str) -> None:
    files = find_dumps(folder / kind)
    assert {(f.step, f.rank) for f in files} == {(1, 0), (1, 1)}
    read = [read_file(f.path) for f in files]
    worlds = [json.loads(metadata["dm_plugin.world"]) for metadata, _ in read]
    assert {w[f"{kind}_rank"] for w in worlds} == {0, 1}
    assert {w[f"{kind}_size"] for w in worlds} == {2}
    if kind == "cp":
        site = "decoder.layers.0.self_attention.core_attention/row_sum_pre"
        rows = sum(tensors[f"{site}.count"] + tensors[f"{site}.excluded"] for _, tensors in read)
        assert rows.tolist() == [4 * 64] * 4


def test_distributed_checkpoints_of_the_stock_attention_load_into_ours(ranks: list[dict]) -> None:
    for rank in ranks:
        assert rank["dist_checkpoint"] == {"equal": True, "same_keys": True, "core": []}
