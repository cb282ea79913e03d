"""Compiles halfstep's C++ sources at first use with the machine's own compiler and keeps them for later processes.

A library is code that this process runs, so it is loaded only from a folder in which no other user can put files.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import logging
import math
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.kernels.cache import find, locked, private_folders, put, refuse_shared

_COMPILERS = ("g++", "clang++", "c++")
# Without the two that drop errno and traps, square roots are not vectorised; without contraction the loops give the
# bits of separately rounded operations.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17")
_SHARED = ("-shared", "-fPIC")
_THREADS = "-fopenmp"
_LIMIT = 45.0  # seconds: fifteen times what a source takes on an idle machine of 2021
_PIECE, _PIECES = 4096, 64  # what is kept of a compiler's output: the last 256 KiB
_LOG = logging.getLogger("halfstep")
_GIVEN_UP: set[str] = set()  # compilers that ran out of time in this process, which waits for none of them twice


class _CannotCompileError(Exception):
    """The library cannot be compiled; the message is that of the compiler or the system."""


class _OutOfTimeError(_CannotCompileError):
    """Compiling takes longer than a first step can wait."""


@functools.cache
def library(source: Path, *names: str, limit: float = _LIMIT) -> ctypes.CDLL | None:
    """Returns `source` compiled as a library, or None, with one warning that says why, if it cannot be compiled here.

    The library must have the functions `names`. It is kept in the user's cache folder. Its file name is made from the
    source, the headers beside it, flags, compiler and processor, so that a home shared by several machines holds a
    library for each. The name also has a hash of the library's own bytes, so that a truncated or changed file is
    compiled again: loading such a file would crash the process. If several processes need the library at once, one
    compiles and the others wait. All of this takes about `limit` seconds at most; a compiler that takes longer is
    stopped, and not tried again in this process.
    """
    compiler = find_compiler()
    if compiler is None:
        _say_that_there_is_none()
        return None
    if compiler in _GIVEN_UP:
        return None
    try:
        loaded = _loaded(source, compiler, time.monotonic() + limit)
        missing = [name for name in names if not hasattr(loaded, name)]
        if missing:
            raise _CannotCompileError(f"the compiled library has no {', '.join(missing)}")
    except (OSError, _CannotCompileError) as error:
        _LOG.warning(
            "%s could not compile %s: its loops run as torch operations on this CPU, about half as fast. Reason: %s",
            compiler,
            source.name,
            str(error).strip()[-2000:],
        )
        return None
    return loaded


class _Field(ctypes.Structure):  # as in update.h
    _fields_ = (("name", ctypes.c_char_p), ("at", ctypes.c_int64), ("size", ctypes.c_int64))


def check_layout(loaded: ctypes.CDLL, function: str, layout: Sequence[tuple[str, int, int]]) -> None:
    """Checks that a compiled library and Python agree on a memory layout: its fields' names, offsets, sizes and order.

    `layout` has (name, offset, size) for each field as Python expects it. `function` is the library's function that
    returns the same for the compiled code.

    Raises:
        HalfstepError: the layout that `function` returns is not `layout`.
    """
    call = getattr(loaded, function)
    call.argtypes, call.restype = (), ctypes.POINTER(_Field)
    places = itertools.takewhile(lambda place: place.name, call())
    compiled = [(place.name.decode(), place.at, place.size) for place in places]
    if compiled != list(layout):
        told, own = ([f"{name}:{at}+{size}" for name, at, size in rows] for rows in (compiled, layout))
        raise HalfstepError(
            "halfstep's Python and C++ code disagree about the layout of memory; restart this process if halfstep was "
            f"reinstalled while it ran, otherwise report this error. {function} in {loaded._name} returned "
            f"{' '.join(told)}, Python expected {' '.join(own)}"
        )


@functools.cache
def _say_that_there_is_none() -> None:
    _LOG.warning(
        "no C++ compiler found (looked for %s): halfstep's loops for the CPU run as torch operations, about half "
        "as fast; install g++ for full speed",
        ", ".join(_COMPILERS),
    )


def find_compiler() -> str | None:
    """Returns the path of the first C++ compiler on the PATH, or None."""
    return next((path for path in map(shutil.which, _COMPILERS) if path), None)


# ---- kept libraries ----------------------------------------------------------------------------------------------


def _loaded(source: Path, compiler: str, deadline: float) -> ctypes.CDLL:
    """Loads the library from a folder that has it, or compiles it and stores it in the first folder that can hold it.

    All folders are searched before anything is compiled. If the cache folder cannot be used, the library is kept in the
    temporary one, so that it is compiled once and not at every start.

    Raises:
        OSError: no folder can hold the library, or it cannot be loaded from any folder.
    """
    stem = f"{source.stem}-{_key(source, compiler, deadline)}"
    folders, refused = private_folders()
    made: bytes | None = None
    for folder in folders:
        kept = find(folder, stem)
        if kept is not None:
            loaded = _opened(kept, refused)
            if loaded is not None:
                return loaded
            made = kept.read_bytes()
    for folder in folders:
        try:
            with locked(folder / f"{stem}.lock", deadline):
                kept = find(folder, stem)
                if kept is None:
                    made = made or _compile(source, compiler, deadline)
                    kept = put(folder, stem, made)
            made = kept.read_bytes()
        except TimeoutError as error:
            raise _OutOfTimeError(str(error)) from error
        except OSError as error:
            refused.append(f"{folder} cannot hold compiled loops ({error.strerror or error})")
            continue
        loaded = _opened(kept, refused)
        if loaded is not None:
            return loaded
    with tempfile.TemporaryDirectory(prefix="halfstep-", ignore_cleanup_errors=True) as room:
        kept = put(Path(room), stem, made or _compile(source, compiler, deadline))
        loaded = _opened(kept, refused, "a temporary folder of this process alone")
    if loaded is None:
        raise OSError("; ".join(refused))
    return loaded


def _opened(path: Path, refused: list[str], where: str | None = None) -> ctypes.CDLL | None:
    """Loads the library at `path`; returns None and adds the reason to `refused` if it cannot be loaded.

    `refused` holds the reasons why folders tried before this one could not be used. If it has any and the library
    loads, a warning gives these reasons and says where the library is: `where`, or by default the path of its folder.
    """
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:
        said = str(error).rpartition(": ")[2]
        refused.append(f"libraries in {path.parent} cannot be loaded ({said}); the folder may be mounted noexec")
        return None
    if refused:
        _say_where("; ".join(dict.fromkeys(refused)), where or str(path.parent))
    return opened


@functools.cache
def _say_where(refused: str, where: str) -> None:
    _LOG.warning(
        "compiled loops are kept in %s, because %s. Instead, you can set XDG_CACHE_HOME to a folder of your own",
        where,
        refused,
    )


# ---- the compiler ------------------------------------------------------------------------------------------------


def _key(source: Path, compiler: str, deadline: float = math.inf) -> str:
    version = _run([compiler, "--version"], deadline)
    key = "\n".join([*_FLAGS, *_SHARED, compiler, version, _processor()]).encode()
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\n".join([*texts, key])).hexdigest()[:16]


def _compile(source: Path, compiler: str, deadline: float) -> bytes:
    """Returns the bytes of the compiled library. Files that a stopped compiler leaves are removed with its folder."""
    try:
        with tempfile.TemporaryDirectory(prefix="halfstep-", ignore_cleanup_errors=True) as room:
            refuse_shared(Path(room).resolve())
            made = Path(room) / f"{source.stem}.so"
            command = [compiler, *_FLAGS, *_SHARED, str(source), "-o", str(made)]
            try:
                _run([*command, _THREADS], deadline, room)
            except _OutOfTimeError:
                raise
            except _CannotCompileError:  # Apple's clang has no OpenMP: one thread then
                _run(command, deadline, room)
            return made.read_bytes()
    except OSError as error:
        raise _CannotCompileError(str(error)) from error


def _run(command: list[str], deadline: float, room: str | None = None) -> str:
    """Returns what a command prints, whatever its encoding; of long output only the end.

    With `room`, the command's temporary folder, what it prints to stderr is included.

    Raises:
        _CannotCompileError: the command failed.
        _OutOfTimeError: the command did not end in time, and was stopped with all processes that it had started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # a compiler that asks gets no answer
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if room else subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": room} if room else None,
        start_new_session=True,
    )
    printed: collections.deque[bytes] = collections.deque(maxlen=_PIECES)
    reader = threading.Thread(target=_read, args=(process, printed), daemon=True)
    reader.start()
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _stop(process)
        _GIVEN_UP.add(command[0])
        raise _OutOfTimeError("the compiler did not finish in time and was stopped") from None
    except BaseException:
        _stop(process)
        raise
    reader.join(timeout=1)  # not for ever: a server that it has started may hold the pipe
    text = b"".join(list(printed)).decode(errors="replace")
    if code:
        raise _CannotCompileError(text or f"exit status {code}")
    return text


def _read(process: subprocess.Popen[bytes], printed: collections.deque[bytes]) -> None:
    assert process.stdout is not None
    with process.stdout as pipe:
        while piece := os.read(pipe.fileno(), _PIECE):
            printed.append(piece)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and the processes that it has started, such as the compiler behind ccache."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1)  # one that waits for a dead drive cannot be ended


def _processor() -> str:
    """Returns text that differs between processors for which the compiler may generate different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
