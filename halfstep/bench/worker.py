"""The process that trains one row of a benchmark: does one thing for each line on its standard input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch

from halfstep.bench.lane import COUNTED, Deal, Local
from halfstep.bench.limits import limit_memory
from halfstep.bench.tally import reason, settings_of
from halfstep.bench.variants import Entry
from halfstep.cast.opregistry import REGISTRY
from halfstep.errors import WorkloadError
from halfstep.formats import as_format
from halfstep.torch_internals import is_out_of_memory
from halfstep.workloads.load import WORKLOADS, load_model
from halfstep.workloads.workload import Workload


class Origin(msgspec.Struct, frozen=True):
    """Where a workload comes from, so that another process can load the same: what `load_model` takes, as text."""

    model: str
    settings: dict[str, str]
    data: str | None = None

    def load(self) -> Workload:
        """Returns the workload."""
        return load_model(self.model, self.settings, data=None if self.data is None else Path(self.data))


def origin_of(workload: Workload) -> Origin:
    """Returns the origin of one of halfstep's own workloads."""
    if WORKLOADS.get(workload.name) is not type(workload):
        raise WorkloadError(
            f"torch.amp trains in a process of its own, which cannot load {type(workload).__name__}; pass "
            "origin=Origin('path.py:function', settings), or leave the rows of torch.amp out"
        )
    return Origin(workload.name, settings_of(workload), None if workload.data is None else str(workload.data))


class Task(msgspec.Struct, frozen=True):
    """What a worker process trains: a workload under a level and format.

    `limit` is the number of bytes that the process may allocate, counted from when it builds the model; None: no limit.
    """

    origin: Origin
    device: str
    level: str
    low: str
    peer: bool
    emulated: bool
    compiled: bool
    scaled: bool
    threads: int
    limit: int | None = None

    @property
    def entry(self) -> Entry:
        """The row that this task measures."""
        return Entry(
            self.level, as_format(self.low), self.peer, self.emulated, compiled=self.compiled, scaled=self.scaled
        )


def task_of(origin: Origin, entry: Entry, device: torch.device) -> Task:
    """Returns the task of a row, to be made with as many threads as this process has."""
    return Task(
        origin, str(device), entry.level, entry.low.name, entry.peer, entry.emulated, entry.compiled, entry.scaled,
        torch.get_num_threads(),
    )  # fmt: skip


class Worker:
    """A lane that does what it is asked by name, with the arguments of `Lane`'s methods."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self._task = task
        self._deal = Deal(task.origin.load(), torch.device(task.device))
        self._lane = Local(task.entry, self._deal)
        self._does: dict[str, Callable[..., Any]] = {
            "begin": self._begin,
            "step": self._lane.step,
            "gauge": self._lane.gauge,
            "end": self._end,
        }

    def answer(self, what: str, given: dict[str, Any]) -> Any:
        """Does what is asked and returns what it comes to."""
        return self._does[what](**given)

    def _begin(self, seed: int, counted: bool) -> Any:
        for number in range(COUNTED):
            self._deal.batch(seed, number)  # data in memory is not the step's
        if self._task.limit is not None:
            limit_memory(self._task.limit, self._deal.device)
        return self._lane.begin(seed, counted=counted)

    def _end(self, validate: bool) -> Any:
        assert not (self._task.peer and REGISTRY.kernels), "a session is open in the process of a peer"
        return self._lane.end(validate=validate)


def _say(answer: TextIO, said: Any) -> None:
    answer.write(json.dumps(msgspec.to_builtins(said)) + "\n")
    answer.flush()


def main() -> None:
    """Reads a task from the first line of stdin and answers each further line; an error is the last answer."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a workload prints is no answer
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    try:
        worker = Worker(task)
        _say(answer, "ready")
        while line := sys.stdin.readline():
            _say(answer, worker.answer(*json.loads(line)))
    except Exception as error:  # whatever a user's workload raises
        memory = is_out_of_memory(error)
        _say(answer, {"error": f"out of memory: {error}" if memory else reason(error), "memory": memory})


if __name__ == "__main__":
    main()
