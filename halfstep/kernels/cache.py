"""Keeps compiled libraries for later processes, in folders in which no other user can add or replace files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_POLL = 0.02  # seconds between two looks at a lock


def find(folder: Path, stem: str) -> Path | None:
    """Returns the path of an intact library of this name that only this user can have written, or None."""
    return next((path for path in sorted(folder.glob(f"{stem}-*.so")) if _is_as_made(path)), None)


def _is_as_made(path: Path) -> bool:
    """Returns whether this is the user's file, and its content matches the hash in its name; never waits on a FIFO."""
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(path, "rb", opener=lambda name, how: os.open(name, how | flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _fault(path, status):
                return False
            return path.stem.endswith(_digest(file.read()))
    except OSError:
        return False


def put(folder: Path, stem: str, content: bytes) -> Path:
    """Stores a library in a folder atomically, so that no process sees half of it; returns its path.

    First removes files of this name that are not intact: truncated or changed ones, and parts that a killed process
    left.
    """
    for path in folder.glob(f"{stem}-*"):
        if not _is_as_made(path):
            with contextlib.suppress(OSError):  # a folder: an error below if it is in the way
                path.unlink()
    file, name = tempfile.mkstemp(dir=folder, prefix=f"{stem}-", suffix=".part")
    target = folder / f"{stem}-{_digest(content)}.so"
    try:
        with os.fdopen(file, "wb") as part:
            part.write(content)
        os.chmod(name, 0o700)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    return target


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


@contextlib.contextmanager
def locked(path: Path, deadline: float) -> Iterator[None]:
    """Holds a lock of the operating system, which is released even if the process is killed.

    On a file system that has no locks, the context runs without one. `filelock`, which torch installs, is not used: on
    such file systems it makes a lock file, which is left behind if the process is killed.

    Raises:
        TimeoutError: another process has held the lock until the deadline.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
    try:
        while True:
            try:
                _lock(file)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process that compiles it still holds the lock {path}") from None
                time.sleep(_POLL)
            except OSError:  # some network drives
                break
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _unlock(file)  # closing alone would leave it to a child that was forked meanwhile
    finally:
        os.close(file)


if sys.platform == "win32":

    def _lock(file: int) -> None:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

    def _unlock(file: int) -> None:
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
else:

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


# ---- folders that nobody else can change -------------------------------------------------------------------------


def private_folders() -> tuple[list[Path], list[str]]:
    """Returns the folders that can be trusted, and for each other folder why it cannot be trusted and what to do.

    The folders are one in the user's cache, and one for this user in the temporary folder.
    """
    folders, refused = [], []
    for place in (_cache_folder, _temporary_folder):
        try:
            folders.append(_private(place()))
        except (OSError, RuntimeError) as error:  # RuntimeError: no home, or links in a circle
            refused.append(str(error))
    return folders, refused


def _cache_folder() -> Path:
    place = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (place if place.is_absolute() else Path.home() / ".cache") / "halfstep"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"halfstep-{os.geteuid() if hasattr(os, 'geteuid') else 'user'}"


def _private(folder: Path) -> Path:
    """Makes a folder for this user alone if there is none, and returns its path without links.

    Raises:
        OSError: another user could put a library there, or the folder cannot be made; the message says what to do.
    """
    folder = folder.resolve()
    refuse_shared(folder)  # before a folder is made in the home of another, as under sudo
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(folder)
    fault = _fault(folder, folder.lstat())
    if fault:
        raise OSError(fault)
    return folder


def refuse_shared(folder: Path) -> None:
    """Raises an error if another user owns, or can write to, a folder above `folder`, and so could replace `folder`.

    If no other user can replace the folder, the path of a file that was checked still leads to the same file when it is
    loaded. This matters because some systems cannot load a file that is already open. The check stops at the first
    folder from the root that is closed to other users: what is inside it is safe.

    Raises:
        OSError: another user could replace the folder; the message says what to do.
    """
    administrators = _administrators()
    for above in reversed(folder.parents):
        try:
            status = above.lstat()
        except FileNotFoundError:
            return
        if not _fault(above, status) and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return
        # Where the sticky bit is set everybody can make files, and nobody can exchange those of others.
        fault = _fault(above, status, trusted=administrators, is_open=bool(status.st_mode & stat.S_ISVTX))
        if fault:
            raise OSError(fault)


def _administrators() -> tuple[int, int]:
    """Returns the ids of the users whose folders are trusted: 0, which is root, and the owner of "/".

    In a rootless container, root has an id other than 0, and owns "/".
    """
    return 0, os.lstat("/").st_uid


def _fault(path: Path, status: os.stat_result, *, trusted: tuple[int, ...] = (), is_open: bool = False) -> str:
    """Returns why another user could change a file or folder, and how to fix that; "" if no other user could.

    `trusted` are the ids of users that are allowed to own it, besides this user. With `is_open`, write permission for
    others is no fault: they cannot replace what this user owns in it, as in /tmp.
    """
    if not hasattr(os, "geteuid"):  # Windows: what is in a user's profile is the user's
        return ""
    name, user = shlex.quote(str(path)), os.geteuid()
    if status.st_uid not in (user, *trusted):
        mend = "" if trusted else f" (if it should be yours: sudo chown {user} {name})"  # not what is above: a home
        return f"{path} belongs to the user with id {status.st_uid}{mend}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_open:
        mend = f" (fix: chmod go-w {name})" if status.st_uid == user else ""
        return f"other users can write to {path}{mend}"
    return ""
