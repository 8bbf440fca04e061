"""Field cases A01, A03, A05, A17 and A23 with the real Transformer Engine and Megatron-Core, on a machine without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.te
Job = Callable[..., Any]


@pytest.mark.megatron
def test_A01_recompute_keeps_the_precision_and_every_bit(te_job: Job) -> None:
    r = te_job("megatron")
    assert r["same"] == {"none": True, "core_attn": True, "full": True}
    assert set(r["modes"].values()) == {"te:dm_plugin:matched"}


WORDS = {
    "head_dim 192/128": "head_dim=192 for q and k but 128 for v",
    "dropout": "attention_dropout=0.1",
    "arbitrary mask": "attn_mask_type=arbitrary",
    "padding mask": "attn_mask_type=padding",
    "alibi": "core_attention_bias_type=alibi",
    "sliding window": "window_size=(16, 0)",
    "packed": "packed or paged sequences",
    "sinks": "softmax_type=off-by-one",
}


@pytest.mark.parametrize("case", WORDS)
def test_A03_what_cannot_run_is_one_error_that_names_the_property_and_the_way_out(te_job: Job, case: str) -> None:
    text = te_job("refusals")["strict"][case]
    assert text.startswith("ValueError: dm_plugin attention cannot run this: ")
    assert WORDS[case] in text
    assert "NVTE_FLASH_ATTN=0" in text
    assert "DM_PLUGIN_STRICT=0" in text


@pytest.mark.parametrize("case", WORDS)
def test_A03_switched_off_the_same_configuration_reaches_TEs_own_selector_and_nothing_of_ours(
    te_job: Job, case: str
) -> None:
    assert te_job("refusals")["off"][case] == {"stock": True, "ours": False}


@pytest.mark.parametrize("case", WORDS)
def test_A03_with_fall_backs_allowed_TE_decides_and_the_log_says_why(te_job: Job, case: str) -> None:
    r = te_job("refusals")
    assert r["allowed"][case] == {"stock": True, "ours": False}
    assert any("Transformer Engine's own" in line and WORDS[case] in line for line in r["lines"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("head_dim 96", "head_dim=96"),
        ("float16", "dtype float16"),
        ("sm80", "the GPU is sm_80"),
        ("sm80 at build", "layer 0 (from 0): the GPU is sm_80"),
    ],
)
def test_A03_the_kernel_names_what_it_lacks(te_job: Job, case: str, words: str) -> None:
    assert words in te_job("refusals")["kernel"][case]


@pytest.mark.megatron
def test_A05_checkpoints_load_strictly_in_every_direction(te_job: Job) -> None:
    r = te_job("megatron")
    assert set(r["loads"].values()) == {""}
    assert r["keys"]["plugged"] == r["keys"]["stock"]
    assert [k for k in r["keys"]["stock"] if k not in r["keys"]["spec"]] == [
        f"decoder.layers.{i}.self_attention.core_attention._extra_state" for i in range(2)
    ]


def test_A17_ours_runs_in_every_triple_that_allows_flash_and_the_log_says_so_in_the_others(te_job: Job) -> None:
    r = te_job("triples")
    ours = {triple for triple, x in r["triples"].items() if x["backend"] == "te:dm_plugin:matched" and not x["problem"]}
    assert ours == {"100", "101", "110", "111"}
    assert any("NVTE_FLASH_ATTN=0 asks for Transformer Engine's own backends" in line for line in r["lines"])
    assert "No dot product attention backend" in r["triples"]["000"]["problem"]


def test_A17_a_container_that_presets_the_switches_before_import_gets_what_they_say(te_job: Job) -> None:
    from te_jobs import PLUGIN

    r = te_job(
        "nvte_plugin", {"NVTE_PLUGIN": PLUGIN, "NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    )
    assert r["backend"] == "te:dm_plugin:matched"


def test_A17_importing_the_plugin_changes_no_environment_variable(te_job: Job) -> None:
    assert te_job("life")["env changed"] == []


def test_A23_alternating_configurations_never_get_each_others_decision_and_log_once(te_job: Job) -> None:
    r = te_job("selection_cache")
    assert r["same"] == [True] * 6
    assert len(r["lines"]) == len(set(r["lines"])) == 3
