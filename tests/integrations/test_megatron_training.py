"""A real Megatron-Core GPT on the CPU under our core attention: recompute, probes, checkpoints, choice of layers."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'dm-plugin[megatron]'")
from dm_plugin.integrations.megatron import (
    DMDotProductAttention,
    add_dm_args,
    attach_probes,
    spec_from_args,
    with_dm_attention,
)
from megatron_jobs import TINY, causal_mask, dm, gpt, train

from dm_plugin.config import ProbeConfig
from dm_plugin.dump import find_dumps, read_file

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


def tiny(**options):
    torch.manual_seed(1234)
    return gpt(**TINY | options)


def cores(model) -> list[torch.nn.Module]:
    return [layer.self_attention.core_attention for layer in model.decoder.layers]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """Losses under our matched attention, without recompute or probes."""
    return train(tiny(edit_spec=dm()))


def test_ours_learns_like_the_stock_attention(plain: list[float]) -> None:
    # guards a wrong layout, scale or head order: each leaves a loss that drifts away from the first step on
    stock = train(tiny(), mask=causal_mask(64))
    assert plain[-1] < plain[0] - 0.3
    assert all(abs(a - b) < 0.02 for a, b in zip(plain, stock, strict=True))


@pytest.mark.parametrize("mode", ["stale", "consistent"])
def test_every_delta_trains_and_is_its_own(plain: list[float], mode: str) -> None:
    other = train(tiny(edit_spec=dm(mode)))
    assert other[0] == plain[0]  # the delta is a matter of the backward pass
    assert other[-1] != plain[-1]
    assert abs(other[-1] - plain[-1]) < 0.05


@pytest.mark.parametrize("recompute", ["core_attn", "full"])
def test_recompute_changes_no_bit_and_records_once(plain: list[float], recompute: str, tmp_path: Path) -> None:
    # guards: a second forward in another precision, and hooks that count the recomputed forward again
    model = tiny(recompute=recompute, edit_spec=dm())
    with attach_probes(model, ProbeConfig.default(freq=1), tmp_path, control=False) as session:
        assert train(model, session=session) == plain
    files = find_dumps(tmp_path)
    assert [f.step for f in files] == [0, 1, 2, 3]
    for file in files:
        _, tensors = read_file(file.path)
        counts = {key: int(x) for key, x in tensors.items() if key.endswith("records.count")}
        assert list(counts.values()) == [1, 1]


def test_probes_change_no_bit_and_leave_nothing_behind(plain: list[float], tmp_path: Path) -> None:
    with_probes, without = tiny(edit_spec=dm()), tiny(edit_spec=dm())
    before = set(vars(cores(with_probes)[0]))
    with attach_probes(with_probes, ProbeConfig.default(freq=2), tmp_path, control=False) as session:
        assert train(with_probes, session=session) == plain
    train(without)
    for a, b in zip(with_probes.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)
    assert set(vars(cores(with_probes)[0])) == before
    assert all(core.tap is None for core in cores(with_probes))
    metadata, tensors = read_file(find_dumps(tmp_path)[-1].path)
    assert metadata["dm_plugin.backend"] == "reference:sm90:matched"
    assert json.loads(metadata["dm_plugin.model"])["kv_heads"] == 2
    assert json.loads(metadata["dm_plugin.world"])["tp_size"] == 1
    assert "decoder.layers.1.self_attention.core_attention/row_sum_pre.hist" in tensors


def test_probes_of_the_stock_attention_see_its_key_gradient_alone(tmp_path: Path) -> None:
    model = tiny()
    with attach_probes(model, ProbeConfig.default(freq=1), tmp_path, backend="stock", control=False) as session:
        probed = train(model, 2, session=session, mask=causal_mask(64))
    assert probed == train(tiny(), 2, mask=causal_mask(64))
    metadata, tensors = read_file(find_dumps(tmp_path)[0].path)
    site = "decoder.layers.0.self_attention.core_attention"
    assert tensors[f"{site}/key_col_sum.num"].shape == (2, 16)
    assert not [key for key in tensors if "row_sum" in key]
    assert "DotProductAttention" in json.loads(metadata["dm_plugin.reasons"])[site]["row_sum"]


def test_checkpoints_load_strictly_both_ways_and_after_transformer_engine() -> None:
    # guards: parameters or buffers of our own, and the _extra_state key of Transformer Engine's attention
    stock, ours = tiny(), tiny(edit_spec=dm())
    train(stock, 1, mask=causal_mask(64))
    kept = stock.state_dict()
    assert set(kept) == set(ours.state_dict())
    assert ours.load_state_dict(kept, strict=True)
    assert stock.load_state_dict(ours.state_dict(), strict=True)
    te = dict(kept)
    te["decoder.layers.0.self_attention.core_attention._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    fresh = tiny(edit_spec=dm())
    assert fresh.load_state_dict(te, strict=True)
    assert train(fresh, 1, first=1) == train(ours, 1, first=1)
    assert not [key for key in ours.sharded_state_dict() if "core_attention" in key]


def test_the_attention_can_be_switched_in_the_middle_of_a_run() -> None:
    first, second = tiny(), tiny(edit_spec=dm())
    losses = train(first, 2, mask=causal_mask(64))
    second.load_state_dict(first.state_dict(), strict=True)
    assert train(second, 2, first=2)[-1] < losses[0]


def test_chosen_layers_alone_are_ours_and_the_given_spec_is_left_alone() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    stock = spec.submodules.self_attention.submodules.core_attention
    with_dm_attention(spec)
    assert spec.submodules.self_attention.submodules.core_attention is stock
    kinds = [type(c).__name__ for c in cores(tiny(layers=4, edit_spec=dm(layers="0,2-3")))]
    assert kinds == ["DMDotProductAttention", "DotProductAttention", "DMDotProductAttention", "DMDotProductAttention"]


def test_layers_of_one_shared_spec_can_differ() -> None:
    # Megatron's block specs hold one layer spec many times over
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    def block(spec):
        return TransformerBlockSubmodules(layer_specs=[spec] * 2, layer_norm=WrappedTorchNorm)

    model = tiny(edit_spec=lambda spec: with_dm_attention(block(spec), layers=[1], mode="stale"))
    assert [type(c).__name__ for c in cores(model)] == ["DotProductAttention", "DMDotProductAttention"]
    assert cores(model)[1].dm_mode == "stale"


def test_a_spec_without_attention_is_refused() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    with pytest.raises(ValueError, match="no core_attention slot"):
        with_dm_attention(ModuleSpec(module=torch.nn.Identity))


def test_A08_a_zero_centred_norm_counts_as_one_plus_its_weight() -> None:
    model = tiny(layers=1, edit_spec=dm())
    session = attach_probes(model, None, None, control=False)
    attention = model.decoder.layers[0].self_attention
    with torch.no_grad():
        for norm in (attention.q_layernorm, attention.k_layernorm):
            norm.weight.zero_()
            norm.weight[7] = 1
    attention.config.layernorm_zero_centered_gamma = True
    (site,) = attach_probes(model, None, None, control=False).sites
    g_q, g_k = site.gains()
    weight = (g_q * g_k).square()
    assert float(weight.max() / weight.sum()) == pytest.approx(16 / (16 + 15))
    assert not session.sites[0].zero_centered


def hybrid_stack():
    """A stack spec of attention and MLP layers, stock attention, as a HybridModel takes it."""
    from functools import partial

    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=WrappedTorchNorm,
        k_layernorm=WrappedTorchNorm,
    )
    attention_layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
        self_attn_bda=get_bias_dropout_add,
    )
    projections = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=partial(MLP.as_mlp_submodule, submodules=projections),
        mlp_bda=get_bias_dropout_add,
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention_layer),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp_layer),
    )
    return ModuleSpec(HybridStack, submodules=layers), attention


def test_hybrid_models_train_under_our_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # guards: a spec whose attention sits below another layer type, and layer numbers that skip the layers without attention
    block = pytest.importorskip(
        "megatron.core.models.hybrid.hybrid_block", reason="needs megatron-core with HybridModel (0.19)"
    )
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    monkeypatch.setattr(
        block, "TENorm", WrappedTorchNorm, raising=False
    )  # the final norm, which needs Transformer Engine
    stock, attention = hybrid_stack()
    kept = attention.core_attention
    config = tiny(layers=4).config

    def build(spec):
        torch.manual_seed(1234)
        return HybridModel(
            config=config,
            hybrid_stack_spec=spec,
            vocab_size=64,
            max_sequence_length=64,
            hybrid_layer_pattern="*-*-",
            position_embedding_type="rope",
        )

    ours = build(with_dm_attention(stock))
    assert attention.core_attention is kept
    with attach_probes(ours, ProbeConfig.default(freq=1), tmp_path, control=False) as session:
        assert [s.name for s in session.sites] == [f"decoder.layers.{i}.self_attention.core_attention" for i in (0, 2)]
        losses = train(ours, session=session)
    reference = train(build(stock), mask=causal_mask(64))
    assert all(abs(a - b) < 0.02 for a, b in zip(losses, reference, strict=True))
    assert len(find_dumps(tmp_path)) == len(losses)


def test_a_run_of_another_kind_is_not_resumed(tmp_path: Path) -> None:
    # guards: --resume with another attention, text or seed, which would go on silently from foreign weights
    import megatron_tiny

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "checkpoint.pt"
    megatron_tiny.save(path, 7, model, optimizer, {"attention": "stale", "seed": 1})
    assert megatron_tiny.load(path, model, optimizer, {"attention": "stale", "seed": 1}) == 7
    with pytest.raises(SystemExit, match="was made with attention stale, not matched"):
        megatron_tiny.load(path, model, optimizer, {"attention": "matched", "seed": 1})


@pytest.mark.parametrize("layers", [[-1], [0, -2]])
def test_negative_layers_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        with_dm_attention(gpt_spec(), layers=layers)


def gpt_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def test_A04_a_multi_token_prediction_layer_never_takes_a_decoder_name() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = with_dm_attention(gpt_spec())
    block = get_gpt_mtp_block_spec(tiny(mtp_num_layers=1).config, spec, use_transformer_engine=False)
    model = tiny(edit_spec=lambda _: spec, model={"mtp_block_spec": block}, mtp_num_layers=1)
    sites = attach_probes(model, None, None, control=False).sites
    assert [s.name for s in sites[:2]] == [f"decoder.layers.{i}.self_attention.core_attention" for i in (0, 1)]
    assert [s.name.startswith("mtp.layers.0.") for s in sites[2:]] == [True]
    assert all(s.ours for s in sites)


def test_the_attention_of_mixture_of_experts_layers_is_replaced_too(megatron: None) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = tiny(num_moe_experts=2, moe_layer_freq=[0, 1], moe_router_topk=1, moe_router_pre_softmax=True).config
    block = with_dm_attention(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    cores = [layer.submodules.self_attention.submodules.core_attention for layer in block.layer_specs]
    assert len(cores) == 2
    assert all(issubclass(core, DMDotProductAttention) for core in cores)


def test_layers_may_have_modes_of_their_own(megatron: None) -> None:
    args = add_dm_args(ArgumentParser()).parse_args(["--use-dm-attention", "--dm-mode", "matched,1=stale"])
    model = tiny(edit_spec=lambda spec: spec_from_args(args, spec))
    modes = [layer.self_attention.core_attention.dm_mode for layer in model.decoder.layers]
    assert modes == ["matched", "stale"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dm-mode", "fresh"], "'fresh' is not a delta"),
        (["--dm-mode", "matched,x=stale"], "'x' is neither a layer number nor a range"),
        (["--dm-mode", "matched,=stale"], "'=stale' names no layers"),
        (["--dm-mode", "stale,matched"], "stale and matched are both for all layers"),
        (["--dm-mode", "0-3=stale,2-5=consistent"], "layer 2 is named twice"),
        (["--dm-mode", "matched,3-0=stale"], "'3-0' runs backwards"),
        (["--dm-attention-layers", ""], "names no layer"),
        (["--dm-attention-layers", "3-1"], "'3-1' runs backwards; write it like 1-3"),
        (["--dm-attention-layers", "foo"], "'foo' is neither a layer number nor a range"),
    ],
)
def test_a_wrong_mode_is_refused_by_the_parser(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        add_dm_args(ArgumentParser()).parse_args(words)
    assert text in capsys.readouterr().err


def test_flags_that_would_do_nothing_are_refused() -> None:
    def asked(*words: str) -> object:
        args = add_dm_args(ArgumentParser()).parse_args(words)
        args.num_layers = 12
        return spec_from_args(args, gpt_spec())

    with pytest.raises(ValueError, match="--dm-mode stale was given without --use-dm-attention"):
        asked("--dm-mode", "stale")
    with pytest.raises(ValueError, match="--dm-mode matched,30=stale names layer 30 and the model has layers 0 to 11"):
        asked("--use-dm-attention", "--dm-mode", "matched,30=stale")


def test_one_line_says_which_layers_are_ours_in_which_mode(caplog: pytest.LogCaptureFixture) -> None:
    args = add_dm_args(ArgumentParser()).parse_args(
        ["--use-dm-attention", "--dm-mode", "matched,0-3=stale,7=consistent"]
    )
    with caplog.at_level("INFO", "dm_plugin"):
        spec_from_args(args, gpt_spec())
    assert caplog.messages == [
        "attention of every layer: dm_plugin, mode matched, layers 0-3 stale, layers 7 consistent"
    ]


def test_a_mode_for_a_layer_that_is_left_to_stock_is_refused() -> None:
    words = ["--use-dm-attention", "--dm-attention-layers", "0", "--dm-mode", "matched,1=stale"]
    args = add_dm_args(ArgumentParser()).parse_args(words)
    with pytest.raises(ValueError, match="names layer 1, which --dm-attention-layers 0 leaves to the stock attention"):
        spec_from_args(args, gpt_spec())
