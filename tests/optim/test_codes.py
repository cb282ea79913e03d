"""The codes of moments against their formulas, written out in Python's integers and fractions."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from halfstep.train.kernels.batch import Code, Place
from halfstep.train.optim.moments import decode, encode, grouped, random_bits, to_bf16, ungrouped
from tests.optim.cases import bits

SIGNED, NEAREST, SQUARE = Code(True, True), Code(True, False), Code(False, True)
every_code = pytest.mark.parametrize("code", [SIGNED, NEAREST, SQUARE], ids=["signed", "to nearest", "square"])


def stirred(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    return x ^ (x >> 15)


def mixed(x):
    x = stirred(x) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("place", [Place(0, 0, 64, 64), Place(2**17, 5, 3, 7), Place(3, 2**32 - 9, 10, 2**31)])
@pytest.mark.parametrize(("step", "which"), [(1, 0), (2**24, 1), (3, 2)])
def test_random_bits_are_a_hash_of_the_place_in_the_whole_tensor_and_of_the_step(place, step, which):
    key = mixed(step * 0x85EBCA77 % 2**32 ^ place.number * 0xC2B2AE3D % 2**32)
    last = (0x846CA68B, 0xC2B2AE3D, 0x85EBCA77)[which]
    index = [place.first + row * place.stride + column for row in range(20) for column in range(place.row)]
    expected = [stirred((i * 0x9E3779B1 + key) % 2**32) * last % 2**32 for i in index]
    assert random_bits(place, len(index), torch.tensor(float(step)), which).tolist() == expected


def test_upper_random_bits_are_even_and_independent_between_states_neighbours_and_steps():
    drawn = [
        random_bits(Place(3, 0, 64, 64), 2**18, torch.tensor(step), which) for step in (1.0, 2.0) for which in (0, 1)
    ]
    even = [(bits >> 13).double() / 2**19 - 0.5 for bits in drawn]
    for x in even:
        assert abs(x.mean()) < 4 / 12**0.5 / 2**9
        assert abs((x * x).mean() * 12 - 1) < 4 * 0.8**0.5 / 2**9
    pairs = [*itertools.combinations(even, 2), *((x[lag:], x[:-lag]) for x in even for lag in (1, 2, 16, 64, 1024))]
    assert all(abs((x * y).mean() * 12) < 4.5 / 2**9 for x, y in pairs)


@pytest.mark.parametrize("noise", [0, 1, 0x8000, 0xFFFF])
def test_every_bf16_number_stays_whatever_the_noise(noise):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    kept = to_bf16(numbers.float(), torch.tensor(noise << 16))
    assert torch.equal(bits(kept), bits(numbers))


@pytest.mark.parametrize("value", [1.2345, -1e-40, 3e38, math.pi * 1e-8, torch.finfo(torch.float32).max, math.inf])
def test_of_all_noise_as_much_rounds_to_bf16_away_from_zero_as_is_cut_off(value):
    value = torch.tensor(value)
    pattern = int(bits(value)) % 2**32
    up, down = (pattern >> 16) + 1, pattern >> 16
    kept = bits(to_bf16(value.expand(2**16), torch.arange(2**16) << 16)).int() % 2**16
    assert [int((kept == each).sum()) for each in (down, up)] == [2**16 - pattern % 2**16, pattern % 2**16]


def reference(patterns, random, code):
    """The codes and the base of one group, from bit patterns of fp32 and of 32 random bits."""
    sizes, most, counted = [u % 2**31 for u in patterns], 127 if code.signed else 255, 2**16 if code.signed else 1

    def rounded(drop):
        more = 2**19 * (random[0] // 2**12 % 2) if drop == 20 else 0
        added = [r // 2**13 + more for r in random] if code.stochastic else [2**drop // 2] * len(sizes)
        return [(u + a) // 2**drop for u, a in zip(sizes, added, strict=True)]

    fine = rounded(19)
    near = max(fine) - min([t for t, u in zip(fine, sizes, strict=True) if u >= counted], default=0) < most
    chosen = fine if near else rounded(20)
    base = max(0, max(chosen) - most)
    codes = [max(t - base, 0 if code.signed else 1) if u else 0 for t, u in zip(chosen, sizes, strict=True)]
    signs = [-1 if u >= 2**31 and code.signed else 1 for u in patterns]
    return [c * s for c, s in zip(codes, signs, strict=True)], base if near else -1 - base


def value_of(number, base):
    """What a code stands for: an unsigned float with 4 or 3 bits of fraction, and fp32's exponents."""
    fraction = 16 if base >= 0 else 8
    exponent, rest = divmod(abs(number) + max(base, -1 - base), fraction)
    size = Fraction(fraction * bool(exponent) + rest, fraction) * Fraction(2) ** (max(exponent, 1) - 127)
    return size * (number > 0) - size * (number < 0)


def spread(sigma, scale=1.0):
    return torch.randn(8, 64) * torch.exp(sigma * torch.randn(8, 64)) * scale


TINY = torch.finfo(torch.float32).tiny
GROUPS = {
    "even": lambda: spread(0.3),
    "uneven": lambda: spread(3.0, 1e-6),
    "scattered": lambda: spread(20.0),
    "sparse": lambda: spread(1.0) * (torch.rand(8, 64) < 0.1),
    "none": lambda: torch.zeros(2, 64),
    "minus zeros": lambda: -torch.zeros(2, 64),
    "one": lambda: torch.nn.functional.pad(torch.tensor([[1e-20]]), (0, 63)),
    "subnormal": lambda: spread(2.0, TINY / 100),
    "subnormal beside large": lambda: torch.cat([spread(1.0, TINY / 1e4)[:, :32], spread(1.0)[:, 32:]], 1),
    "large": lambda: spread(0.1).clamp(0.5, 0.9) * 3e38,
    "infinite": lambda: torch.nn.functional.pad(torch.tensor([[math.inf, 1.0, 0.0]]), (0, 61)),
}


