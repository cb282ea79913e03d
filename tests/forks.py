"""Processes that are forks of one which has imported what takes seconds; where a system has none, they start anew."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

import torch

HAS_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
METHOD = "forkserver" if HAS_FORKS else "spawn"
COSTLY = ["halfstep", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
multiprocessing.set_forkserver_preload(COSTLY)


def start(function, args, size):
    """Runs `function(rank, *args)` in so many processes."""
    torch.multiprocessing.start_processes(function, args, size, start_method=METHOD)


class Forked:
    """A `subprocess.Popen` of `python -c CODE`, with pipes, that is a fork."""

    def __init__(self, command, *, stdin, stdout, stderr, start_new_session):
        context = multiprocessing.get_context(METHOD)
        (read, asked), (answered, write) = context.Pipe(False), context.Pipe(False)
        self._process = context.Process(
            target=become, args=(command[-1], read, write, Connection(os.dup(stderr.fileno())))
        )
        self._process.start()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((asked, "wb"), (answered, "rb"))
        )
        for end in (read, asked, answered, write):
            end.close()

    def kill(self):
        self._process.kill()

    def wait(self):
        self._process.join()
        return self._process.exitcode


def become(code, *streams):
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin = os.fdopen(0)
    exec(code, {})
