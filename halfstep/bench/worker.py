"""The process that trains one configuration of a sweep: makes a training step for each line on its standard input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch

from halfstep.bench.limits import energy_meter, limit_memory
from halfstep.bench.memory import counting
from halfstep.bench.tally import reason
from halfstep.bench.variants import Entry, timed_step
from halfstep.formats import as_format
from halfstep.torch_internals import is_out_of_memory
from halfstep.workloads.load import load_model

COUNTED, UNTIMED = 2, 1  # steps: the first makes the optimizer's state, the second has the peak; one warms up


class Task(msgspec.Struct, frozen=True):
    """What a worker process trains: a model with its settings, under a level and format, for `steps` timed steps.

    `limit` is the number of bytes that the process may allocate, counted from when it builds the model; None: no limit.
    """

    model: str
    settings: dict[str, str]
    data: str | None
    device: str
    level: str
    low: str
    peer: bool
    emulated: bool
    compiled: bool
    seed: int
    steps: int
    threads: int
    limit: int | None = None

    @property
    def entry(self) -> Entry:
        """The row that this task measures."""
        return Entry(self.level, as_format(self.low), self.peer, self.emulated, compiled=self.compiled)


def answers(task: Task) -> Iterator[dict[str, Any]]:
    """Yields the model's size, then each step's loss, milliseconds and joules, then memory, skipped steps and scale."""
    torch.set_num_threads(task.threads)
    device = torch.device(task.device)
    workload = load_model(task.model, task.settings, data=None if task.data is None else Path(task.data))
    batches = workload.batches(task.seed)
    first = next(batches)  # data in memory is not the step's
    if task.limit is not None:
        limit_memory(task.limit, device)
    energy = energy_meter(device)
    peak, facts, total = None, None, COUNTED + UNTIMED + task.steps
    with ExitStack() as stack, ExitStack() as counted:
        count = counting(device)
        counted.enter_context(count)
        variant = task.entry.start(workload, task.seed, device)
        stack.callback(variant.close)
        base_lr = [group["lr"] for group in variant.optimizer.param_groups]
        yield {"parameters": sum(p.numel() for p in variant.model.parameters()), "examples": workload.examples()}
        for step in range(total):
            inputs, targets = first if step == 0 else next(batches)
            batch = inputs.to(device), targets.to(device)
            count.restart()
            with energy:
                loss, took = timed_step(variant, batch, base_lr, workload.lr_factor(step, total))
            variant.observe()
            if step == COUNTED - 1:
                counted.close()
                peak, facts = count.peak, variant.facts()
            timed = step >= COUNTED + UNTIMED
            yield {"loss": float(loss), "ms": took if timed else None, "joules": energy.joules if timed else None}
        end = variant.facts()
        yield {"peak": peak, "memory": facts and facts.memory, "skipped": end.skipped, "scale": end.scale}


def _say(answer: TextIO, said: dict[str, Any]) -> None:
    answer.write(json.dumps(said) + "\n")
    answer.flush()


def main() -> None:
    """Reads a task from the first line of stdin and answers each further line; an error is the last answer."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a workload prints is no answer
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    try:
        given = answers(task)
        for said in given:
            _say(answer, said)
            if not sys.stdin.readline():
                return
    except Exception as error:  # whatever a user's workload raises
        memory = is_out_of_memory(error)
        said = {"error": f"out of memory: {error}" if memory else reason(error), "memory": memory}
        _say(answer, said)


if __name__ == "__main__":
    main()
