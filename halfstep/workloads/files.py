"""Reads data files, and raises errors that name the file if it cannot be read."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from halfstep.errors import DataError


def read_bytes(path: Path, workload: str) -> bytes:
    """Returns the content of a file, unpacked if its name ends in .gz; error messages begin with the name `workload`.

    Raises:
        DataError: the file cannot be read, or its name ends in .gz but it is not a complete gzip file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{workload}: {path} cannot be read ({error.strerror}); pass a readable file") from error
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{workload}: {path} is not a complete gzip file ({error}); pack or download it again, or rename it "
            "without .gz if it is not packed"
        ) from error


def as_text(content: bytes, path: Path, workload: str) -> str:
    """Returns the content of a file as text; error messages begin with the name `workload`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{workload}: {path} must be UTF-8 text, but byte {content[error.start]:#04x} in line {line} is not;"
            " convert the file to UTF-8"
        ) from error
