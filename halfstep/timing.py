"""Interleaved timing: the compared calls take turns, so that a temporary slowdown of the machine affects all alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from time import perf_counter, process_time

import torch

from halfstep.measurements import Spread

_TURN = 1e-2  # seconds that a turn takes at least: many calls where one is shorter
STEADY = 5e-2  # the same where what counts is the speed of a kernel that runs again and again
_WARM = 5  # of a turn's calls as many again are made before it, divided by this
_PAIRS = 5  # that a median of ratios takes at least, where more of one side were timed


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished its work; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock for steps on a device, in seconds."""
    return process_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    seconds: float,
    least: int = 2,
    most: int = 25,
    turn: float = _TURN,
) -> dict[str, list[float]]:
    """Returns a list for each function, by name: entry i has the seconds of one call, the mean over round i."""
    # Before a turn of several calls some are not timed, since the first calls after another function's turn are slower.
    # A function that takes more than twice its equal share drops out after `least` rounds, and leaves the time to all.
    repeats = {name: _repeats(call, device, turn) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    share, start = seconds / max(1, len(calls)), perf_counter()
    for done in range(most):
        if done >= least and perf_counter() - start > seconds:
            break
        for name, call in calls.items():
            if done < least or sum(times[name]) * repeats[name] < 2 * share:
                times[name].append(_turn(call, repeats[name], device))
    return times


def _repeats(call: Callable[[], object], device: torch.device, turn: float) -> int:
    call()  # what is compiled, allocated or looked up at first
    return max(1, min(1000, math.ceil(turn / max(_turn(call, 1, device), 1e-7))))


def _turn(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    for _ in range(math.ceil(repeats / _WARM) if repeats > 1 else 0):
        call()
    synchronize(device)
    start = perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (perf_counter() - start) / repeats


def spread(values: Sequence[float]) -> Spread | None:
    """Returns the median and quartiles of the values; None if there are none."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high, len(values))


def speedup(baseline: Sequence[float], times: Sequence[float]) -> float | None:
    """Returns the median of the ratios of baseline to time in rounds; of fewer than five rounds, the ratio of medians.

    >>> speedup([2.0, 4.0, 30.0], [1.0, 2.0, 10.0]), speedup([9.0, 4.0, 4.0, 4.0], [2.0, 2.0])
    (2.0, 2.0)
    """
    if len(times) != len(baseline) and 0 < min(len(times), len(baseline)) < _PAIRS:
        return median(baseline) / median(times)
    ratios = [a / b for a, b in zip(baseline, times, strict=False)]
    return median(ratios) if ratios else None
