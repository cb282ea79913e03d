"""Starts the command `halfstep`: outside of the package, since importing that loads torch, which Ctrl-C may end."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Loads the commands and runs the one that was asked for."""
    # Raised inside an import, KeyboardInterrupt may be taken for a module that is not there, and be lost.
    before = signal.signal(signal.SIGINT, _end)
    from halfstep.__main__ import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _end(*_: object) -> None:
    print("halfstep: interrupted", file=sys.stderr, flush=True)
    os._exit(130)  # 128 + SIGINT, as shells have it
