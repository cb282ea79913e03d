"""Loads the compiled loops: one library for each class of processors, which `hatch_build.py` built beside this file."""

from __future__ import annotations

# Of the standard library alone: hatch_build.py runs this file where there is no torch yet.
import ctypes
import functools
import hashlib
import logging
import platform
from pathlib import Path

_HERE = Path(__file__).parent
SLOWER = "the optimizer steps with torch's kernels, which take up to 6 times as long"
MEND = "install a wheel of halfstep, or a C++ compiler, and then run `python hatch_build.py` in its checkout"


def stamp(library: bytes) -> str:
    """Returns the end of a library's name: a hash of the version, the sources and the library's own bytes."""
    sources = sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h"), *_HERE.parents[1].glob("version.*")])
    return hashlib.sha256(b"".join([*(path.read_bytes() for path in sources), library])).hexdigest()[:16]


@functools.cache
def find() -> Path | None:
    """Returns the best library for this processor; None if there is none as it was built from these sources."""
    from torch.backends.cpu import get_cpu_capability

    classes = {"AVX512": ("x86-64-v4", "x86-64-v3"), "AVX2": ("x86-64-v3",)}.get(get_cpu_capability(), ())
    if platform.machine().lower() in ("aarch64", "arm64"):
        classes = ("aarch64",)
    found = [path for name in classes for path in sorted(_HERE.glob(f"loops-{name}-*.so"))]
    return next((path for path in found if path.stem.rpartition("-")[2] == stamp(path.read_bytes())), None)


@functools.cache
def load() -> ctypes.CDLL | None:
    """Returns the library for this processor, or None, with one line in the log."""
    path, why = find(), f"none was built from these sources for this processor ({platform.machine()})"
    try:
        if path is not None:
            return ctypes.CDLL(str(path))
    except OSError as error:
        why = str(error)
    logging.getLogger("halfstep").warning("halfstep has no compiled loops here: %s. Reason: %s; %s", SLOWER, why, MEND)
    return None
