"""Checks values that a user passes: words, numbers and text; in each check, `what` names the value in the error."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from halfstep.errors import PlanError


def near_miss(value: object, allowed: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" for the allowed word nearest to `value`, or "" if none is near.

    >>> near_miss("dynamc", ("none", "static", "dynamic"))
    "; did you mean 'dynamic'?"
    """
    if not isinstance(value, str):
        return ""
    by_lower = {word.lower(): word for word in allowed}
    found = difflib.get_close_matches(value.lower(), list(by_lower), n=1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""


def one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises a PlanError unless `value` is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(repr(word) for word in allowed)
        raise PlanError(f"{what} is {value!r}; expected one of {listed}{near_miss(value, allowed)}")


def text(what: str, value: object, *, empty: bool = False) -> str:
    """Returns `value` if it is printable text, which a plan file can hold; raises a PlanError otherwise.

    `empty` allows "".
    """
    if not isinstance(value, str):
        raise PlanError(f"{what} is {value!r} of type {type(value).__name__}; expected a string")
    if not value.isprintable() or (not empty and not value.strip()):
        raise PlanError(f"{what} is {value!r}; expected {'' if empty else 'non-empty '}printable text")
    return value


def real(what: str, value: object, *, low: float, high: float) -> float:
    """Returns `value` as a float if it is in [low, high]; raises a PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(
            f"{what} is {value!r} of type {type(value).__name__}; expected a number from {low:g} to {high:g}"
        )
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        raise PlanError(f"{what} is {number:g}; expected a number from {low:g} to {high:g}")
    return number


def count(what: str, value: object) -> int:
    """Returns `value` as an int if it is from 1 to 2**31 - 1; raises a PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 2**31:
        raise PlanError(f"{what} is {value!r}; expected a whole number from 1 to {2**31 - 1}")
    return int(value)


def instance(what: str, value: object, kind: type, example: str) -> None:
    """Raises a PlanError unless `value` is an instance of `kind`; the message has `example`, code of a valid value."""
    if not isinstance(value, kind):
        raise PlanError(
            f"{what} is {value!r} of type {type(value).__name__}; expected a {kind.__name__}, such as {example}"
        )


def as_tuple(what: str, value: object, *, of: str) -> tuple[Any, ...]:
    """Returns the items of any iterable except a string; raises a PlanError for everything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise PlanError(f"{what} is {value!r} of type {type(value).__name__}; expected a tuple of {of}")
    return tuple(value)
