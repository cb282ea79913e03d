"""Reads and writes result files: a file that cannot be read as a whole is an error, and writes are atomic."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from halfstep.bench.sweep import SCHEMA, data_name
from halfstep.errors import WorkloadError
from halfstep.measurements import Sweep


def read_sweep(path: Path) -> Sweep | None:
    """Returns the sweep that a file holds, or None if the file does not exist."""
    if path.exists() and not path.is_file():
        raise WorkloadError(
            f"{path} is not a regular file, but a sweep keeps what it has measured in one; pass one to --json"
        )
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    try:
        fields = json.loads(text)
        schema = fields["schema"]
        if schema == SCHEMA:
            found = msgspec.convert(fields, Sweep, strict=False)  # "nan" and "inf" are numbers
            if "points" not in fields:
                raise KeyError("points")
            data = found.asked.get("data", "none")
            if Path(data).is_absolute():  # until 2026-11-23 files had the path
                found = replace(found, asked={**found.asked, "data": data_name(Path(data))})
            return found
        why = f"its schema is {schema}, that of this halfstep version is {SCHEMA}"
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        why = f"{type(error).__name__}: {error}"
    raise WorkloadError(
        f"{path} holds no sweep that this halfstep version can read ({why}); pass another file to --json "
        "(nothing was written to this one)"
    )


def replace_text(path: Path, text: str) -> None:
    """Replaces a file's text atomically, so that a killed process or a full disk leaves a complete file."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    place = path.resolve()  # a link stays one
    part = place.with_name(f".{place.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, place)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
