import numpy
import pytest
import torch

from halfstep.train.optim.masters import join, round_half_away, split
from tests.optim.cases import as_held

LOW_HALVES = torch.arange(2**16, dtype=torch.int32)


def of_bits(*patterns):
    return torch.from_numpy(numpy.array(patterns, dtype=numpy.uint32).view(numpy.float32))


def assert_exact(full):
    """Splits and joins: every value comes back bit for bit, and the nearest NaN of one that is not held."""
    weight, remainder = split(full)
    assert torch.equal(join(weight, remainder).view(torch.int32), as_held(full).view(torch.int32))
    assert torch.equal(weight.float().isnan(), full.isnan())
    assert torch.equal(round_half_away(full, torch.bfloat16).view(torch.int16), weight.view(torch.int16))


def assert_exact_for_every_low_half_of(high_halves):
    for some in torch.tensor(high_halves).split(16):  # a million values at a time stay in the cache
        assert_exact((some.to(torch.int32).bitwise_left_shift_(16)[:, None] + LOW_HALVES).view(torch.float32))


def test_split_and_join_are_a_bijection_for_every_sign_and_exponent_and_every_low_half():
    first_and_last_fraction = [high for start in range(0, 2**16, 2**7) for high in (start, start + 2**7 - 1)]
    assert_exact_for_every_low_half_of(first_and_last_fraction)


@pytest.mark.slow  # a minute on 2 cores
def test_split_and_join_are_a_bijection_over_every_high_half_and_every_low_half():
    assert_exact_for_every_low_half_of(range(2**16))


def test_every_nan_is_a_nan_weight_and_all_but_131070_come_back():
    for high_half in range(0x7F80, 0x8000, 16):
        patterns = torch.arange(high_half << 16, (high_half + 16) << 16).to(torch.int32).view(torch.float32)
        assert_exact(patterns)
        assert_exact(-patterns)
    every = torch.arange(0x7F800001, 2**31).to(torch.int32)
    again = join(*split(every.view(torch.float32))).view(torch.int32)
    assert (again != every).sum() == 65_535


def test_split_and_join_keep_strides_and_shape():
    kernel = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    weight, remainder = split(kernel)
    assert weight.stride() == remainder.stride() == join(weight, remainder).stride() == kernel.stride()
    assert_exact(torch.randn(()))


@pytest.mark.parametrize(
    ("full", "weight"),
    [
        (1 + 2.0**-8, 1 + 2.0**-7),  # half a place above an even weight: away from zero, where torch's cast goes down
        (-(1 + 2.0**-8), -(1 + 2.0**-7)),
        (1 + 2.0**-8 - 2.0**-23, 1.0),  # just below half a place
        (1 + 3 * 2.0**-8, 1 + 2.0**-6),  # half a place above an odd weight: up under both rules
        (0.0, 0.0),
        (3.3895313892515355e38, 3.3895313892515355e38),  # the largest bf16
        (3.4028234663852886e38, float("inf")),  # the largest fp32 lies above it
    ],
)
def test_weight_is_rounded_to_nearest_with_ties_away_from_zero(full, weight):
    assert split(torch.tensor([full]))[0].item() == weight
    assert round_half_away(torch.tensor([full]), torch.bfloat16).item() == weight


def test_weight_rounds_as_an_independent_count_of_the_bits_says():
    bits = numpy.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=numpy.uint32)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = bits[finite]
    up = (bits & 0xFFFF) >= 0x8000
    expected = ((bits >> 16) + up).astype(numpy.uint16)
    weight, _ = split(torch.from_numpy(bits.view(numpy.float32)))
    assert numpy.array_equal(weight.view(torch.int16).numpy().view(numpy.uint16), expected)


def test_weight_is_torchs_cast_but_for_ties_above_an_even_weight():
    full = torch.randn(1 << 20)
    tie_above_even = full.view(torch.int32).bitwise_and(0x1FFFF) == 0x8000
    full = torch.where(tie_above_even, 0.0, full)
    assert torch.equal(split(full)[0], full.bfloat16())


def test_fp16_is_torchs_cast():
    full = torch.cat([torch.randn(10_000), of_bits(0x7F800000, 0x7FC00000, 0x477FE000, 0x477FF000, 0x33000000)])
    assert torch.equal(round_half_away(full, torch.float16).view(torch.int16), full.half().view(torch.int16))


def test_infinities_and_nans_stay_what_they_are():
    special = of_bits(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F808000, 0xFFFF7FFF, 0x7FFF7FFF)
    assert torch.equal(join(*split(special)).view(torch.int32), special.view(torch.int32))
    assert round_half_away(special[:2], torch.bfloat16).tolist() == [float("inf"), float("-inf")]
