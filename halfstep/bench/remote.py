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

from halfstep.bench.worker import Task
from halfstep.errors import WorkloadError

_LINES = 3  # of what a process said last before it died


class OutOfMemory(WorkloadError):
    """A configuration did not fit into memory."""


class Remote:
    """A process that trains one configuration: `started` waits for its model, and each `step` makes one step."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `__exit__`
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

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for each in (self._process.stdin, self._process.stdout, self._errors):
            assert each is not None
            with suppress(BrokenPipeError):  # a line that a dead process never took
                each.close()

    def started(self) -> dict[str, Any]:
        """Waits until the model is built and returns its number of parameters and of training examples.

        Raises:
            OutOfMemory: the model did not fit into memory.
            WorkloadError: the model could not be built, or the process died.
        """
        return self._answer()

    def step(self) -> dict[str, Any]:
        """Makes a step in the process and returns its loss, time and energy.

        The call after the last step makes no step and returns the peak memory, skipped steps and loss scale.

        Raises the same errors as `started`.
        """
        self._send("")
        return self._answer()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._death()
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
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
