"""Our attention inside the real Transformer Engine, on a machine without a GPU (te_jobs.py)."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.te
Job = Callable[..., Any]


def test_every_layout_and_mask_is_dm_attn_func_bit_by_bit(te_job: Job) -> None:
    assert te_job("layouts")["same"] == dict.fromkeys(
        [
            *(
                f"{layout} {mask}"
                for layout in ("sbhd", "bshd")
                for mask in ("causal", "no_mask", "causal_bottom_right")
            ),
            "packed views",
        ],
        True,
    )


def test_return_max_logit_gives_the_largest_scaled_logit_of_each_head(te_job: Job) -> None:
    assert te_job("layouts")["max_logit_error"] < 0.2  # logits of about 4 from E4M3 operands


def test_install_adopts_built_models_changes_settings_and_goes_away_again(te_job: Job) -> None:
    r = te_job("life")
    assert not r["before"]
    assert "NVTE_PLUGIN" in r["inactive"]
    assert "RuntimeError" in r["inactive"]
    assert r["adopted"] == "te:dm_plugin:stale"
    assert r["again"] == "matched"
    assert "no te.DotProductAttention" in r["no attention"]
    assert "mode='fresh'" in r["mode"]
    assert r["after"]["installed"] is None
    assert not r["after"]["active"]
    assert r["class after"] == "FlashAttention"


def test_TEs_own_plugin_hook_brings_ours_and_lets_it_go(te_job: Job) -> None:
    from te_jobs import PLUGIN

    r = te_job("nvte_plugin", {"NVTE_PLUGIN": PLUGIN})
    if r["status"]["installed"] != "NVTE_PLUGIN":
        pytest.skip("needs Transformer Engine 2.20")
    assert r["status"]["active"]
    assert r["backend"] == "te:dm_plugin:matched"
    assert not r["after"]
    assert "Transformer Engine asks dm_plugin for attention (NVTE_PLUGIN); mode matched" in r["said"]
    assert "plugin loading failed" not in r["said"]


def test_the_mode_comes_from_the_environment_too(te_job: Job) -> None:
    from te_jobs import PLUGIN

    r = te_job("nvte_plugin", {"NVTE_PLUGIN": PLUGIN, "DM_PLUGIN_MODE": "consistent"})
    assert r["backend"] == "te:dm_plugin:consistent"


def test_one_yaml_serves_TEs_debug_features_and_our_probes(te_job: Job) -> None:
    pytest.importorskip("nvdlfw_inspect", reason="needs nvdlfw-inspect")
    r = te_job("inspect")
    assert r["dumps"] == ["iter_0000000", "iter_0000002"]
    steps = {tag.rpartition("@")[2] for tag in r["tags"] if "row_sum_pre" in tag}
    assert steps == {"0", "1", "2"}


def test_context_parallel_shards_give_the_whole_sequences_attention(te_job: Job) -> None:
    r = te_job("context")
    for rank in ("rank 0", "rank 1"):
        assert r[rank]["backend"] == "te:dm_plugin:matched"
        for kind, x in r[rank]["found"].items():
            assert x["same"], kind  # O to the bit: keys are gathered, so their codes are those of one device
            assert x["errors"][0] < 1e-6, kind  # dQ too
            assert max(x["errors"][1:]) < 5e-3, kind  # dK, dV are added up in BF16 over the ranks


@pytest.mark.megatron
def test_probes_through_the_plugin_record_rows_and_change_nothing(te_job: Job) -> None:
    r = te_job("megatron")
    assert r["probed same"]
    assert r["backend"] == "reference:sm90:matched"
    assert r["sites"] == [f"decoder.layers.{i}.self_attention.core_attention" for i in range(2)]
    assert 0 < r["row_sum"] < 1e-6


@pytest.mark.megatron
def test_plugin_and_spec_give_the_same_loss(te_job: Job) -> None:
    spec, plugged = te_job("megatron")["losses"]
    assert spec == plugged
