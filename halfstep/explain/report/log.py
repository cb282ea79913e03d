"""The log of a run: an append-only file of JSON lines that a killed process leaves readable."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path

import torch

from halfstep.errors import LogError
from halfstep.explain.report.lines import SCHEMA, START_BYTES, End, Event, Line, SessionLine, Start, check_start, encode
from halfstep.later import AsyncReader
from halfstep.machine import read_machine
from halfstep.records import Finding, Observation, SessionStart, StepRecord, Verdict
from halfstep.version import __version__

LOG_NAME = "run.jsonl"
_LOG = logging.getLogger("halfstep")


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
