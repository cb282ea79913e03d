"""C++ sources of halfstep, compiled at first use with the machine's own compiler and kept for the next process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_COMPILERS = ("g++", "clang++", "c++")
# Without the two that drop errno and traps, square roots are not vectorised; without contraction the loops give the
# bits of separately rounded operations.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17")
_SHARED = ("-shared", "-fPIC")
_THREADS = "-fopenmp"
_LOG = logging.getLogger("halfstep")


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """Returns the compiled `source`, or None, with one notice that says why, where it cannot be compiled here.

    The result is kept in the user's cache folder under a name made of source, headers beside it, flags, compiler and
    processor, so that a home shared by several machines holds one for each.
    """
    compiler = find_compiler()
    if compiler is None:
        _say_that_there_is_none()
        return None
    try:
        return _loaded(source, compiler)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        _LOG.warning(
            "%s could not compile %s: it runs as torch operations on this CPU, about half as fast. It said: %s",
            compiler,
            source.name,
            said[-2000:],
        )
        return None


@functools.cache
def _say_that_there_is_none() -> None:
    _LOG.warning(
        "no C++ compiler found (looked for %s): halfstep's loops for the CPU run as torch operations, about half "
        "as fast; install g++ to have the fast ones",
        ", ".join(_COMPILERS),
    )


def find_compiler() -> str | None:
    """Returns the path of the first C++ compiler on the PATH, or None."""
    return next((path for path in map(shutil.which, _COMPILERS) if path), None)


def _loaded(source: Path, compiler: str) -> ctypes.CDLL:
    name = f"{source.stem}-{_key(source, compiler)}.so"
    try:
        target = Path.home() / ".cache" / "halfstep" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _compile(source, compiler, target)
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # a file that is no library: a disk that was full, a copy that was cut
            _compile(source, compiler, target)
            return ctypes.CDLL(str(target))
    except (OSError, RuntimeError):  # no home, or one that cannot be written to: for this process alone then
        with tempfile.TemporaryDirectory(prefix="halfstep-", ignore_cleanup_errors=True) as folder:
            _compile(source, compiler, Path(folder) / name)
            return ctypes.CDLL(str(Path(folder) / name))


def _key(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    key = "\n".join([*_FLAGS, *_SHARED, compiler, version, _processor()]).encode()
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\n".join([*texts, key])).hexdigest()[:16]


def _compile(source: Path, compiler: str, target: Path) -> None:
    """Compiles into `target` in one move, so that processes that do the same at the same time do not see half of it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as room:
        made = Path(room) / target.name
        command = [compiler, *_FLAGS, *_SHARED, str(source), "-o", str(made)]
        try:
            subprocess.run([*command, _THREADS], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError:  # Apple's clang has no OpenMP: one thread then
            subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(made, target)


def _processor() -> str:
    """Returns what tells this processor from others for which the compiler makes other code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
