"""Trains a row of a benchmark in a process of its own, which loads its workload and is asked for one step at a time."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import WorkloadError
from halfstep.lab.bench.tally import settings_of
from halfstep.lab.bench.variants import Entry
from halfstep.lab.workloads.load import WORKLOADS, load_workload
from halfstep.lab.workloads.workload import Workload

_LINES = 3  # of what a process said last before it died


@dataclass(frozen=True)
class Origin:
    """Where a workload comes from, so that another process can load the same: what `load_workload` takes."""

    model: str
    settings: dict[str, str]
    data: Path | None = None

    def load(self) -> Workload:
        return load_workload(self.model, self.settings, data=self.data)


def origin_of(workload: Workload) -> Origin:
    """Returns the origin of one of halfstep's own workloads."""
    if WORKLOADS.get(workload.name) is not type(workload):
        raise WorkloadError(
            "torch.amp, and each row after five with other op tables, train in processes of their own, which cannot "
            f"load {type(workload).__name__}; pass origin=Origin('path.py:function', settings), or leave them out"
        )
    return Origin(workload.name, settings_of(workload), workload.data)


@dataclass(frozen=True)
class Task:
    """What a process trains: a row of a benchmark, with as many threads as this process has."""

    origin: Origin
    entry: Entry
    device: torch.device
    threads: int = field(default_factory=torch.get_num_threads)


class OutOfMemory(WorkloadError):
    """A configuration did not fit into memory."""


class Remote:
    """Trains one row as `Local` does, in a process that starts at once: where no session of another row is open.

    Raises `OutOfMemory` where its memory ran out, and `WorkloadError` where something else failed in it.
    """

    def __init__(self, task: Task) -> None:
        self._is_ready, self._is_limited = False, False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "halfstep.lab.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for the one who deals
        )
        self._send(task)

    def ready(self) -> None:
        """Waits until the process has loaded its workload, so that what loading takes is nobody's step."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def __getattr__(self, what: str) -> Callable[..., Any]:
        """Returns a function that calls this method of the process's `Local`."""

        def ask(*given: object, **named: object) -> Any:
            self.ready()
            self._is_limited |= named.get("limit") is not None
            self._send((what, given, named))
            return self._answer()

        return ask

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            assert each is not None
            with suppress(BrokenPipeError):  # a line that a dead process never took
                each.close()

    def _send(self, asked: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            pickle.dump(asked, self._process.stdin)
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            said = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        if isinstance(said, WorkloadError):
            raise said
        return said

    def _death(self) -> WorkloadError:
        code = self._process.wait()
        self._errors.seek(0)
        last = " ".join(self._errors.read().decode(errors="replace").strip().splitlines()[-_LINES:])
        if code == -signal.SIGKILL and os.name == "posix":
            return OutOfMemory("out of memory: the system killed the process")
        if self._is_limited:  # libraries such as OpenMP's end a process that gets no memory
            return OutOfMemory(f"out of memory: the process ended with code {code} under its limit; it wrote: {last}")
        return WorkloadError(f"the process ended with code {code}; it wrote: {last or 'nothing'}")
