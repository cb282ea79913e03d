"""Reads the log of a run, and compares the logs that its processes wrote."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from halfstep.errors import LogError
from halfstep.explain.report.lines import START_BYTES, End, Event, Line, SessionLine, Start, check_start, decode
from halfstep.explain.report.log import LOG_NAME, path_of, reason
from halfstep.kinds import Kind
from halfstep.machine import Machine
from halfstep.records import Observation, StepValues, Verdict
from halfstep.validate import with_near_misses

_SHOWN = 3  # notes of one kind


@dataclass(frozen=True)
class Process:
    """One process that wrote a log."""

    start: float  # seconds since 1970, as `end`
    end: float
    halfstep: str  # its version, as `torch`
    torch: str
    closed: bool = False  # False if it was killed or is still running
    error: str | None = None  # the class of the exception that ended its `with` statement
    first_step: int | None = None  # the number of the first step that it logged


@dataclass(frozen=True)
class Run:
    """The content of a run log; if the run went back and repeated steps, only the last repetition counts.

    `plan` (in the form of `plan.io.to_dict`), `emulated`, `modules`, `machine` and `process` (the rank if several
    processes train together) describe the last session, and are None or empty if there was no session. `observed` are
    the steps that have observations. `notes` say what is missing or damaged. `returns` has a (line, step) pair for each
    time that the run went back to a step. `end` is the number of the last line that was read.
    """

    path: Path
    processes: tuple[Process, ...]
    steps: tuple[StepValues, ...]
    observed: tuple[int, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...]
    returns: tuple[tuple[int, int], ...]  # (line, step) where the run went back to a step
    end: int
    plan: dict[str, Any] | None = None
    emulated: bool | None = None
    modules: tuple[str, ...] = ()
    machine: Machine | None = None
    process: int | None = None

    def observations(self) -> Iterator[Observation]:
        """Yields the observations, read from the file anew each time: there may be more than fit into memory."""
        lines = [line for line, _ in self.returns]
        # the lowest step that the run went back to at this return or a later one
        floors = [*accumulate((step for _, step in reversed(self.returns)), min)][::-1]
        for number, line in _lines(self.path):
            if number > self.end:
                return
            if isinstance(line, Observation):
                later = bisect_right(lines, number)
                if later == len(lines) or line.step < floors[later]:
                    yield line


@with_near_misses
def read_log(path: str | os.PathLike[str]) -> Run:
    """Returns what a run log holds; `path` is the log's file or folder.

    A damaged line, such as the last line of a process that was killed, is left out and noted.

    Raises:
        LogError: there is no log, or the file is empty, of another schema, or not a run log.
    """
    file = path_of(path)
    try:
        file = find_log(file)
        with file.open("rb") as opened:
            check_start(opened.readline(START_BYTES), file)
        found = _Found()
        for number, line in _lines(file):
            found.take(number, line)
    except OSError as error:
        raise LogError(f"{file} cannot be read: {reason(error)}") from None
    return found.run(file)


def shown(path: str | os.PathLike[str]) -> str:
    """Returns a path as printable text, even if the file's name is not valid UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def find_log(path: Path) -> Path:
    """Returns the log file at `path`, which is the file itself or its folder."""
    if not path.is_dir():
        if not path.exists():
            raise LogError(f"there is no file {path}; name the log of a run, or its folder")
        return path
    usual = path / LOG_NAME
    found = [usual] if usual.is_file() else sorted(path.glob("*.jsonl"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        what = f"has no {LOG_NAME} and not exactly one other .jsonl file (found: {names})"
        raise LogError(f"the folder {path} {what}; name the log file")
    return found[0]


def _lines(path: Path) -> Iterator[tuple[int, Line | str]]:
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            if not data.strip():
                continue
            try:
                line: Line | str = decode(data)
            except (msgspec.ValidationError, UnicodeDecodeError) as error:
                line = f"is not a line of a run log ({error})"
            except msgspec.DecodeError:
                line = "is damaged" if data.endswith(b"\n") else "was cut (its process was killed, or its disk full)"
            yield number, line


@dataclass
class _Found:
    """Collects what the lines of a log hold, one line at a time; its method `run` makes a Run of it."""

    processes: list[Process] = field(default_factory=list)
    session: SessionLine | None = None  # the last one
    steps: list[StepValues] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    observed: set[int] = field(default_factory=set)
    returns: list[tuple[int, int]] = field(default_factory=list)
    wentback: list[str] = field(default_factory=list)  # a note of the Run, as `damaged`
    damaged: list[str] = field(default_factory=list)
    end: int = 0

    def take(self, number: int, line: Line | str) -> None:
        if not isinstance(line, str):
            self.end = number
        match line:
            case Start():
                self.processes.append(Process(line.time, line.time, line.halfstep, line.torch))
            case SessionLine():
                self.session = line
                self._lives_until(line.time)
            case End():
                self._lives_until(line.time, closed=True, error=line.error)
            case StepValues():
                self._lives_until(line.time)
                self._step(number, line)
            case Observation():
                self.observed.add(line.step)
            case Event():
                self.events.append(line)
            case str():
                self.damaged.append(f"line {number} {line}")

    def _lives_until(self, time: float, **end: Any) -> None:
        last = self.processes[-1]
        self.processes[-1] = replace(last, end=max(last.end, time), **end)

    def _step(self, number: int, values: StepValues) -> None:
        if self.processes[-1].first_step is None:
            self.processes[-1] = replace(self.processes[-1], first_step=values.step)
        if self.steps and values.step <= self.steps[-1].step:
            before = len(self.steps)
            while self.steps and values.step <= self.steps[-1].step:
                self.steps.pop()
            self.returns.append((number, values.step))
            self.observed = {step for step in self.observed if step < values.step}
            self.wentback.append(
                f"line {number}: the run went back to step {values.step}; {before - len(self.steps)} earlier steps "
                "from there on are left out"
            )
        self.steps.append(values)

    def run(self, path: Path) -> Run:
        notes = self.wentback[:_SHOWN]
        if len(self.wentback) > _SHOWN:
            notes.append(
                f"the run went back {len(self.wentback)} times in all; if several processes wrote this log at once, "
                "give each process its own log"
            )
        if self.damaged:
            shown = "; ".join(self.damaged[:_SHOWN]) + ("; ..." if len(self.damaged) > _SHOWN else "")
            notes.append(f"{len(self.damaged)} of the lines cannot be read and are left out: {shown}")
        if self.session is None:
            notes.append(
                "no session is in the log, so its plan and machine are unknown; pass sinks=[RunLog(path)] to initialize"
            )
        if not self.steps:
            notes.append("no step is in the log")
        if not self.observed:
            notes.append("no tensor was observed: call session.observe(...) for histograms and heat maps")
        last = {} if self.session is None else msgspec.structs.asdict(self.session)
        return Run(
            path=path,
            processes=tuple(self.processes),
            steps=tuple(self.steps),
            observed=tuple(sorted(self.observed)),
            events=tuple(self.events),
            notes=tuple(notes),
            returns=tuple(self.returns),
            end=self.end,
            **{name: value for name, value in last.items() if name != "time"},
        )


# ---- the logs of several processes of one run


@dataclass(frozen=True)
class ProcessRow:
    """What one process logged; `overflow` is the first step and place with a value that is not finite, or None."""

    process: int
    run: Run
    overflow: tuple[int, str] | None


PROCESSES: Mapping[str, Callable[[ProcessRow], object]] = {  # the columns of their table
    "process": lambda row: row.process,
    "log": lambda row: shown(row.run.path),
    "steps": lambda row: f"{steps[0].step:,} to {steps[-1].step:,}" if (steps := row.run.steps) else "none",
    "skipped": lambda row: f"{sum(values.skipped for values in row.run.steps):,}",
    "loss scale": lambda row: f"{row.run.steps[-1].scale:g}" if row.run.steps else "",
    "first not finite": lambda row: "" if row.overflow is None else f"step {row.overflow[0]:,}: {row.overflow[1]}",
}


def rows_of(runs: Sequence[Run]) -> tuple[ProcessRow, ...]:
    """Returns a row for each process, in the order of their numbers; `runs` has one log for each process."""
    longest = max(runs, key=lambda run: len(run.steps))
    for run in runs:
        if run is not longest and (why := _apart(longest, run)):
            raise LogError(
                f"{longest.path} and {run.path} are not of one run: {why}; pass one log of each process of the same run"
            )
    rows: dict[int, ProcessRow] = {}
    for index, run in enumerate(runs):
        number = index if run.process is None else run.process
        if number in rows:
            both = f"{rows[number].run.path} and {run.path}"
            raise LogError(f"{both} are both of process {number}; pass one log of each process of a run")
        rows[number] = ProcessRow(number, run, min(_overflows(run), key=lambda seen: seen[0], default=None))
    return tuple(rows[number] for number in sorted(rows))


def first_overflow(rows: Sequence[ProcessRow]) -> str | None:
    """Returns which process first logged a value that is not finite, and where; None if no process did."""
    first = min((row.overflow[0] for row in rows if row.overflow), default=None)
    said = [f"process {row.process}: {row.overflow[1]}" for row in rows if row.overflow and row.overflow[0] == first]
    return f"first not finite, at step {first:,}: {'; '.join(said)}" if said else None


def _apart(first: Run, second: Run) -> str | None:
    begun = [min(each.start for each in run.processes) for run in (first, second)]
    ended = [max(each.end for each in run.processes) for run in (first, second)]
    mine, theirs = ({each.step: each for each in run.steps} for run in (first, second))
    at, other = min(mine, default=0), min(theirs, default=0)
    for apart, why in (
        (first.path.resolve() == second.path.resolve(), "they are the same file"),
        (first.plan != second.plan, "their plans differ"),
        (first.modules != second.modules, "their modules differ"),
        (max(begun) > min(ended), "one had ended before the other began"),
        (mine and theirs and at != other, f"one begins with step {at:,}, the other with step {other:,}"),
    ):
        if apart:
            return why
    for step in sorted(mine.keys() & theirs.keys()):
        if mine[step].skipped != theirs[step].skipped:
            return f"only one skipped step {step:,}"
        if mine[step].scale != theirs[step].scale:
            return f"step {step:,} had a loss scale of {mine[step].scale:g} in one, {theirs[step].scale:g} in the other"
    return None


def _overflows(run: Run) -> Iterator[tuple[int, str]]:
    for event in run.events:
        if isinstance(event.record, Verdict) and event.record.kind != Kind.ANOTHER_PROCESS:
            yield event.step, f"{event.record.operator} in {event.record.place} ({event.record.phase})"
    for seen in run.observations():
        if seen.absorbed is None and seen.stats.infinities + seen.stats.nans:
            yield seen.step, f"{seen.kind} of {'.'.join(filter(None, (seen.module, seen.name)))}"
    for values in run.steps:
        if values.loss is not None and not math.isfinite(values.loss):
            yield values.step, "its loss"
