"""Starts the command `halfstep`: outside of the package, since importing that loads torch, which Ctrl-C may end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

MEASURE = ("bench", "check", "doctor", "inspect", "whatif")  # commands that take more than a few seconds
PATIENCE = 4  # seconds after which one says that it is loading


def main() -> None:
    """Loads the commands and runs the one that was asked for."""
    # Raised inside an import, KeyboardInterrupt may be taken for a module that is not there, and be lost.
    _end_at_interrupt()
    said = f"{PATIENCE:4} s  loading torch"
    loading = threading.Timer(PATIENCE, print, [said], {"file": sys.stderr, "flush": True})
    loading.daemon = True
    if sys.argv[1:2] and sys.argv[1] in MEASURE and "--quiet" not in sys.argv:
        loading.start()
    from halfstep.__main__ import main as run

    loading.cancel()
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
    except SystemExit as ended:
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):  # as typer turns it into one
            _end()
        raise
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
