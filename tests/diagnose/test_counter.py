"""The counter of skips: when it asks for a look, without waiting for a device."""

import pytest
import torch

from halfstep import later
from halfstep.explain.diagnose import counter
from halfstep.explain.diagnose.counter import WINDOW, Counter

PARTS = (object(),)


def counted(counter, flags, scale):
    """Gives a counter steps at one scale; returns the numbers of those after which it asks for a look."""
    steps = [counter.count(PARTS, torch.tensor(bool(flag)), None, {0: torch.tensor(scale)}) for flag in flags]
    return [number for number, found in enumerate(steps, 1) if found is not None]


@pytest.mark.parametrize(
    ("flags", "looks"),
    [
        ([0, *[1] * (WINDOW - 1), *[0] * 20], []),
        ([1] * WINDOW + [0] * 20, [WINDOW + 1]),
        ([0, *[1] * WINDOW, *[0] * 20], [2 * WINDOW + 1]),  # over two windows, with a step that is fine in each
        ([0, *[1] * (WINDOW - 1), 0, *[1] * (WINDOW - 1), *[0] * 20], []),
        ([1] * (WINDOW - 2) + [0] * 20, []),
    ],
)
def test_skips_are_counted_in_a_row(flags, looks):
    assert counted(Counter(1.0), flags, 2.0) == looks


@pytest.mark.parametrize(("scale", "looks"), [(1.0, [WINDOW + 1]), (1.5, [])])
def test_one_skip_is_enough_where_the_scale_lies_at_its_floor(scale, looks):
    assert counted(Counter(1.0), [0, 1] + [0] * 20, scale) == looks


def alarms(pattern, floor, *, bad):
    """What a counter says of steps of which those with an x are skipped, for a bad loss or not: (mild, number)."""
    counts, found = Counter(floor), []
    for number, each in enumerate(pattern, 1):
        flag = torch.tensor(each == "x")
        alarm = counts.count(PARTS, flag, flag if bad else ~flag & flag, {0: torch.tensor(64.0)})
        found += [(alarm[2], number)] if alarm is not None else []
    return found


@pytest.mark.parametrize(
    ("floor", "bad"), [(0.0, False), (0.0, True), (1.0, True)], ids=["fixed", "fixed, bad loss", "dynamic, bad loss"]
)
@pytest.mark.parametrize(
    ("pattern", "looks"),
    [
        (27 * "." + 3 * (26 * "." + "x") + 20 * ".", []),  # 3 in 80
        ("x" + 3 * (26 * "." + "x") + 20 * ".", []),  # 4 in 82
        ("x" + 2 * (26 * "." + "x") + 24 * "." + "x" + 20 * ".", [(True, 81)]),  # 4 in 80
        (6 * "......x" + 100 * "..........x", [(True, 33)]),  # once
        ("...xxx....xxx" + 30 * ".", [(True, 17)]),  # 3 in a row, twice
        (50 * "x.", [(True, 9), (False, 81)]),  # half of 80
        (50 * "x..", [(True, 17)]),
        (20 * "." + 8 * "x" + 20 * ".", [(False, 33)]),  # in a row
    ],
)
def test_skips_that_no_falling_scale_ends_are_counted_by_share_too(pattern, looks, floor, bad):
    assert alarms(pattern, floor, bad=bad) == looks


def test_skips_that_lower_the_scale_are_counted_in_a_row_alone():
    assert alarms(50 * "x.", 1.0, bad=False) == []


class Late(later.Later):
    """Numbers of a device that come when they are told to."""

    come = False

    def arrived(self):
        return Late.come


def test_what_is_still_on_its_way_from_a_gpu_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(counter, "Later", Late)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Late, "come", False)
    counts = Counter(1.0)
    assert counted(counts, [0] + [1] * (3 * WINDOW), 2.0) == []
    monkeypatch.setattr(Late, "come", True)
    assert counted(counts, [0], 2.0) == []  # the first window, with one step that was fine
    assert counted(counts, [0], 2.0) == [1]  # all that came meanwhile, in one piece
