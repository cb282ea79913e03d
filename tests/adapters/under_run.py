"""Runs a block of a test as a script under `halfstep run`, without a file and without another process."""

from contextlib import contextmanager

from halfstep.adapters.script.conversion import Conversion
from halfstep.adapters.script.patches import install


@contextmanager
def under_run(level="O1", low="bf16"):
    """Converts what the block trains; yields the Conversion, whose `trained` says how it went once the block ends."""
    conversion = Conversion(level, low, lambda rank: (), observe=False)
    undo = install(conversion, low)
    conversion.watch.start()
    try:
        yield conversion
    finally:
        conversion.watch.stop()
        conversion.end()
        undo()
