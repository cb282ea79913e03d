"""Trains one workload under several plans side by side, and measures speed, memory and accuracy, in given seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from halfstep.errors import WorkloadError
from halfstep.lab.bench.lane import COUNTED, Deal, Local, Origin, Remote, Task, origin_of
from halfstep.lab.bench.tally import Tally, first_batch, foreseen, mean_of_last, result_of
from halfstep.lab.bench.variants import Entry
from halfstep.lab.workloads.workload import Workload
from halfstep.measurements import BenchResult
from halfstep.plan.optable import effective
from halfstep.train.cast.opregistry import MARKERS

# ---- shares a number of seconds among the rows, after a trial of each

SLOW = 5.0  # times the step of O0: a row that takes longer is timed and not trained
TIMED = 3  # steps of such a row, with its trial's last; the least decides: one that other work delayed is no slow row
MANY = 4  # steps as long as the first that do not fit any more end a row's trial after that one
MOST = 1000  # steps of a row that is trained, where the number is not given
WARMUP_STEPS = 5
_TURN = 0.05  # seconds: what a process lost of its caches while another had its turn is nothing against that
_TURNS = 8  # at least, of at least _SHORTEST steps if they have more than one
_SHORTEST, _LONGEST, _COLD = 5, 20, 5
_FOR_SLOW = 2 / 3  # of the time that is left may go to timing rows that may be too slow
_FOR_VALIDATION = 1 / 2


@dataclass(frozen=True)
class Course:
    """What the rows of a benchmark do."""

    steps: int  # of each row from each seed
    untimed: int  # of them, which warm up
    slow: Mapping[int, float] = field(default_factory=dict)  # rows not trained: steps of O0 in one of theirs
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
    turn = min(_LONGEST, math.ceil(_TURN / max(1e-6, min(seconds, default=1.0))), steps // _TURNS)
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
    Course(steps=87, untimed=5, slow={2: 35.0}, seconds=43.5, validate=True, turn=1)
    """
    slow = {row: took / trials[base] for row, took in trials.items() if took > SLOW * trials[base]}
    round_ = sum(took for row, took in trials.items() if row not in slow)
    validations = seeds * validation * round_ / trials[base]
    validate = validations <= _FOR_VALIDATION * left
    each = max(0.0, left - validations * validate) / seeds
    steps = max(1, min(most, int(each / round_)))
    return Course(steps, warmup(steps), slow, each, validate)


# ---- the benchmark

STEPS = 100  # where neither steps nor seconds are given
UNTIMED = COUNTED + 1  # steps of a row that is alone: one warms up when memory is counted no more

Progress = Callable[[str, int, int], None]
"""Called with what is done now, the steps done and the total steps, which is 0 as long as it is not known."""


@dataclass(eq=False)
class _Row(Tally):
    """A row of the benchmark; `losses` has those of the seed that it trains on now."""

    lane: Local | Remote = field(init=False)  # which trains it

    @property
    def name(self) -> str:
        return self.entry.name


class _Told:
    def __init__(self, progress: Progress) -> None:
        self._progress, self.done, self.total = progress, 0, 0

    def now(self, what: str) -> None:
        self._progress(what, self.done, self.total)

    def made(self, what: str) -> None:
        self.done += 1
        self.now(what)


