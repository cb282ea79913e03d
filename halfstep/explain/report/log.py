"""The log of a run, an append-only file of JSON lines that a killed process leaves readable; other sinks' base."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path

import torch

from halfstep.errors import LogError
from halfstep.explain.report.lines import SCHEMA, START_BYTES, End, Event, Line, SessionLine, Start, check_start, encode
from halfstep.formats import FORMATS, FP16, Format
from halfstep.later import COLUMNS, FLAGS, AsyncReader
from halfstep.machine import read_machine
from halfstep.records import (
    BIAS,
    LIMITS,
    OPERAND,
    UPDATE,
    Finding,
    Observation,
    SessionStart,
    StepRecord,
    StepValues,
    Verdict,
    absorbed_finding,
)
from halfstep.validate import with_near_misses
from halfstep.version import __version__

LOG_NAME = "run.jsonl"
_LOG = logging.getLogger("halfstep")


@with_near_misses
class RunLog(AbstractContextManager["RunLog"]):
    """A sink that logs what a session does to a file: `initialize(..., sinks=[RunLog("run.jsonl")])`.

    If the path is a folder, the log is `run.jsonl` in it. An existing log is continued: pass the same path when a run
    resumes. Each line is written immediately, so a process that is killed loses at most the steps that the device had
    not finished; its log has no end line. No step waits for the device: on a CPU a step is written at once, on a GPU as
    soon as the device has completed it. `close()`, or the end of the process, waits and writes the rest. Each session
    needs its own RunLog.

    Raises:
        LogError: the path cannot be written, or is not a log that this halfstep version can continue.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path)
        self._steps = AsyncReader()
        self._last = 0
        self._has_session = False
        try:
            self.path = self.path / LOG_NAME if self.path.is_dir() else self.path
            self._file = _File(self.path)
        except LogError:
            raise
        except (OSError, ValueError) as error:
            raise LogError(f"{self.path} cannot be written: {reason(error)}; name another file") from None
        self._file.write([Start(SCHEMA, _now(), __version__, str(torch.__version__))])
        self._finish = weakref.finalize(self, _finish, self._steps, self._file)

    def __call__(self, record: StepRecord) -> None:
        """Receives a step's record, without waiting for the device."""
        if not isinstance(record, StepRecord):
            raise LogError(_not_a_record(record))
        self._last = record.step
        self._steps.add(record)
        self._file.write(self._steps.ready())

    def record(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Logs a record that is not a StepRecord; verdicts and findings are stored with the number of the last step."""
        # What is of a step comes after the step, by which a reader knows that a run went back.
        self._file.write(self._steps.ready())
        match record:
            case SessionStart(plan, device, emulated, modules, process):
                if self._has_session:
                    raise LogError(
                        f"this RunLog of {self.path} already has a session; give each session its own RunLog"
                    )
                self._has_session = True
                machine = read_machine(torch.device(device))
                self._file.write([SessionLine(_now(), plan, emulated, modules, machine, process)])
            case Observation():
                self._file.write([record])
            case Verdict() | Finding():
                self._file.write([Event(self._last, record)])
            case _:
                raise LogError(_not_a_record(record))

    def flush(self) -> None:
        """Writes the steps that are not yet written, waiting for the device."""
        self._file.write(self._steps.rest())

    def close(self) -> None:
        """Writes the remaining steps and closes the file; idempotent."""
        self._finish()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._finish.detach() is not None:
            _finish(self._steps, self._file, kind.__name__)
        self.close()


class _File:
    """A log file that lines are appended to, each by one system call; a failed write closes the file for good."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = False
        if path.exists() and path.stat().st_size:
            with path.open("rb") as file:
                check_start(file.readline(START_BYTES), path)
                file.seek(-1, os.SEEK_END)
                cut = file.read() != b"\n"
        self._file = path.open("ab", buffering=0)
        self._path = path
        self._told = False
        if cut:  # the process before was killed within a line: ours must not become part of it
            self._file.write(b"\n")

    def write(self, lines: Iterable[Line]) -> None:
        """Appends lines; if that fails, for example because the disk is full, the log ends and training goes on."""
        for line in map(encode, lines):
            if self._file.closed:
                self._tell("is closed")
                return
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError as error:
                self._tell(f"can no longer be written ({error.strerror})")
                self._file.close()

    def _tell(self, what: str) -> None:
        if not self._told:
            _LOG.warning("the run log %s %s; the run goes on without it", self._path, what)
        self._told = True

    def close(self) -> None:
        self._file.close()


def _not_a_record(record: object) -> str:
    return (
        f"expected a record of halfstep, got {type(record).__name__}: {record!r:.60}; pass the log to "
        "initialize(..., sinks=[log]), and the session writes its records"
    )


def path_of(path: str | os.PathLike[str]) -> Path:
    """Returns a caller's path as a `Path`."""
    if not isinstance(path, (str, os.PathLike)):
        raise LogError(f"{path!r:.60} is not a path; pass the file or its folder as a str or Path")
    return Path(path)


def reason(error: OSError | ValueError) -> str:
    """Returns as text why a file cannot be used (a ValueError: a path that no system allows)."""
    return str(getattr(error, "strerror", None) or error)


def _finish(steps: AsyncReader, file: _File, error: str | None = None) -> None:
    file.write(chain(steps.rest(), [End(_now(), error)]))
    file.close()


def _now() -> float:
    return round(time.time(), 3)


class NumbersSink(AbstractContextManager["NumbersSink"]):
    """The base class of sinks that write a session's steps, observations, verdicts and findings to a run logger.

    The numbers of a step are named `halfstep/loss`, `halfstep/grad_norm`, `halfstep/scale`, `halfstep/skipped` and
    `halfstep/bad_loss`. No step waits for the device. `close()` writes what is left. A failed write ends the logging,
    not the training.
    A subclass defines `write_numbers`, `write_text` and `finish`, and lists in `errors` the exceptions they may raise.
    """

    where = "the logger"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        self._failed = False
        self._steps = AsyncReader()
        self._last = 0
        self._low: Format = FP16

    def __call__(self, record: StepRecord) -> None:
        self._last = record.step
        self._steps.add(record)
        for values in self._steps.ready():
            self._write_step(values)

    def record(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Receives any other record: session starts, observations, verdicts and findings."""
        match record:
            case SessionStart():
                self._low = FORMATS.get(str(record.plan.get("low")), FP16)
            case Observation() if record.absorbed is not None:
                self._use(self.write_text, "finding", str(absorbed_finding(record)), record.step)
            case Observation():
                self._use(self.write_numbers, shares_of(record, self._low), record.step, None)
                self._use(self.write_observation, record)
            case Verdict() | Finding():
                self._use(self.write_text, type(record).__name__.lower(), str(record), self._last)

    def close(self) -> None:
        """Writes what is left, waiting for the device, and calls `finish`; idempotent."""
        for values in self._steps.rest():
            self._write_step(values)
        self._use(self.finish)

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        """Writes a step's numbers by name; `time` is in seconds since 1970, None means now."""
        raise NotImplementedError

    def write_text(self, name: str, text: str, step: int) -> None:
        raise NotImplementedError

    def write_observation(self, seen: Observation) -> None:
        """Writes an observation's histogram, if the logger supports histograms; by default does nothing."""

    def finish(self) -> None:
        """Closes the logger's files or waits for its threads; by default does nothing."""

    def _write_step(self, values: StepValues) -> None:
        found = {f"halfstep/{name}": getattr(values, name) for name in (*COLUMNS, *FLAGS)}
        numbers = {name: float(value) for name, value in found.items() if value is not None}
        self._use(self.write_numbers, numbers, values.step, values.time)

    def _use(self, write: Callable[..., object], *given: object) -> None:
        """Calls `write`; if it fails (full disk, lost server), logging ends with a warning and training goes on."""
        if self._failed:
            return
        try:
            write(*given)
        except self.errors as error:
            self._failed = True
            why = reason(error) if isinstance(error, OSError) else error
            _LOG.warning("%s can no longer be written (%s); the run goes on without it", self.where, why)

    def __exit__(self, *_: object) -> None:
        self.close()


def name_of(seen: Observation) -> str:
    """Returns the full name of an observed tensor: its kind, its module and its name in the module."""
    return f"{seen.kind}/{'.'.join(filter(None, [seen.module or 'model', seen.name]))}"


def shares_of(seen: Observation, low: Format) -> dict[str, float]:
    """Returns the shares of an observed tensor's values that `low` cannot represent, by name."""
    shares: dict[str, float] = {}
    stats, own, name = seen.stats, LIMITS.get(seen.kind), name_of(seen)
    if stats.nonzero:
        shares[f"lost/{name}"] = stats.lost(low) if own is None else stats.below(own.zero) / stats.nonzero
    if seen.kind != UPDATE:
        beyond = stats.exponents[BIAS + 2] / stats.count if seen.kind == OPERAND else stats.saturated(low)
        shares[f"saturated/{name}"] = beyond
    return shares
