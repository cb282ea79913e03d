"""The process that trains one row of a benchmark: makes one call of its lane for each that it is asked for on stdin."""

from __future__ import annotations

import os
import pickle
import sys

import torch

from halfstep.errors import WorkloadError
from halfstep.lab.bench.lane import Deal, Local, OutOfMemory, Task
from halfstep.lab.bench.tally import reason
from halfstep.torch_internals import is_out_of_memory
from halfstep.train.cast.opregistry import REGISTRY


def main() -> None:
    """Reads a task from stdin and answers each call that follows; an error is the last answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a workload prints is no answer

    def say(said: object) -> None:
        pickle.dump(said, answers)
        answers.flush()

    task: Task = pickle.load(sys.stdin.buffer)
    try:
        torch.set_num_threads(task.threads)
        lane = Local(task.entry, Deal(task.origin.load(), task.device))
        say("ready")
        while True:
            try:
                what, given, named = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answer = getattr(lane, what)(*given, **named)
            assert not (task.entry.peer and REGISTRY.kernels), "a session is open in the process of a peer"
            say(answer)
    except Exception as error:  # whatever a user's workload raises
        say(OutOfMemory(f"out of memory: {error}") if is_out_of_memory(error) else WorkloadError(reason(error)))


if __name__ == "__main__":
    main()
