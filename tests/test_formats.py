"""Facts and rounding of the formats, against torch.finfo, torch's own casts and plain Python arithmetic."""

import copy
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import FormatError
from halfstep.formats import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    TF32,
    as_format,
    count_overflows,
    round_nearest,
    saturate,
)

STORED = [FP32, BF16, FP16, E4M3, E5M2]  # the formats with a torch dtype of their own
NARROW = [TF32, BF16, FP16, E4M3, E5M2]  # the formats that round float32 at all
INF, NAN = float("inf"), float("nan")


def every_value(fmt):
    """Returns each value of a format of 8 or 16 bits as float32, ordered by bit pattern."""
    store = {8: torch.uint8, 16: torch.int16}[fmt.bits]
    low = 0 if fmt.bits == 8 else -(1 << 15)
    return torch.arange(low, low + (1 << fmt.bits), dtype=torch.int32).to(store).view(fmt.dtype).float()


def bits(t):
    """Returns float32 bit patterns with all NaN made one, so that comparing them tells -0 from 0."""
    return torch.where(t.isnan(), torch.nan, t).view(torch.int32)


def near(fmt, count=4000):
    """Returns float32 values, both signs, on and within 2 ulp of every kind of boundary that `fmt` has."""
    generator = torch.Generator().manual_seed(fmt.bits * 31 + fmt.fraction_bits)
    exponents = torch.randint(-160, 128, (count,), generator=generator)
    steps = torch.randint(0, 2 << fmt.fraction_bits, (count,), generator=generator)
    grid = torch.ldexp(steps.double(), exponents - fmt.fraction_bits)
    half = torch.ldexp(torch.ones(count, dtype=torch.float64), exponents - fmt.fraction_bits - 1)
    subnormals = torch.arange(0, min(4 << fmt.fraction_bits, 5000)) * (fmt.smallest_subnormal / 2)
    top = fmt.max * (1 + torch.arange(-3, 12).double() * fmt.eps / 8)
    edges = [fmt.smallest_normal, fmt.smallest_subnormal, fmt.smallest_subnormal / 2, FP32.max, FP32.smallest_subnormal]
    values = torch.cat([grid, grid + half, subnormals.double(), top, torch.tensor(edges, dtype=torch.float64)])
    pattern = values.float().view(torch.int32)
    pattern = torch.cat([(pattern + ulp).clamp(0, 0x7F800000) for ulp in (-2, -1, 0, 1, 2)])
    positive = torch.cat([pattern.view(torch.float32), torch.tensor([INF, NAN])])
    return torch.cat([positive, -positive])


def by_fractions(x, fmt, limit):
    """Rounds one finite float32 with exact rational arithmetic: a slow second implementation of round_nearest."""
    exponent = max(Fraction(abs(x)).numerator.bit_length() - Fraction(abs(x)).denominator.bit_length(), -200)
    while Fraction(2) ** exponent > abs(x):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(x):
        exponent += 1
    step = max(Fraction(2) ** (exponent - fmt.fraction_bits), Fraction(fmt.smallest_subnormal))
    size = round(Fraction(abs(x)) / step) * step  # Python rounds Fractions half to even
    size = limit if size > Fraction(fmt.max) else float(size)
    return -size if x < 0 else size


@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_facts_are_those_of_torch(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.max, fmt.smallest_normal, fmt.eps, fmt.bits) == (info.max, info.tiny, info.eps, info.bits)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_facts_agree_with_each_other(fmt):
    assert fmt.eps == 2.0**-fmt.fraction_bits
    assert fmt.smallest_subnormal == fmt.smallest_normal * fmt.eps
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.fraction_bits


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=str)
def test_facts_are_those_of_the_patterns(fmt):
    values = every_value(fmt)
    finite = values[values.isfinite()]
    assert finite.max() == fmt.max
    assert finite[finite > 0].min() == fmt.smallest_subnormal
    assert bool(values.isinf().any()) == fmt.has_inf


def test_as_format_takes_a_format_a_dtype_and_a_name():
    assert [as_format(v) for v in (E4M3, torch.float8_e5m2, "tf32")] == [E4M3, E5M2, TF32]


@pytest.mark.parametrize("value", ["half", torch.float64, torch.int8, 16, None, []])
def test_as_format_names_what_is_known(value):
    with pytest.raises(FormatError, match=r"unknown format .* expected one of fp32, tf32, bf16"):
        as_format(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        *[("half", "fp16"), ("bfloat16", "bf16"), ("torch.float32", "fp32")],
        *[("BF16", "bf16"), ("bf16-mixed", "bf16"), ("16-mixed", "fp16"), (16, "fp16"), ("e4m3fn", "e4m3")],
        *[("mixed_bfloat16", "bf16"), ("mixed_float16", "fp16"), ("bf-16", "bf16"), ("bfloat", "bf16")],
    ],
)
def test_a_name_of_others_is_answered_with_ours(value, name):
    with pytest.raises(FormatError, match=f"did you mean '{name}'"):
        as_format(value)


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=str)
def test_every_value_of_a_format_rounds_to_itself(fmt):
    values = every_value(fmt)
    assert torch.equal(bits(round_nearest(values, fmt)), bits(values))


@pytest.mark.parametrize("source", [BF16, FP16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=str)
def test_every_pattern_of_one_format_rounds_to_another_as_torch_casts(source, fmt):
    values = every_value(source)
    expected = (values if fmt.has_inf else saturate(values, fmt)).to(fmt.dtype).float()
    assert torch.equal(bits(round_nearest(values, fmt)), bits(expected))


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=str)
def test_boundaries_round_as_torch_casts(fmt):
    values = near(fmt)
    expected = (values if fmt.has_inf else saturate(values, fmt)).to(fmt.dtype).float()
    assert torch.equal(bits(round_nearest(values, fmt)), bits(expected))


