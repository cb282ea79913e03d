"""Turns, medians, quartiles, ratios."""

from functools import partial

import pytest
import torch

from halfstep.lab.bench.tally import mean_of_last
from halfstep.measurements import Spread
from halfstep.timing import speedup, spread, take_turns

CPU = torch.device("cpu")


@pytest.fixture
def calls_of(monkeypatch):
    """Makes calls that take so many seconds of a clock that nothing else moves, and note their names."""
    now, order = [0.0], []
    monkeypatch.setattr("halfstep.timing.perf_counter", lambda: now[0])

    def take(name, seconds):
        order.append(name)
        now[0] += seconds

    return order, lambda **seconds: {name: partial(take, name, took) for name, took in seconds.items()}


def test_every_call_has_its_turn_in_each_round(calls_of):
    order, calls = calls_of
    times = take_turns(calls(a=0.01, b=0.02), device=CPU, seconds=60, most=3)
    assert times == {"a": pytest.approx([0.01] * 3), "b": pytest.approx([0.02] * 3)}
    assert "".join(order) == "aabb" + "ab" * 3  # two of each first, which say how many calls make a turn


def test_a_short_call_is_made_many_times_a_turn_after_some_that_are_not_timed(calls_of):
    order, calls = calls_of
    assert take_turns(calls(a=0.002), device=CPU, seconds=0.0) == {"a": pytest.approx([0.002] * 2)}
    assert len(order) == 2 + 2 * (1 + 5)  # ten milliseconds a turn
    order.clear()
    take_turns(calls(a=0.002), device=CPU, seconds=0.0, turn=0.05)
    assert len(order) == 2 + 2 * (5 + 25)  # a fifth of them first, not timed


def test_a_slow_call_leaves_the_rounds_after_two_turns(calls_of):
    _, calls = calls_of
    times = take_turns(calls(slow=0.05, quick=0.01), device=CPU, seconds=0.04, most=2)
    assert (len(times["slow"]), len(times["quick"])) == (2, 2)
    times = take_turns(calls(slow=0.06, quick=0.01, other=0.01), device=CPU, seconds=0.165, most=5)
    assert [len(times[name]) for name in ("slow", "quick", "other")] == [2, 3, 3]


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
    ("values", "mean"), [([4.0], 4.0), ([0.0] * 9 + [6.0], 6.0), ([9.0] * 27 + [1.0, 2.0, 3.0], 2.0)]
)
def test_mean_of_last_takes_a_tenth_and_one_at_least(values, mean):
    assert mean_of_last(values) == mean
