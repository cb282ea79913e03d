"""Turns, medians, quartiles, ratios."""

import time

import pytest
import torch

from halfstep.bench.tally import mean_of_last
from halfstep.measurements import Spread
from halfstep.timing import speedup, spread, take_turns

CPU = torch.device("cpu")


def test_every_call_has_its_turn_in_each_round():
    order = []
    calls = {name: lambda name=name: (order.append(name), time.sleep(2.1e-3)) for name in "ab"}
    times = take_turns(calls, device=CPU, seconds=60, most=3)
    assert [len(times["a"]), len(times["b"])] == [3, 3]
    assert "".join(order) == "aabb" + "ab" * 3  # two of each first, which say how many calls make a turn


def test_a_short_call_is_made_many_times_a_turn():
    count = []
    times = take_turns({"a": lambda: count.append(None)}, device=CPU, seconds=0.0)
    assert len(times["a"]) == 2
    assert len(count) > 100


def test_a_slow_call_leaves_the_rounds_after_two_turns():
    calls = {"slow": lambda: time.sleep(0.05), "quick": lambda: time.sleep(0.0021)}
    times = take_turns(calls, device=CPU, seconds=0.04 + 0.0, most=2)
    assert (len(times["slow"]), len(times["quick"])) == (2, 2)
    assert len(take_turns(calls, device=CPU, seconds=0.09, most=5)["slow"]) == 2


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