def bench(  # noqa: PLR0913  # what one experiment is; all of it stands in the result
    workload: Workload,
    rows: Sequence[Entry],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    seeds: Iterable[int] = (0,),
    device: torch.device,
    origin: Origin | None = None,
    command: str = "",
    memory: bool = True,
    alone: bool = False,
    within: float | None = None,
    progress: Progress = lambda what, done, total: None,
    clock: Callable[[], float] = perf_counter,
) -> BenchResult:
    """Trains `workload` once per entry of `rows`, from the same weights on the same batches, one step of each in turn.

    Rows of torch.amp, and those for whose op tables torch's dispatcher has no room beside the others, train in
    processes of their own, which load the workload from `origin`.

    First each row makes two steps in which its peak memory is counted, unless `memory` is false. With `seconds` they
    decide how many follow, as `course` says; else `steps` do (100 if nothing is said). With `within` the error
    of each row's gradient is measured before. With `alone` each row has a process of its own, in whose first steps its
    memory is counted; the losses of all steps are kept, and nothing is validated.

    What an entry raises, in halfstep or in the workload, is stored in its row, and the others go on. A
    `KeyboardInterrupt` ends the benchmark and keeps what was measured so far.
    """
    until = None if seconds is None else clock() + seconds
    seeds = tuple(seeds)
    most = _most(steps, seconds, seeds)
    parameters = 0
    # What is alone fails in its own process, as its row's error: a sweep goes on.
    with suppress(*[WorkloadError] * alone), foreseen(f"{workload.name}: building the model"):
        parameters = sum(p.numel() for p in workload.build(seeds[0]).parameters())
    first_batch(workload, seeds[0])  # missing data ends it here, before anything was measured
    started = [row for row in rows if row.refused is None]
    apart = started if alone else _apart(started)
    if origin is None and apart:
        origin = origin_of(workload)
    all_rows = [_Row(row, error=row.refused) for row in rows]
    told = _Told(progress)

    def left() -> float:
        return math.inf if until is None else until - clock()

    taken, complete, deal = Course(most if until is None else 0, warmup(most)), True, Deal(workload, device)
    if alone:
        taken, memory = Course(most, UNTIMED, validate=False), False
    try:
        with ExitStack() as stack:
            running = _open(origin, apart, deal, all_rows, told, stack)
            for row in running if within is not None else ():
                told.now(f"{row.name}: the error of its gradient")
                with row.failing("the gradient of a first batch"):
                    row.gradient_error = row.lane.gradient_error(seeds[0])
            running = _running(running)
            if until is None:
                told.total = (len(seeds) * most + COUNTED * memory) * len(running)
            tried = running if memory or until is not None else ()
            spent = {number: [_trial(row, seeds[0], told, left, counted=memory)] for number, row in enumerate(tried)}
            if until is not None:
                taken = _course(running, spent, left, seeds=len(seeds), most=most, told=told)
            if any(row.entry in apart for row in running):
                taken = replace(taken, turn=turn_of(filter(None, map(min, spent.values())), taken.steps))
            deal.turn = taken.turn
            for seed in seeds:
                taken = _train(running, taken, seed, told, clock, counted=alone)
    except KeyboardInterrupt:
        complete = False
    return result_of(
        workload, all_rows, parameters=parameters, device=device, steps=taken.steps, warmup=taken.untimed,
        turn=taken.turn, seeds=seeds, complete=complete, command=command,
        within=within,
    )  # fmt: skip


def _most(steps: int | None, seconds: float | None, seeds: Sequence[int]) -> int:
    most = STEPS if steps is None and seconds is None else MOST if steps is None else steps
    if most < 1 or not seeds:
        raise WorkloadError(f"expected at least one step and one seed, got steps={most} and {len(seeds)} seeds")
    if seconds is not None and seconds <= 0:
        raise WorkloadError(f"expected more than 0 seconds, got seconds={seconds}")
    return most


def _apart(rows: Sequence[Entry]) -> list[Entry]:
    """Returns the rows that have a process of their own: torch.amp's, and those beyond the op tables of a process."""
    apart = [row for row in rows if row.peer]
    tables: set[Any] = set()
    for row in rows if len(rows) > len(MARKERS) else ():
        actions = frozenset() if row.peer else frozenset(effective(row.plan).items())
        table = actions, row.emulated, row.products
        if actions and table not in tables and len(tables) == len(MARKERS):
            apart.append(row)
        elif actions:
            tables.add(table)
    return apart


def _open(
    origin: Origin | None,
    apart: Sequence[Entry],
    deal: Deal,
    rows: Sequence[_Row],
    told: _Told,
    stack: ExitStack,
) -> list[_Row]:
    """Gives each row a lane, which `stack` closes; returns the rows that run."""
    waiting: list[tuple[_Row, Remote]] = []
    for row in _running(rows):
        with row.failing("start"):
            if row.entry in apart:
                assert origin is not None
                row.lane = Remote(Task(origin, row.entry, deal.device))
                waiting.append((row, row.lane))
            else:
                row.lane = Local(row.entry, deal)
            stack.callback(row.lane.close)
    for row, remote in waiting:
        told.now(f"{row.name}: starting its process")
        with row.failing("start"):
            remote.ready()
    return _running(rows)


def _trial(row: _Row, seed: int, told: _Told, left: Callable[[], float], *, counted: bool) -> float:
    """Makes the first steps of a row, which count its memory, and returns the seconds of the last one."""
    # One step is all where few more of its length would fit into the time `left`; the peak is then not known.
    spent, before = 0.0, 0.0
    with row.failing():
        told.now(f"{row.name}: building the model")
        row.lane.begin(seed, counted=counted)
    for number in range(COUNTED):
        if number and (before - left()) * MANY > left():
            counted = False
            break
        with row.failing("counting memory" if counted else "trial"):
            told.now(f"{row.name}: trial")
            before = left()
            if row.error is None:
                spent = row.lane.step(number, COUNTED).ms / 1e3
                told.made(f"{row.name}: trial")
    if row.error is None:
        with row.failing("counting memory"):
            end = row.lane.end(validate=False)
            row.peak, row.memory = end.peak if counted else None, end.memory
    return spent


