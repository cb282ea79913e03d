"""Starts a worker process, tells it when to make a step, and reads its answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

import msgspec

from halfstep.bench.lane import Begun, End, Step
from halfstep.bench.worker import Task
from halfstep.errors import WorkloadError

_LINES = 3  # of what a process said last before it died


class OutOfMemory(WorkloadError):
    """A configuration did not fit into memory."""


class Remote:
    """A `Lane` in a process of its own, which starts at once: it trains where no session of another row is open.

    Each call raises `OutOfMemory` if the process ran out of memory, and `WorkloadError` if something else failed in it
    or it died.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_ready = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "halfstep.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the one who deals
        )
        self._send(msgspec.json.encode(task).decode())

    def ready(self) -> None:
        """Waits until the process has loaded its workload, so that what loading takes is nobody's step."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True

    def begin(self, seed: int, *, counted: bool = False) -> Begun:
        """Builds the model of a seed, in the place of an earlier one."""
        return msgspec.convert(self._ask("begin", seed=seed, counted=counted), Begun)

    def step(self, number: int, steps: int) -> Step:
        """Makes one training step."""
        return msgspec.convert(self._ask("step", number=number, steps=steps), Step)

    def gauge(self) -> float:
        """Returns about how many seconds a validation takes."""
        return float(self._ask("gauge"))

    def end(self, *, validate: bool) -> End:
        """Returns what the run has come to."""
        return msgspec.convert(self._ask("end", validate=validate), End)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            assert each is not None
            with suppress(BrokenPipeError):  # a line that a dead process never took
                each.close()

    def _ask(self, what: str, **given: object) -> Any:
        self.ready()
        self._send(json.dumps([what, given]))
        return self._answer()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._death()
        said = json.loads(line)
        if isinstance(said, dict) and "error" in said:
            raise (OutOfMemory if said["memory"] else WorkloadError)(said["error"])
        return said

    def _death(self) -> WorkloadError:
        code = self._process.wait()
        self._errors.seek(0)
        last = " ".join(self._errors.read().decode(errors="replace").strip().splitlines()[-_LINES:])
        if code == -signal.SIGKILL and os.name == "posix":
            return OutOfMemory("out of memory: the system killed the process")
        if self._task.limit is not None:  # libraries such as OpenMP's end a process that gets no memory
            return OutOfMemory(f"out of memory: the process ended with code {code} under its limit; it wrote: {last}")
        return WorkloadError(f"the process ended with code {code}; it wrote: {last or 'nothing'}")
