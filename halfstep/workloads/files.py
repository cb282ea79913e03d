"""Reads files that a user names, so that whatever is wrong with one is an error that names it."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from halfstep.errors import DataError


def read_bytes(path: Path, workload: str) -> bytes:
    """Returns what a file holds, unpacked where its name ends in .gz.

    Raises:
        DataError: the file cannot be read, or is not the gzip that its name promises.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{workload}: {path} cannot be read ({error.strerror}); give a file that can be") from error
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{workload}: {path} is not a complete gzip file ({error}); pack or download it again, or name it without "
            ".gz if it is not packed"
        ) from error


def as_text(content: bytes, path: Path, workload: str) -> str:
    """Returns the text of a file's content.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{workload}: {path} should be text in UTF-8, but byte {content[error.start]:#04x} in line {line} is not;"
            " convert the file to UTF-8"
        ) from error
