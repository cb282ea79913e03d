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
def library(source: Path, *names: str) -> ctypes.CDLL | None:
    """Returns the compiled `source`, or None, with one notice that says why, where it cannot be compiled here.

    It has the functions `names`. It is kept in the user's cache folder under a name made of source, headers beside it,
    flags, compiler and processor, so that a home shared by several machines holds one for each, and of its own bytes,
    so that a file that was cut or changed is made again: to load one would end the process.
    """
    compiler = find_compiler()
    if compiler is None:
        _say_that_there_is_none()
        return None
    try:
        return _loaded(source, compiler, names)
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


def _loaded(source: Path, compiler: str, names: tuple[str, ...]) -> ctypes.CDLL:
    stem = f"{source.stem}-{_key(source, compiler)}"
    try:
        folder = Path.home() / ".cache" / "halfstep"
        folder.mkdir(parents=True, exist_ok=True)
        for kept in folder.glob(f"{stem}-*.so"):
            try:
                return _opened(kept, names)
            except OSError:
                kept.unlink(missing_ok=True)
        return _opened(_compile(source, compiler, folder, stem), names)
    except (OSError, RuntimeError):  # no home, or one that cannot be written to: for this process alone then
        with tempfile.TemporaryDirectory(prefix="halfstep-", ignore_cleanup_errors=True) as room:
            return _opened(_compile(source, compiler, Path(room), stem), names)


def _opened(path: Path, names: tuple[str, ...]) -> ctypes.CDLL:
    """Loads a library that `_compile` has made.

    Raises:
        OSError: it is not as it was made, or no library with these functions.
    """
    if not path.stem.endswith(_digest(path)):
        raise OSError(f"{path} is not as it was made")
    opened = ctypes.CDLL(str(path))
    missing = [name for name in names if not hasattr(opened, name)]
    if missing:
        raise OSError(f"what it made has no {', '.join(missing)}")
    return opened


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _key(source: Path, compiler: str) -> str:
    version = _run([compiler, "--version"])
    key = "\n".join([*_FLAGS, *_SHARED, compiler, version, _processor()]).encode()
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\n".join([*texts, key])).hexdigest()[:16]


def _compile(source: Path, compiler: str, folder: Path, stem: str) -> Path:
    """Compiles into a file of `folder` whose name is `stem` and a digest of what is in it, and returns its path.

    It comes there in one move, so that processes that do the same at the same time do not see half of it.
    """
    with tempfile.TemporaryDirectory(dir=folder) as room:
        made = Path(room) / f"{stem}.so"
        command = [compiler, *_FLAGS, *_SHARED, str(source), "-o", str(made)]
        try:
            _run([*command, _THREADS])
        except subprocess.CalledProcessError:  # Apple's clang has no OpenMP: one thread then
            _run(command)
        target = folder / f"{stem}-{_digest(made)}.so"
        os.replace(made, target)
    return target


def _run(command: list[str]) -> str:
    """Returns what a command prints, in whatever encoding."""
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
    return done.stdout


def _processor() -> str:
    """Returns what tells this processor from others for which the compiler makes other code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