@pytest.mark.parametrize("fmt", [BF16, FP16, E4M3, E5M2], ids=str)
def test_random_patterns_round_as_torch_casts(fmt):
    pattern = torch.randint(-(1 << 31), 1 << 31, (1_000_000,), generator=torch.Generator().manual_seed(3))
    values = pattern.to(torch.int32).view(torch.float32)
    expected = (values if fmt.has_inf else saturate(values, fmt)).to(fmt.dtype).float()
    assert torch.equal(bits(round_nearest(values, fmt)), bits(expected))


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_boundaries_round_as_exact_fractions(fmt):
    values = near(fmt, count=60)
    values = values[values.isfinite() & (values != 0)]
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))[:1500]]
    expected = torch.tensor([by_fractions(x, fmt, INF if fmt.has_inf else fmt.max) for x in values.tolist()])
    assert torch.equal(round_nearest(values, fmt), expected)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(NARROW))
def test_rounding_twice_is_rounding_once(x, fmt):
    once = round_nearest(torch.tensor([x]), fmt)
    assert torch.equal(bits(round_nearest(once, fmt)), bits(once))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0**127 * (2 - 2**-10), 2.0**127 * (2 - 2**-10)),  # the largest
        (1 + 2.0**-11, 1.0),  # a tie, down to even
        (1 + 3 * 2.0**-11, 1 + 2.0**-9),  # a tie, up to even
        (2.0**-136 * 1.5, 2.0**-135),  # a subnormal tie, up to even
        (2.0**-137, 0.0),  # half of the smallest subnormal
        (2.0**-137 * 1.25, 2.0**-136),
        (FP32.max, INF),
    ],
)
def test_tf32_by_hand(value, expected):
    assert round_nearest(torch.tensor(value), TF32).item() == expected


@pytest.mark.parametrize(
    ("fmt", "value", "expected"),
    [
        (FP16, 65519.0, 65504.0),
        (FP16, 65520.0, INF),  # half-way to 65536, and 65504 is odd
        (E5M2, 61439.0, 57344.0),
        (E5M2, 61440.0, INF),
        (E4M3, 464.0, 448.0),
        (E4M3, 1e30, 448.0),
        (E4M3, INF, 448.0),
        (E4M3, -INF, -448.0),
        (BF16, FP32.max, INF),
        (FP16, 2.0**-25, 0.0),  # half of the smallest subnormal is a tie with the even zero
        (FP16, 2.0**-25 * (1 + 2.0**-23), 2.0**-24),
        (FP32, FP32.max, FP32.max),
    ],
)
def test_both_sides_of_overflow_and_underflow(fmt, value, expected):
    assert round_nearest(torch.tensor(value), fmt).item() == expected


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_sign_of_zero_and_nan_are_kept(fmt):
    values = torch.tensor([0.0, -0.0, -1e-44, NAN])
    result = round_nearest(values, fmt)
    assert result.signbit()[:3].tolist() == [False, True, True]
    assert result.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_saturated_values_never_overflow(fmt):
    values = saturate(near(fmt), fmt)
    assert not round_nearest(values, fmt).isinf().any()
    assert torch.equal(values.isnan(), near(fmt).isnan())
    assert round_nearest(values, fmt).nan_to_num().abs().max() == fmt.max


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_only_float32_is_rounded(dtype):
    values = torch.ones(2, dtype=dtype)
    with pytest.raises(FormatError, match="expects float32 values, got"):
        round_nearest(values, BF16)


def test_rounding_leaves_its_input_and_takes_any_layout():
    values = torch.randn(6, 4, requires_grad=True).t()[::2]
    before = values.detach().clone()
    assert torch.equal(round_nearest(values, E4M3), round_nearest(before.contiguous(), E4M3))
    assert torch.equal(values, before)
    assert round_nearest(torch.empty(0, 3), FP16).shape == (0, 3)


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
def test_rounding_returns_a_tensor_of_its_own(fmt):
    values = torch.ones(3)
    round_nearest(values, fmt).zero_()
    assert values.tolist() == [1.0, 1.0, 1.0]


# --- counts -------------------------------------------------------------------------------------------------------


def counted(values, fmt, after=None):
    before = torch.tensor(values)
    return int(count_overflows(before, round_nearest(before, fmt) if after is None else after, fmt))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 0), (1.0, 0), (INF, 0), (NAN, 0), (65519.0, 0), (-65520.0, 1), (2.0**-25, 0), (2.0**-24, 0)],
)
def test_counts_on_both_sides_of_each_boundary(value, expected):
    assert counted([value, 1.0], FP16) == expected


def test_counts_of_values_that_saturate():
    assert counted([448.0, 464.0, 465.0, -1e9, INF, NAN], E4M3) == 2
    values = torch.tensor([57344.0, 61440.0, 61441.0, INF])
    after = round_nearest(saturate(values, E5M2), E5M2)
    assert counted(values.tolist(), E5M2, after) == 1


def test_counts_see_a_cast_that_gives_nan_on_overflow():
    assert counted([1.0, 500.0], E4M3, torch.tensor([1.0, NAN])) == 1


def test_counts_are_device_tensors():
    count = count_overflows(torch.ones(3), torch.ones(3), BF16)
    assert (count.dtype, count.shape) == (torch.int64, torch.Size([]))


def test_a_copy_of_a_format_is_the_format_which_code_compares_with_is():
    for fmt in FORMATS.values():
        assert copy.deepcopy(fmt) is pickle.loads(pickle.dumps(fmt)) is fmt
    own = replace(FP16, name="own")
    assert copy.deepcopy(own) == pickle.loads(pickle.dumps(own)) == own
