"""DMDotProductAttention alone: the core_attention contract, and the one sentence for everything that cannot be right."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from dm_plugin.integrations.megatron import add_dm_args, configured, probes_from_args, spec_from_args
from megatron.core.transformer.enums import AttnMaskType
from megatron_jobs import causal_mask, core_attention

from dm_plugin.attention import dm_attn_func

pytestmark = pytest.mark.megatron


def operands(t: int = 48, t_k: int | None = None) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    draw = lambda n, h: torch.randn(n, 2, h, 16, generator=gen).bfloat16()  # noqa: E731
    return [draw(t, 4), draw(t_k or t, 2), draw(t_k or t, 2)]


def test_nothing_of_megatron_or_torch_is_imported_before_it_is_used() -> None:
    code = "import sys, dm_plugin.integrations.megatron as m; assert 'add_dm_args' in m.__all__; print([n for n in ('torch', 'megatron') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_layout_heads_and_strides_are_megatrons() -> None:
    # value is a view of the fused projection; the output is [T, B, H * D]
    q, k, _ = operands()
    v = torch.randn(48, 2, 2, 3 * 16, generator=torch.Generator().manual_seed(4)).bfloat16()[..., 32:]
    o = core_attention()(q, k, v, None)
    b_first = [x.transpose(0, 1).contiguous() for x in (q, k, v)]
    assert torch.equal(o, dm_attn_func(*b_first).transpose(0, 1).reshape(48, 2, 64))


def test_masks_that_say_no_more_than_causal_are_accepted_and_others_refused() -> None:
    q, k, v = operands()
    core = core_attention()
    expected = core(q, k, v, None)
    assert torch.equal(core(q, k, v, causal_mask(48)), expected)
    assert torch.equal(core(q, k, v, causal_mask(48).expand(2, 1, 48, 48)), expected)
    hidden = causal_mask(48).clone()
    assert torch.equal(core(q, k, v, hidden), expected)
    hidden[..., 40:, :10] = True  # changed in place after it was found plain
    with pytest.raises(ValueError, match="attention_mask .* hides other keys than causal"):
        core(q, k, v, hidden)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"packed_seq_params": SimpleNamespace(qkv_format="thd")}, "packed_seq_params was given"),
        ({"attention_bias": torch.zeros(1, 4, 48, 48)}, "attention_bias was given"),
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type padding is not supported"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type arbitrary is not supported"),
        ({"qr": torch.zeros(48, 2, 8)}, "qr was given to the core attention"),  # an operand that would be ignored
    ],
)
def test_calls_that_cannot_be_right_are_refused(given: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        core_attention()(*operands(), None, **given)


def test_a_key_cache_under_a_causal_mask_is_refused_unless_its_end_is_stated() -> None:
    q, k, v = operands(3, 48)
    with pytest.raises(ValueError, match="causal attention of 3 queries over 48 keys"):
        core_attention()(q, k, v, None)
    o = core_attention()(q, k, v, None, attn_mask_type=AttnMaskType.causal_bottom_right)
    full = core_attention()(q[-1:], k, v, None, attn_mask_type=AttnMaskType.no_mask)
    assert torch.allclose(o[-1:].float(), full.float(), atol=0.05)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, "mask type arbitrary is not supported"),
        ({"attn_mask_type": AttnMaskType.padding_causal}, "mask type padding_causal is not supported"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one' is not supported"),
        ({"window_size": (64, 0)}, r"window_size=\(64, 0\) is not supported"),
        ({"k_channels": 24, "v_channels": 16}, "head_dim=24 for q and k but 16 for v"),
        ({"attention_type": "local"}, "attention_type='local' is not supported"),
        ({"context_parallel_size": 2}, "needs pg_collection.cp"),
    ],
)
def test_layers_that_cannot_be_right_are_refused_when_they_are_built(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=rf"dm_plugin attention, layer 0 \(from 0\): .*{text}"):
        core_attention(**changes)


def test_a_layer_that_skips_the_window_is_accepted() -> None:
    core_attention(window_size=(64, 0), window_attn_skip_freq=2, layer_number=2)
    with pytest.raises(ValueError, match=r"layer 2 \(from 0\): window_size"):
        core_attention(window_size=(64, 0), window_attn_skip_freq=2, layer_number=3)


def test_max_logits_are_kept_for_qk_clip_over_microbatches() -> None:
    core = core_attention(log_max_attention_logit=True)
    assert core_attention().keeps_max_logit is False
    q, k, v = operands()
    core(q, k, v, None)
    top = core.current_max_attn_logits
    repeated = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q.float(), repeated) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
    exact = scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    assert top.shape == (q.shape[2],)
    assert torch.allclose(top, exact, rtol=0.06, atol=0.1)
    core(2 * q, k, v, None)
    assert torch.allclose(core.current_max_attn_logits, 2 * top, rtol=0.05)
    core(q, k, v, None)
    assert torch.allclose(core.current_max_attn_logits, 2 * top, rtol=0.05)  # the largest of the step stays
    assert not core.current_max_attn_logits.requires_grad


def test_query_key_layer_scaling_changes_nothing() -> None:
    # the stock attention divides the scores by the layer number and multiplies them again inside its softmax
    scaled = core_attention(layer_number=3, apply_query_key_layer_scaling=True, fp16=True)
    assert scaled.softmax_scale == 16**-0.5


def test_unknown_modes_and_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="mode='exact' is not a delta"):
        configured("exact")
    with pytest.raises(ValueError, match="fmt"):
        configured("matched", "fp4")


# ------------------------------------------------------------------------------------------------- flags
def flags(*words: str) -> Namespace:
    args = add_dm_args(ArgumentParser()).parse_args(words)
    args.save = None
    return args


def test_flags_are_off_by_default_and_change_nothing() -> None:
    spec = object()
    assert spec_from_args(flags(), spec) is spec
    assert probes_from_args(flags(), None) is None


def test_flags_that_a_later_megatron_brings_are_not_added_twice() -> None:
    parser = ArgumentParser()
    parser.add_argument("--fp8-dot-product-attention", action="store_true")
    assert add_dm_args(parser).parse_args(["--fp8-dot-product-attention"]).fp8_dot_product_attention


def test_flags_choose_layers_and_delta() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    made = spec_from_args(flags("--use-dm-attention", "--dm-mode", "stale"), spec)
    assert made.submodules.self_attention.submodules.core_attention.dm_mode == "stale"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dm-attention-layers", "0-3"], "without --use-dm-attention"),
        (["--use-dm-attention", "--fp8-dot-product-attention"], "drop one"),
        (["--use-dm-attention", "--dm-attention-layers", "0,12"], "names layer 12 and the model has layers 0 to 11"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words: list[str], text: str) -> None:
    args = flags(*words)
    args.num_layers = 12
    with pytest.raises(ValueError, match=text):
        spec_from_args(args, SimpleNamespace())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--log-dm-probes-to-tensorboard"], "needs --dm-probes-config"),
        (["--save-dm-probes-interval", "0"], "must be 1 or more"),
        (["--save-dm-probes-interval", "5"], "give --save"),
        (["--save-dm-probes-interval", "5", "--dm-probes-config", "x.yaml"], "give one of them"),
    ],
)
def test_probe_flags_that_cannot_work_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        probes_from_args(flags(*words), None)


def test_probe_flags_attach_a_session_under_the_save_folder(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.self_attention = torch.nn.Module()
    model.self_attention.core_attention = core_attention()
    args = flags("--save-dm-probes-interval", "5")
    args.save = str(tmp_path)
    with probes_from_args(args, model) as session:
        assert session.begin(5)
        assert not session.begin(6)
        assert session.dumps is not None
