"""Measurements that were saved on this machine; they override the table of processor classes in `machine.py`."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from halfstep.errors import HalfstepError

_LOG = logging.getLogger("halfstep")

_Gain = Annotated[float, msgspec.Meta(ge=0.0)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements used in place of those in `machine.py`, on the processor and torch that they name."""

    processor: str
    model: str
    torch: str
    bf16: _Gain
    fp16: _Gain
    wide_backward: tuple[tuple[_Size, _Size], ...]
    date: str
    schema: Annotated[int, msgspec.Meta(ge=2, le=2)] = 2


def saved_path() -> Path:
    """Returns the file that `halfstep doctor --save` writes, in the user's configuration folder."""
    place = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (place if place.is_absolute() else Path.home() / ".config") / "halfstep" / "processor.json"


def read_saved(processor: str, model: str, torch: str) -> Saved | None:
    """Returns the measurements saved for this processor and torch, or None; logs once whether the file is used."""
    try:
        return _read(saved_path(), processor, model, torch)
    except RuntimeError:  # the user has no home
        return None


@functools.cache
def _read(path: Path, processor: str, model: str, torch: str) -> Saved | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Saved)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _LOG.warning(
            "%s cannot be read (%s) and is ignored; delete it, or run `halfstep doctor --save` again", path, error
        )
        return None
    here = (processor, model, torch)
    if (found.processor, found.model, found.torch) != here:
        _LOG.warning(
            "%s was measured on %s (%s) with torch %s and is ignored on %s (%s) with torch %s; "
            "run `halfstep doctor --save` again, or delete it",
            path, found.processor, found.model, found.torch, *here,
        )  # fmt: skip
        return None
    notice = "halfstep's choices for this processor use the measurements of %s in %s"
    logging.getLogger("halfstep.device").warning(notice, found.date, path)
    return found


def check_savable() -> None:
    """Creates the folder for saved measurements and checks that it is writable, before anything is measured."""
    with _writing() as path:
        tempfile.TemporaryFile(dir=path.parent).close()


def save(found: Saved) -> Path:
    """Writes the measurements to their file, which is replaced as a whole, and returns its path."""
    with _writing() as path:
        replace_file(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    _read.cache_clear()
    return path


def replace_file(path: Path, data: bytes) -> None:
    """Replaces a file as a whole or not at all, also if the process is killed or the disk is full."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    place = path.resolve()  # a link stays one
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, place)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def _writing() -> Iterator[Path]:
    try:
        path = saved_path()
    except RuntimeError:
        raise HalfstepError("there is no home folder to save to; set XDG_CONFIG_HOME to a folder") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        raise HalfstepError(
            f"{path} cannot be written: {error.strerror or error}; set XDG_CONFIG_HOME to another folder"
        ) from None
