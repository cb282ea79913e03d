"""Medians, quartiles, ratios."""

import pytest

from halfstep.bench.figures import mean_of_last, speedup, spread
from halfstep.records import Spread


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], None), ([3.0], Spread(3.0, 3.0, 3.0, 1)), ([5.0, 1.0, 2.0, 4.0, 3.0], Spread(3.0, 2.0, 4.0, 5))],
)
def test_spread_is_the_median_and_the_quartiles(values, expected):
    assert spread(values) == expected


def test_speedup_pairs_the_steps_of_a_round():
    # the machine was ten times slower in the last two rounds: the ratio of medians would be 20 / 1 or 2 / 10
    assert speedup([2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 10.0, 10.0]) == 2.0


def test_speedup_leaves_out_a_round_that_only_one_finished():
    assert speedup([2.0, 2.0, 2.0], [1.0]) == 2.0
    assert speedup([], [1.0]) is None


@pytest.mark.parametrize(
    ("values", "mean"), [([], None), ([4.0], 4.0), ([0.0] * 9 + [6.0], 6.0), ([9.0] * 27 + [1.0, 2.0, 3.0], 2.0)]
)
def test_mean_of_last_takes_a_tenth_and_one_at_least(values, mean):
    assert mean_of_last(values) == mean
