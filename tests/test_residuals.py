"""Additive residual sums: additivity, empty rows, bad rows, bins. Field case A07: field/test_hook_cases.py."""

import torch

from dm_plugin.residuals import HIST_SIZE, gain_share, histogram_bins, key_col_sum, row_sum, signed


def test_sums_are_additive_over_any_split_of_the_rows() -> None:
    gen = torch.Generator().manual_seed(0)
    total, absolute, top = (torch.rand(4, 3, 50, generator=gen) for _ in range(3))
    whole = row_sum(total, absolute, top)
    parts = [row_sum(total[:, :, s], absolute[:, :, s], top[:, :, s]) for s in (slice(0, 13), slice(13, 50))]
    for name in ("num", "den", "count", "excluded", "hist", "hist_top_p"):
        torch.testing.assert_close(
            getattr(parts[0], name) + getattr(parts[1], name), getattr(whole, name), rtol=1e-12, atol=0
        )


def test_a_row_without_a_gradient_is_excluded_and_counted_and_a_bad_row_goes_to_the_last_bin() -> None:
    total = torch.tensor([[[0.0, 1e-3, float("nan"), 5.0]]])
    absolute = torch.tensor([[[0.0, 1.0, 1.0, float("inf")]]])
    s = row_sum(total, absolute, torch.tensor([[[1.0, 0.4, 0.95, 0.9999]]]))
    assert (s.num.item(), s.den.item(), s.count.item(), s.excluded.item()) == (
        torch.tensor(1e-3).double().item(),
        1.0,
        1,
        1,
    )
    assert s.hist.sum() == 3
    assert s.hist[HIST_SIZE - 1] == 2
    assert s.hist_top_p.sum(1).tolist() == [1, 0, 1, 0, 1]


def test_bins_are_twentieths_of_a_decade_with_open_ends() -> None:
    ratio = torch.tensor([0.0, 1e-11, 1.01e-10, 1e-3 * 1.0001, 99.0, 101.0, float("inf"), float("nan")])
    assert histogram_bins(ratio).tolist() == [0, 0, 1, 141, 240, 241, 241, 241]


def test_signed_rows_are_split_by_the_sign_of_their_residual() -> None:
    out = signed(torch.tensor([[[-1.0, 2.0, 0.0, -3.0]]]), torch.tensor([[[0.5, 0.25, 9.0, 1.0]]]))
    assert {k: v.item() for k, v in out.items()} == {
        "sharpened": 2,
        "flattened": 1,
        "entropy_sharpened": 1.5,
        "entropy_flattened": 0.25,
    }
    bad = signed(torch.tensor([[[-1.0, 2.0, -1.0]]]), torch.tensor([[[float("nan"), float("inf"), 0.5]]]))
    assert [bad[k].item() for k in ("sharpened", "entropy_sharpened", "entropy_flattened")] == [2, 0.5, 0.0]


def test_key_sums_take_the_absolute_value_per_sequence() -> None:
    total = torch.tensor([[[1.0, -2.0]], [[-1.0, float("nan")]]])
    out = key_col_sum(total, torch.ones_like(total))
    assert out["num"].tolist() == [[2.0, 2.0]]
    assert (out["count"].item(), out["excluded"].item()) == (2, 1)


def test_gain_share_of_one_dominant_channel_tends_to_one() -> None:
    g = torch.ones(16)
    assert abs(gain_share(g, g).item() - 1 / 16) < 1e-12
    g[3] = 100
    assert gain_share(g, g).item() > 0.999
    assert gain_share(g, g, top=4).item() > gain_share(g, g).item()
