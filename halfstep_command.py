"""Starts the command `halfstep`: outside of the package, since importing that loads torch, which Ctrl-C may end."""

from __future__ import annotations

import sys


def main() -> None:
    """Loads the commands and runs the one that was asked for."""
    try:
        from halfstep.__main__ import main as run
    except KeyboardInterrupt:
        print("halfstep: interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as shells have it
    run()
