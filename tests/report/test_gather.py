"""Observations added up, against hand-made counts and against the statistics' own shares."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.explain.report.gather import CHUNK, COLUMNS, FIRST, MEASURES, NETWORK, gather
from halfstep.formats import BF16, E4M3, FP16
from tests.report.logs import seen, stats


def at(sums, row, column=slice(None)):
    return dict(zip(MEASURES, sums.shares[row, column].reshape(-1, len(MEASURES)).sum(0), strict=True))


def exponents(sums, row):
    return {int(i) + FIRST: int(sums.histogram[row, i]) for i in np.flatnonzero(sums.histogram[row])}


def test_counts_of_one_observation_in_fp16():
    # fp16 rounds to zero below 2^-25, is subnormal below 2^-14, and ends within 2^15 to 2^16
    powers = {-30: 1, -26: 2, -25: 4, -24: 8, -15: 16, -14: 32, 0: 64, 16: 128}
    found = gather([seen(5, "head", powers, zeros=3, infinities=2)], [5], FP16)
    sums = found.kinds["weight_grad"]
    assert sums.modules == [NETWORK, "head"]
    assert found.columns == ((5, 5),)
    expected = {"nonzero": 255, "lost": 3, "small": 31, "count": 260, "zeros": 3, "saturated": 130}
    assert at(sums, 1) == pytest.approx(
        expected, abs=0.1
    )  # a little of 2^15 to 2^16 lies beyond 65504, but here is none
    assert at(sums, 0) == at(sums, 1)


@given(
    powers=st.dictionaries(st.integers(-126, 127), st.integers(1, 1000), min_size=1, max_size=8),
    fmt=st.sampled_from([FP16, BF16, E4M3]),
    infinities=st.integers(0, 3),
)
def test_shares_are_those_of_the_statistics(powers, fmt, infinities):
    found = stats(powers, zeros=7, infinities=infinities)
    shares = at(gather([seen(1, "m", powers, zeros=7, infinities=infinities)], [1], fmt).kinds["weight_grad"], 1)
    assert shares["lost"] / shares["nonzero"] == pytest.approx(found.lost(fmt))
    assert (shares["small"] - shares["lost"]) / shares["nonzero"] == pytest.approx(found.subnormal(fmt), abs=1e-12)
    assert shares["saturated"] / shares["count"] == pytest.approx(found.saturated(fmt))


def test_an_update_is_lost_below_half_a_unit_in_the_last_place():
    sums = gather([seen(1, "m", {-2: 3, -1: 1, 40: 4}, kind="update", infinities=1)], [1], FP16).kinds["update"]
    assert at(sums, 1) == {"nonzero": 8, "lost": 3, "small": 3, "count": 9, "zeros": 0, "saturated": 1}


def test_an_update_of_just_half_a_unit_is_not_lost_and_half_the_smallest_subnormal_is():
    update = seen(1, "m", {-1: 4}, kind="update")
    assert at(gather([update], [1], FP16).kinds["update"], 1)["lost"] == update.lost_updates == 0
    assert at(gather([seen(1, "m", {-25: 4})], [1], FP16).kinds["weight_grad"], 1)["lost"] == 4


def test_one_value_beyond_the_largest_counts_as_one_and_none_as_none():
    almost = gather([seen(1, "m", {15: 1000})], [1], FP16).kinds["weight_grad"]  # 2^15 is the largest of these
    assert at(almost, 1)["saturated"] == 0
    beyond = seen(1, "m", {0: 1000, 15: 1})
    beyond = replace(beyond, stats=replace(beyond.stats, amax=65520.0))  # the one value of the bin in which 65504 lies
    assert at(gather([beyond], [1], FP16).kinds["weight_grad"], 1)["saturated"] == 1


def test_the_histogram_has_the_true_values_and_the_shares_the_scaled_ones():
    found = gather([seen(1, "m", {-20: 6}, scale=2.0**10)], [1], FP16).kinds["weight_grad"]
    assert exponents(found, 1) == {-30: 6}
    assert found.largest[1] == 2.0**-30
    assert at(found, 1)["lost"] == 0


def test_steps_under_different_scales_add_up_in_true_values():
    same = [seen(1, "m", {-20: 6}, scale=2.0**10), seen(2, "m", {-22: 1}, scale=2.0**8), seen(3, "n", {-30: 5})]
    found = gather(same, [1, 2, 3], FP16).kinds["weight_grad"]
    assert exponents(found, 1) == {-30: 7}
    assert exponents(found, 0) == {-30: 12}


@pytest.mark.parametrize("power", [-126, 126])
def test_any_scale_that_a_plan_may_have_is_taken_out(power):
    found = gather([seen(1, "m", {0: 6}, scale=2.0**power)], [1], FP16).kinds["weight_grad"]
    assert exponents(found, 1) == {-power: 6}


def test_a_scale_that_is_no_power_of_two_moves_by_the_nearest_and_a_broken_one_by_nothing():
    found = gather([seen(1, "m", {0: 1}, scale=1000.0), seen(1, "n", {0: 1}, scale=0.0)], [1], FP16)
    assert exponents(found.kinds["weight_grad"], 1) == {-10: 1}
    assert exponents(found.kinds["weight_grad"], 2) == {0: 1}


def test_kinds_and_modules_keep_their_order_and_apart():
    some = [seen(1, "b", {0: 1}, kind="weight"), seen(1, "a", {0: 2}), seen(1, "", {0: 4}), seen(2, "b", {0: 8})]
    found = gather(some, [1, 2], FP16).kinds
    assert found["weight"].modules == [NETWORK, "b"]
    assert found["weight_grad"].modules == [NETWORK, "a", "(the model itself)", "b"]
    assert [at(found["weight_grad"], row)["count"] for row in range(4)] == [14, 2, 4, 8]
    assert [at(found["weight_grad"], 3, column)["count"] for column in (0, 1)] == [0, 8]


def test_modules_come_in_the_order_of_the_model_and_others_as_they_were_seen():
    some = [seen(1, name, {index: 2**index}) for index, name in enumerate(("new", "c", "", "other", "a"))]
    sums = gather(some, [1], FP16, ["", "a", "b", "c"]).kinds["weight_grad"]
    assert sums.modules == [NETWORK, "(the model itself)", "a", "c", "new", "other"]
    assert [exponents(sums, row) for row in range(1, 6)] == [{2: 4}, {4: 16}, {1: 2}, {0: 1}, {3: 8}]
    assert [at(sums, row)["count"] for row in range(6)] == [31, 4, 16, 2, 1, 8]


@pytest.mark.parametrize("steps", [COLUMNS, COLUMNS + 1, 7 * COLUMNS + 3])
def test_many_steps_share_columns_and_lose_nothing(steps):
    every = [seen(10 * number, "m", {0: number}) for number in range(1, steps + 1)]
    assert len(every) < CHUNK or steps > CHUNK
    found = gather(every, [10 * number for number in range(1, steps + 1)], FP16)
    assert len(found.columns) == COLUMNS
    assert (found.columns[0][0], found.columns[-1][1]) == (10, 10 * steps)
    sums = found.kinds["weight_grad"]
    assert at(sums, 1)["count"] == steps * (steps + 1) / 2
    for column in (0, COLUMNS - 1):
        first, last = found.columns[column]
        assert at(sums, 1, column)["count"] == sum(range(first // 10, last // 10 + 1))


def test_formats_and_samples_are_kept():
    found = gather([seen(1, "a", {0: 1}, fmt="fp16"), seen(1, "b", {0: 1}, sampled=True)], [1], FP16)
    assert found.kinds["weight_grad"].formats == {"fp16", "fp32"}
    assert found.kinds["weight_grad"].sampled


def test_without_observations_there_is_nothing():
    assert gather([], [], FP16).kinds == {}
