"""Starts the command `halfstep`: outside of the package, since importing that loads torch, which Ctrl-C may end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress


def main() -> None:
    """Loads the commands and runs the one that was asked for."""
    # Raised inside an import, KeyboardInterrupt may be taken for a module that is not there, and be lost.
    _end_at_interrupt()
    from halfstep.__main__ import main as run

    to_the_end(run)


def to_the_end(run: Callable[[], None]) -> None:
    """Runs the commands; what Ctrl-C meets outside of them is the end too, with one line, also as python goes down."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] == ["run"]:  # what a script leaves to be done ends as under python
        return run()
    try:
        run()
    except KeyboardInterrupt:
        _end()
    finally:
        _end_at_interrupt()


def _end_at_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored nor a program's own
        signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    with suppress(Exception):  # it may come inside a write
        sys.stdout.flush()
    print("halfstep: interrupted", file=sys.stderr, flush=True)
    os._exit(130)  # 128 + SIGINT, as shells have it
