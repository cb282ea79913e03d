"""Imports of packages that an adapter needs: what to install where one is missing or is another release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from halfstep.errors import SetupError
from halfstep.pages import SUPPORT, more


@contextmanager
def extra(package: str, *, first: str, below: str) -> Iterator[None]:
    """For the imports of an adapter: within the context an ImportError says which extra to install."""
    try:
        check_version(package, import_module(package).__version__, first=first, below=below)
        yield
    except ImportError as error:
        raise ImportError(
            f"halfstep.adapters.{package} needs {error.name or package}; run: pip install 'halfstep[{package}]'"
        ) from error


def check_version(package: str, version: str, *, first: str, below: str) -> None:
    """Raises a SetupError unless `version` is at least `first` and less than `below`, all as "major.minor"."""
    if not _numbers(first) <= _numbers(version) < _numbers(below):
        raise SetupError(
            f"{package} {version} is installed, but halfstep's adapter needs at least {first} and less than {below}; "
            f"run: pip install '{package}>={first},<{below}'; {more(SUPPORT)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
