"""The exceptions that a caller may want to catch; every message says what is wrong, what is allowed and what to do."""

from __future__ import annotations

from typing import ClassVar

from halfstep.pages import GUIDE, LIMITS, MISMATCH, PLANS, QUICKSTART, SEEING, more


class HalfstepError(Exception):
    """Base of all errors that halfstep raises on purpose.

    `page` is the documentation page about such errors, or None. From Python 3.11 on, the traceback ends with it, unless
    the message itself names a page.
    """

    page: ClassVar[str | None] = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.page is not None and more("") not in str(self):
            self.__notes__ = [more(self.page)]


class FormatError(HalfstepError, ValueError):
    """A number format that is unknown, or that a function does not accept."""


class PlanError(HalfstepError, ValueError):
    """A plan, rule, op change or plan file that is unknown, contradicts itself or matches no module."""

    page = PLANS


class SetupError(HalfstepError, ValueError):
    """A model or optimizer that cannot be trained under the plan; raised before anything is changed."""

    page = LIMITS


class SessionError(HalfstepError, RuntimeError):
    """A session used in the wrong order or after it was closed."""

    page = GUIDE


class StateError(HalfstepError, ValueError):
    """A state or checkpoint that does not fit this session; raised before anything is changed."""

    page = QUICKSTART


class DataError(HalfstepError, FileNotFoundError):
    """Data that is missing or not in a known layout; the message says how to get it."""


class LogError(HalfstepError, ValueError):
    """A run log that cannot be written or read: not a log, empty, or of another schema."""

    page = SEEING


class WorkloadError(HalfstepError, ValueError):
    """A workload (a model and data for `halfstep bench` to train) that is unknown, or cannot be run as requested."""

    page = GUIDE


class OpError(HalfstepError, RuntimeError):
    """A call of an op that the plan refuses, such as binary_cross_entropy on low-precision inputs."""

    page = MISMATCH


class ObserveError(HalfstepError, ValueError):
    """A probe on modules or tensors that do not exist, or with an invalid setting."""

    page = SEEING


class ScriptError(HalfstepError, FileNotFoundError):
    """A script or module that `halfstep run` cannot find; `exit_code` is the exit status that `python` would return."""

    exit_code = 1
