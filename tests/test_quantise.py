"""Quantiser: exact grids, ties to even, saturation, zero and non-finite entries, one scale a block."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dm_plugin.formats import E4M3, E5M2, FORMATS, Grid, get_format
from dm_plugin.quantise import block_scale, dequantise, quantise, round_to_grid, token_mean


def grid_values(grid: Grid) -> list[float]:
    """Every non-negative number of the grid, written out from its definition."""
    values = [i * grid.smallest for i in range(2**grid.mantissa)]
    exponent = grid.min_exp
    while 2.0**exponent <= grid.max:
        values += [(1 + i / 2**grid.mantissa) * 2.0**exponent for i in range(2**grid.mantissa)]
        exponent += 1
    return [v for v in values if v <= grid.max]


@pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda g: g.name)
def test_codes_are_exactly_the_grid(grid: Grid) -> None:
    values = grid_values(grid)
    assert len(values) == (127 if grid is E4M3 else 124)
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(round_to_grid(x, grid), x)
    assert torch.equal(round_to_grid(-x, grid), -x)


@pytest.mark.parametrize("grid", [E4M3, E5M2], ids=lambda g: g.name)
def test_rounding_is_to_nearest_with_ties_to_even(grid: Grid) -> None:
    values = grid_values(grid)
    for i, (low, high) in enumerate(zip(values, values[1:], strict=False)):
        middle = torch.tensor((low + high) / 2)
        assert round_to_grid(middle, grid).item() == (low if i % 2 == 0 else high)
        assert round_to_grid(torch.nextafter(middle, torch.tensor(0.0)), grid).item() == low
        assert round_to_grid(torch.nextafter(middle, torch.tensor(math.inf)), grid).item() == high


def test_values_past_the_end_saturate_and_never_turn_into_nan() -> None:
    x = torch.tensor([449.0, 464.0, 465.0, 480.0, 1e30, -465.0, torch.finfo(torch.float32).max])
    assert torch.equal(round_to_grid(x).abs(), torch.full_like(x, 448.0))


def test_non_finite_entries_become_nan_in_their_own_place() -> None:
    x = torch.randn(4, 130, 8)
    x[1, 7, 3], x[2, 129, 0] = math.nan, -math.inf
    c = quantise(x, 64)
    assert torch.isnan(c.codes).nonzero().tolist() == [[1, 7, 3], [2, 129, 0]]
    assert torch.isfinite(c.scale).all()


def test_zero_blocks_have_scale_one_and_code_zero() -> None:
    x = torch.randn(1, 192, 16)
    x[:, 64:128] = 0
    c = quantise(x, 64)
    assert (c.scale[:, 64:128] == 1).all()
    assert (c.codes[:, 64:128] == 0).all()


def test_a_block_below_the_reach_of_fp8_is_zero_not_nan() -> None:
    c = quantise(torch.full((1, 64, 4), 1e-41), 64)
    assert (c.codes == 0).all()
    assert torch.isfinite(c.scale).all()


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 129, 300])
@pytest.mark.parametrize("block", [None, 64, 128])
def test_each_block_reaches_448_exactly_and_only_its_own_scale(tokens: int, block: int | None) -> None:
    x = torch.randn(2, tokens, 8) * torch.logspace(-3, 3, max(tokens, 1))[:tokens, None]
    c = quantise(x, block)
    assert c.codes.shape == x.shape
    for n in range(2 if tokens else 0):
        blocks = x[n].split(block) if block else [x]
        scales = c.scale[n, :, 0].split(block) if block else [c.scale.reshape(-1)]
        for xb, sb in zip(blocks, scales, strict=True):
            assert (sb == xb.abs().amax() / torch.tensor(448.0)).all()
    if tokens:
        assert c.codes.abs().max() == 448


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
        min_size=1,
        max_size=80,
    )
)
def test_dequantised_values_are_within_half_a_step(values: list[float]) -> None:
    x = torch.tensor(values).reshape(-1, 1)
    amax = x.abs().max()
    err = (dequantise(quantise(x, 128)) - x).abs()
    # relative 2^-4 for normal codes, half a subnormal step of the block below; 1e-6 covers the two FP32 roundings of the scale
    assert (err <= x.abs() * 2**-4 * (1 + 1e-6) + amax / 448 * 2**-10 * (1 + 1e-6) + 1e-37).all()


def test_scale_and_inverse_are_both_rounded_divisions() -> None:
    amax = torch.rand(1000) * 100 + 1e-3
    scale, inv = block_scale(amax)
    assert torch.equal(scale, (amax.double() / 448).float())
    assert torch.equal(inv, (448 / amax.double()).float())


def test_token_mean_ignores_non_finite_entries_and_matches_fp64() -> None:
    x = torch.randn(2, 1000, 8) + 5
    assert torch.allclose(token_mean(x).double(), x.double().mean(1, keepdim=True), rtol=1e-6)
    x[0, 3, 1] = math.nan
    assert torch.isfinite(token_mean(x)).all()


def test_formats_are_found_by_name_and_unknown_ones_named() -> None:
    assert {get_format(name).name for name in FORMATS} == {"paper", "sm90", "stock", "stock_current"}
    with pytest.raises(ValueError, match=r"fmt='mxfp8' is not a known format; use one of paper"):
        get_format("mxfp8")
    assert get_format("paper").with_(center_v=True).name == "paper[center_v=True]"
