"""Shares a number of seconds among the rows of a benchmark, after a trial of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

SLOW = 5.0  # times the step of O0: a row that takes longer is timed and not trained
TIMED = 3  # steps of such a row
MANY = 4  # steps as long as the first that do not fit any more end a row's trial after that one
MOST = 1000  # steps of a row that is trained, where the number is not given
WARMUP_STEPS = 5
_TURN = 0.05  # seconds: what a process lost of its caches while another had its turn is nothing against that
_TURNS = 8  # at least, of at least _SHORTEST steps if they have more than one
_SHORTEST, _LONGEST, _COLD = 5, 20, 5
_FOR_SLOW = 2 / 3  # of the time that is left may go to rows that are not trained
_FOR_VALIDATION = 1 / 2


@dataclass(frozen=True)
class Course:
    """What the rows of a benchmark do."""

    steps: int  # of each row from each seed
    untimed: int  # of them, which warm up
    slow: Mapping[int, float] = field(default_factory=dict)  # rows not trained: steps of O0 in one of theirs
    timed: int = 0  # steps of these; 0: their trial alone
    seconds: float | None = None  # of one seed without the validation; None: as long as it takes
    validate: bool = True  # False if it would take too long
    turn: int = 1  # steps of a row before it is another's turn

    @property
    def cold(self) -> int:
        """How many steps at the start of each turn are not timed."""
        return self.turn // _COLD


def warmup(steps: int) -> int:
    """Returns how many steps at the start of each seed's run are not timed.

    >>> warmup(100), warmup(10), warmup(1)
    (5, 2, 0)
    """
    return min(WARMUP_STEPS, steps // 5)


def turn_of(seconds: Iterable[float], steps: int) -> int:
    """Returns how many steps rows in different processes make in a turn, so that a turn is not too short to measure.

    The first steps after a wait take longer: 0.5 ms in a process whose caches another has used in the meantime. Rows
    that share a process do not have that, so that single short steps would be unfair to the row that does not share.

    >>> turn_of([0.2, 0.3], 100), turn_of([0.005, 0.006], 100), turn_of([0.0005], 1000)
    (1, 10, 20)
    """
    turn = min(_LONGEST, ceil(_TURN / max(1e-6, min(seconds, default=1.0))), steps // _TURNS)
    return turn if turn >= _SHORTEST else 1


def course(
    trials: Mapping[int, float],
    base: int,
    *,
    left: float,
    validation: float,
    seeds: int,
    most: int,
) -> Course:
    """Returns what the rows can do in `left` seconds.

    `trials` has the seconds of a step of each row, `base` is the row of O0, and `validation` the seconds of a
    validation of that row; one of another row takes as much longer as its step. Rows that are trained make the same
    number of steps, at least one and at most `most`.

    >>> course({0: 0.2, 1: 0.3, 2: 7.0}, 0, left=45.0, validation=0.6, seeds=1, most=1000)
    Course(steps=45, untimed=5, slow={2: 35.0}, timed=3, seconds=43.5, validate=True, turn=1)
    """
    slow = {row: took / trials[base] for row, took in trials.items() if took > SLOW * trials[base]}
    round_ = sum(took for row, took in trials.items() if row not in slow)
    validations = seeds * validation * round_ / trials[base]
    validate = validations <= _FOR_VALIDATION * left
    left = max(0.0, left - validations * validate)
    of_slow = sum(trials[row] for row in slow)
    timed = min(TIMED, int(_FOR_SLOW * left / of_slow)) if slow else 0
    each = max(0.0, left - timed * of_slow) / seeds
    steps = max(1, min(most, int(each / round_)))
    return Course(steps, warmup(steps), slow, timed, each + timed * of_slow, validate)
