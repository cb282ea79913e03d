"""Processes that are forks of one which has imported what takes seconds; where a system has none, they start anew."""

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection

import torch

HAS_FORKS = sys.platform == "linux"  # elsewhere libraries of the system do not bear them
METHOD = "forkserver" if HAS_FORKS else "spawn"
COSTLY = ["halfstep", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
multiprocessing.set_forkserver_preload(COSTLY)


def start(function, args, size):
    """Runs `function(rank, *args)` in so many processes."""
    torch.multiprocessing.start_processes(function, args, size, start_method=METHOD)


class Forked:
    """A `subprocess.Popen` of `python -c CODE ARGUMENTS...` that is a fork; its input and output are pipes."""

    def __init__(self, command, *, stderr=None, text=False, **_):
        kind, context = "" if text else "b", multiprocessing.get_context(METHOD)
        (read, asked), (answered, write) = context.Pipe(False), context.Pipe(False)
        streams = read, write, Connection(os.dup(stderr.fileno() if stderr else 2))
        self._process = context.Process(target=become, args=(list(map(str, command[2:])), *streams))
        self._process.start()
        self.pid = self._process.pid
        self.stdin = os.fdopen(os.dup(asked.fileno()), f"w{kind}")
        self.stdout = os.fdopen(os.dup(answered.fileno()), f"r{kind}")
        for end in (read, asked, answered, write):
            end.close()

    def kill(self):
        self._process.kill()

    def wait(self):
        self._process.join()
        return self._process.exitcode

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stdin.close()  # first: the process may read it to its end
        self.returncode = self.wait()
        self.stdout.close()


def run(code):
    """Runs code to its end; returns its exit code and what it wrote as errors."""
    with tempfile.TemporaryFile() as errors:
        with Forked([sys.executable, "-c", code], stderr=errors) as process:
            process.stdout.read()
        errors.seek(0)
        return process.returncode, errors.read().decode()


def become(arguments, *streams):
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin, sys.argv = os.fdopen(0), ["-c", *arguments[1:]]
    exec(arguments[0], {"__name__": "__main__"})