def _course(
    rows: Sequence[_Row],
    spent: dict[int, list[float]],
    left: Callable[[], float],
    *,
    seeds: int,
    most: int,
    told: _Told,
) -> Course:
    _time_slow(rows, spent, told, left)
    trials, base = _tried(rows, spent)
    if not trials:
        return Course(most, warmup(most))
    told.now(f"{rows[base].name}: trial of the validation")
    validation = 0.0
    with rows[base].failing("trial of the validation"):
        validation = rows[base].lane.gauge()
    taken = course(trials, base, left=left(), validation=validation, seeds=seeds, most=most)
    for number, factor in taken.slow.items():
        rows[number].slow = factor
        rows[number].times_ms = [1e3 * took for took in spent[number]]
    told.total = told.done + seeds * taken.steps * (len(trials) - len(taken.slow))
    return taken


def _tried(rows: Sequence[_Row], spent: Mapping[int, list[float]]) -> tuple[dict[int, float], int]:
    """Returns the least seconds of a step of each row that runs, and the row of O0, or else the fastest."""
    least = {number: min(took) for number, took in spent.items() if rows[number].error is None}
    return least, min(least, key=lambda row: (rows[row].entry.level != "O0", least[row]), default=0)


def _time_slow(rows: Sequence[_Row], spent: dict[int, list[float]], told: _Told, left: Callable[[], float]) -> None:
    """Times steps of each row that may be too slow and of O0, in turn, until there are `TIMED`."""
    until = (1 - _FOR_SLOW) * left()
    for made in range(COUNTED, COUNTED + TIMED - 1):
        least, base = _tried(rows, spent)
        slow = [number for number, took in least.items() if took > SLOW * min(least.values())]
        again = {base, *slow} if slow else set()
        if left() - sum(least[number] for number in again) < until:
            return
        for number in sorted(again):
            told.now(f"{rows[number].name}: trial")
            with rows[number].failing("trial"):
                spent[number].append(rows[number].lane.step(made, COUNTED + TIMED).ms / 1e3)


def _train(
    rows: Sequence[_Row], taken: Course, seed: int, told: _Told, clock: Callable[[], float], *, counted: bool
) -> Course:
    trained = [row for row in rows if row.slow is None]
    for row in trained:
        row.losses = []
    for row in _running(trained):
        with row.failing():
            row.lane.begin(seed, counted=counted)
    try:
        made = _take_turns(trained, taken, seed, told, clock)
    finally:
        for row in trained:
            row.train_loss += [mean_of_last(row.losses)] if row.losses else []  # it may have ended early
            row.losses = row.losses if counted else []  # a file has those of sweeps
    for row in _running(trained):
        with row.failing(f"evaluation after seed {seed}"):
            told.now(f"{row.name}: evaluation after seed {seed}")
            row.add_end(row.lane.end(validate=taken.validate))
    return taken if taken.seconds is None else replace(taken, steps=made, seconds=None)


def _take_turns(rows: Sequence[_Row], taken: Course, seed: int, told: _Told, clock: Callable[[], float]) -> int:
    """Makes the steps of all rows, a turn of each after the other, and returns how many each has made."""
    until = math.inf if taken.seconds is None else clock() + taken.seconds
    for first in range(0, taken.steps, taken.turn):
        running = _running(rows)
        if not running or (first and clock() >= until):
            return first
        ahead = first // taken.turn % len(running)  # so that none always follows the same other
        for row in running[ahead:] + running[:ahead]:
            for step in range(first, min(first + taken.turn, taken.steps)):
                if row.error is not None:
                    break
                told.now(f"{row.name}: seed {seed}")
                with row.failing(f"step {step + 1} of seed {seed}"):
                    made = row.lane.step(step, taken.steps)
                    row.losses.append(made.loss)
                    if step >= taken.untimed and step % taken.turn >= taken.cold:
                        row.times_ms.append(made.ms)
                told.made(f"{row.name}: seed {seed}")
    return taken.steps


def _running(rows: Sequence[_Row]) -> list[_Row]:
    return [row for row in rows if row.error is None]
