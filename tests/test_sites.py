"""Sites: names free of wrappers, and gains as the norm means them. Field case A04: field/test_hook_cases.py."""

from types import SimpleNamespace

import pytest
import torch
from tiny_model import Model
from torch import nn

from dm_plugin.sites import find_sites, global_name

IDS = [f"decoder.layers.{i}.self_attention.core_attention" for i in range(12)]
SPLITS = {
    "PP=1": [range(1, 13)],
    "PP=4": [range(1, 4), range(4, 7), range(7, 10), range(10, 13)],
    "PP=4, last stage of 1": [range(1, 5), range(5, 9), range(9, 12), range(12, 13)],
    "PP=2 x VPP=2": [[*range(1, 4)], [*range(7, 10)], [*range(4, 7)], [*range(10, 13)]],
}


def test_wrappers_do_not_change_a_name() -> None:
    for prefix in ("", "module.", "module.module.", "_orig_mod.module.", "module._orig_mod."):
        assert global_name(f"{prefix}decoder.layers.0.self_attention.core_attention", 5) == IDS[4]
    assert global_name("decoder.layers.0._orig_mod.self_attention.core_attention", 5) == IDS[4]
    assert global_name("model.decoder.layers.0.self_attention.core_attention", None) == IDS[0]


def test_two_layers_of_one_number_are_an_error_not_one_curve() -> None:
    with pytest.raises(ValueError, match=r"both named decoder\.layers\.0"):
        find_sites(Model(layers=[1, 1]))


@pytest.mark.parametrize("flag_on_norm", [True, False])
def test_a_zero_centred_gain_is_found_on_the_norm_or_on_the_config(flag_on_norm: bool) -> None:
    model = Model(layers=1)
    attention = model.decoder.layers[0].self_attention
    attention.config = SimpleNamespace(layernorm_zero_centered_gamma=not flag_on_norm)
    if flag_on_norm:
        attention.q_layernorm.zero_centered_gamma = True
    (site,) = find_sites(model)
    assert site.zero_centered
    assert torch.equal(site.gains()[0], torch.full((8,), 2.0))


def test_a_layer_without_norms_has_no_gains() -> None:
    model = Model(layers=1)
    model.decoder.layers[0].self_attention.q_layernorm = nn.Identity()
    (site,) = find_sites(model)
    assert site.gains() is None
