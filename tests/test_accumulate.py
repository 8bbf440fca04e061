"""The Hopper accumulator model against crafted cases (13 fraction bits, truncation, order-free groups of 32) and an integer emulator."""

import math
import struct

import pytest
import torch

from dm_plugin.accumulate import dot, hopper_dot

BIG = 12


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def from_bits(u: int) -> float:
    return struct.unpack("<f", struct.pack("<I", u))[0]


def run(pairs: dict[int, tuple[int, int]], c: float = 0.0, k: int = 32) -> float:
    """One output: product sign * 2^p at contraction index i for pairs {i: (sign, p)}, accumulator c."""
    a, b = torch.zeros(1, k), torch.zeros(1, k)
    for i, (sign, p) in pairs.items():
        ea = min(8, p) if p >= 0 else max(-6, p)
        a[0, i], b[0, i] = sign * 2.0**ea, 2.0 ** (p - ea)
    return hopper_dot(a, b, torch.tensor([[c]])).item()


@pytest.mark.parametrize("sb", [1, -1])
@pytest.mark.parametrize("ss", [1, -1])
@pytest.mark.parametrize("where", ["products", "c big", "c small"])
def test_thirteen_fraction_bits_survive_and_the_rest_is_cut_toward_zero(sb: int, ss: int, where: str) -> None:
    for j in range(1, 20):
        small = (ss, BIG - j)
        if where == "products":
            got = run({0: (sb, BIG), 1: small})
        elif where == "c big":
            got = run({1: small}, c=sb * 2.0**BIG)
        else:
            got = run({0: (sb, BIG)}, c=ss * 2.0 ** (BIG - j))
        exact = sb * 2.0**BIG + ss * 2.0 ** (BIG - j)
        assert got == (exact if j <= 13 else sb * 2.0**BIG)


def test_the_accumulator_itself_is_cut_by_every_instruction_even_with_zero_products() -> None:
    full = from_bits(0x3FFFFFFF)
    assert bits(run({}, c=full)) == 0x3FFFFC00
    assert bits(run({}, c=-full)) == 0xBFFFFC00
    assert bits(run({}, c=full, k=256)) == 0x3FFFFC00  # cutting again changes nothing


def test_half_quanta_vanish_one_an_instruction_and_within_one_instruction() -> None:
    one_each = {32 * s: (1, -14) for s in range(8)}
    assert run(one_each, c=1.0, k=256) == 1.0
    assert run(dict.fromkeys(range(8), (1, -14)), c=1.0) == 1.0


def test_the_result_is_cut_again_after_carry_growth() -> None:
    heap = dict.fromkeys(range(31), (1, 8))
    assert run(heap | {31: (1, 8 - 13)}) == 31 * 256  # kept by the alignment, lost by the second cut
    assert run(heap | {31: (1, 8 - 13 + 4)}) == 31 * 256 + 2.0 ** (8 - 13 + 4)


@pytest.mark.parametrize("other", [1, 16, 31])
def test_order_inside_a_group_of_32_does_not_matter(other: int) -> None:
    for k in range(32):
        if k not in (0, other):
            assert run({0: (1, BIG), other: (-1, BIG), k: (1, BIG - 17)}) == 0.0
    # in the next group the big pair has already cancelled
    assert run({0: (1, BIG), other: (-1, BIG), 40: (1, BIG - 17)}, k=64) == 2.0 ** (BIG - 17)


def test_permuting_a_group_changes_no_bit() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = random_codes(8, 32, gen), random_codes(8, 32, gen)
    c = torch.randn(8, 8, generator=gen) * 1e4
    base = hopper_dot(a, b, c)
    for _ in range(8):
        order = torch.randperm(32, generator=gen)
        assert torch.equal(hopper_dot(a[:, order], b[:, order], c), base)


def random_codes(rows: int, k: int, gen: torch.Generator) -> torch.Tensor:
    byte = torch.randint(0, 256, (rows, k), generator=gen, dtype=torch.uint8)
    byte[(byte & 0x7F) == 0x7F] = 0
    return byte.view(torch.float8_e4m3fn).float()


def emulate(a: list[float], b: list[float], c: float) -> float:
    """One k=32 instruction in unbounded integers, written from the measured description."""

    def split(x: float) -> tuple[int, int]:  # x = m * 2^(e - 3), e >= -6
        e = max(math.frexp(abs(x))[1] - 1, -6)
        return int(x * 2.0 ** (3 - e)), e

    terms = []
    for x, y in zip(a, b, strict=True):
        if x != 0 and y != 0:
            (mx, ex), (my, ey) = split(x), split(y)
            terms.append((mx * my, ex + ey - 6, ex + ey))
    if c != 0:
        e = math.frexp(abs(c))[1] - 1
        terms.append((int(c * 2.0 ** (40 - e)), e - 40, e))
    if not terms:
        return 0.0
    top = max(t[2] for t in terms)
    total = 0
    for m, e, _ in terms:
        shift = e - (top - 13)
        size = abs(m) << shift if shift >= 0 else abs(m) >> -shift
        total += size if m > 0 else -size
    extra = max(abs(total).bit_length() - 14, 0)
    size = (abs(total) >> extra) << extra
    return math.copysign(size * 2.0 ** (top - 13), total) if total else 0.0


@pytest.mark.parametrize("k", [32, 64, 256])
def test_random_codes_equal_the_integer_emulator_bit_for_bit(k: int) -> None:
    gen = torch.Generator().manual_seed(k)
    a, b = random_codes(16, k, gen), random_codes(24, k, gen)
    c = torch.randn(16, 24, generator=gen) * torch.exp2(torch.randint(-6, 18, (16, 24), generator=gen).float())
    got = hopper_dot(a, b, c)
    for i in range(16):
        for j in range(24):
            acc = c[i, j].item()
            for g in range(0, k, 32):
                acc = emulate(a[i, g : g + 32].tolist(), b[j, g : g + 32].tolist(), acc)
            assert got[i, j].item() == acc


def test_long_chains_of_one_sign_lose_percents_which_is_why_windows_are_promoted() -> None:
    a = torch.full((1, 8192), 1.0)
    b = torch.full((1, 8192), 1.0) + torch.arange(8192) % 8 / 8
    exact = dot(a, b).item()
    assert abs(hopper_dot(a, b).item() / exact - 1) > 1e-4
    windows = sum(hopper_dot(a[:, i : i + 128], b[:, i : i + 128]).item() for i in range(0, 8192, 128))
    assert abs(windows / exact - 1) < 1e-4


def test_batches_broadcast_and_lengths_need_not_be_multiples_of_32() -> None:
    gen = torch.Generator().manual_seed(1)
    a, b = random_codes(6, 40, gen).reshape(2, 3, 40), random_codes(5, 40, gen).reshape(1, 5, 40)
    got = hopper_dot(a, b)
    assert got.shape == (2, 3, 5)
    assert torch.equal(got[1], hopper_dot(a[1], b[0]))


def test_a_nan_operand_reaches_only_rows_with_weight_on_it() -> None:
    a = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    b = torch.tensor([[3.0, math.nan]])
    for how in ("exact", "hopper"):
        out = dot(a, b, how)  # type: ignore[arg-type]
        assert out[0, 0] == 3
        assert torch.isnan(out[1, 0])