@every_code
@pytest.mark.parametrize("group", GROUPS)
def test_codes_are_those_of_the_formula_and_stay_after_decoding(code, group):
    values = GROUPS[group]() if code.signed else GROUPS[group]().abs()
    random = torch.randint(2**32, values.shape)
    codes, bases = encode(values, random if code.stochastic else None, code)
    assert (codes.dtype, bases.dtype, bases.shape) == (code.dtype, torch.int16, (len(values), 1))
    patterns = [[u % 2**32 for u in row] for row in bits(values).tolist()]
    given = [(row, base) for row, (base,) in zip(codes.tolist(), bases.tolist(), strict=True)]
    assert given == [reference(row, r, code) for row, r in zip(patterns, random.tolist(), strict=True)]
    decoded = decode(codes, bases)
    for row, numbers, base in zip(decoded.tolist(), codes.tolist(), bases.flatten().tolist(), strict=True):
        pairs = [pair for pair in zip(row, numbers, strict=True) if math.isfinite(pair[0])]
        assert all(Fraction(value) == value_of(number, base) for value, number in pairs)
        assert len(pairs) >= 63
    if not code.signed:
        assert torch.equal(codes == 0, values == 0)  # or an update would be divided by 0


@every_code
@pytest.mark.parametrize("drop", [19, 20])
def test_every_code_with_every_base_keeps_its_value_whatever_the_noise(code, drop):
    most = 127 if code.signed else 255
    numbers = torch.arange(-128 if code.signed else 0, most + 1).clamp(-most).view(64, -1).t()
    bases = torch.arange(0, (0x7F800000 >> drop) - most + 1, dtype=torch.int32)  # up to infinity
    bases = (bases if drop == 19 else -1 - bases).to(torch.int16)
    shape = len(bases), len(numbers)
    groups = numbers.to(code.dtype).expand(*shape, 64).reshape(-1, 64)
    values = decode(groups, bases.view(-1, 1).expand(shape).reshape(-1, 1))
    for random in (torch.full_like(values, 2**32 - 1, dtype=torch.int64), torch.randint(2**32, values.shape)):
        again = decode(*encode(values, random if code.stochastic else None, code))
        assert torch.equal(bits(again), bits(values))


@every_code
def test_a_group_loses_a_bit_of_its_fractions_only_where_its_codes_would_not_reach_its_smallest(code):
    most, random = 127 if code.signed else 255, torch.zeros(1, 64, dtype=torch.int64) if code.stochastic else None
    for distance, near in ((most - 1, True), (most, False)):
        pattern = torch.full((1, 64), 0x3F8 << 20, dtype=torch.int32)
        pattern[0, 5] -= distance << 19
        pattern[0, 7:] = 0
        _, base = encode(pattern.view(torch.float32), random, code)
        kept = decode(*encode(pattern.view(torch.float32), random, code))
        assert [int(base) >= 0, torch.equal(bits(kept), pattern)] == [near, near]


def test_a_signed_value_too_small_for_its_group_becomes_zero_and_a_square_the_least():
    values = torch.full((1, 64), 1e-30)
    values[0, 0] = 1.0
    for code, least in ((SIGNED, 0), (NEAREST, 0), (SQUARE, 1)):
        codes, base = encode(values, torch.zeros(1, 64, dtype=torch.int64) if code.stochastic else None, code)
        assert codes[0, 1:].unique().tolist() == [least]
        assert float(decode(codes, base)[0, 0]) == 1.0


def test_a_tie_goes_away_from_zero():
    values = torch.ones(1, 64)
    values[0, :2] = 1 + 1 / 32
    values[0, 1] *= -1
    assert decode(*encode(values, None, NEAREST))[0, :3].tolist() == [1 + 1 / 16, -1 - 1 / 16, 1.0]


@pytest.mark.parametrize("row", [1, 63, 64, 65, 100])
def test_groups_lie_within_slices(row):
    values = torch.randn(3 * row)
    groups = grouped(values, row)
    slices = [part for each in values.split(row) for part in each.split(64)]
    assert [g[: len(s)].tolist() for g, s in zip(groups, slices, strict=True)] == [s.tolist() for s in slices]
    assert sum(map(int, (groups != 0).sum(1))) == 3 * row
    assert torch.equal(ungrouped(groups, row), values)


@pytest.fixture(scope="module")
def drawn():
    """The random bits of a group at 4096 steps, for both states."""
    steps = [torch.tensor(float(step)) for step in range(4096)]
    return [torch.stack([random_bits(Place(7, 0, 64, 64), 64, step, state) for step in steps]) for state in (0, 1)]


@pytest.mark.parametrize(("code", "sigma"), [(SIGNED, 0.3), (SIGNED, 1.5), (SQUARE, 0.3)])
def test_rounding_is_unbiased_over_the_steps(code, sigma, drawn):
    values = torch.exp(sigma * torch.randn(64)).clamp(2**-6, 2**6)  # of which none is at a floor
    random, count = drawn[not code.signed], len(drawn[0])
    codes, bases = encode(values.expand(count, 64), random, code)
    found = decode(codes, bases).double()
    low, high = found.amin(0), found.amax(0)
    share = (values - low) / (high - low).clamp(min=1e-9)
    sigmas = (high - low) * (share * (1 - share) / count).sqrt()
    assert all(len(column.unique()) <= 2 for column in found.unbind(1))
    assert ((found.mean(0) - values).abs() <= 4 * sigmas + 1e-12).all()
