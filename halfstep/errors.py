"""The exceptions that a caller may want to catch; every message says what came, what is allowed and what to do."""

from __future__ import annotations

from typing import ClassVar

from halfstep.pages import GUIDE, LIMITS, MISMATCH, PLANS, QUICKSTART, SEEING, more


class HalfstepError(Exception):
    """Base of all errors that halfstep raises on purpose.

    `page` is the page that says more, where one does. From Python 3.11 on a traceback ends with it, unless the message
    names a page of its own.
    """

    page: ClassVar[str | None] = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if self.page is not None and more("") not in str(self):
            self.__notes__ = [more(self.page)]


class FormatError(HalfstepError, ValueError):
    """A number format that halfstep does not know, or that cannot be used where it was given."""


class PlanError(HalfstepError, ValueError):
    """A plan, rule, op change or plan file that is unknown, contradicts itself or fits no module."""

    page = PLANS


class SetupError(HalfstepError, ValueError):
    """A model or optimizer that cannot be trained under the plan; raised before anything was changed."""

    page = LIMITS


class SessionError(HalfstepError, RuntimeError):
    """A session used in the wrong order or after it was closed."""

    page = GUIDE


class StateError(HalfstepError, ValueError):
    """A state or checkpoint that does not fit this session; raised before anything was changed."""

    page = QUICKSTART


class DataError(HalfstepError, FileNotFoundError):
    """Data that is not there or not in a known layout; the message says how to get it."""


class LogError(HalfstepError, ValueError):
    """A run log that cannot be written or read: not a log, empty, or of another schema."""

    page = SEEING


class WorkloadError(HalfstepError, ValueError):
    """A workload that is unknown, gets a setting that it does not have, or lacks what a workload must have."""

    page = GUIDE


class OpError(HalfstepError, RuntimeError):
    """An op that the plan refuses where it was called, such as binary_cross_entropy on low inputs."""

    page = MISMATCH


class ObserveError(HalfstepError, ValueError):
    """A probe on modules or tensors that do not exist, or with an invalid setting."""

    page = SEEING


class ScriptError(HalfstepError, FileNotFoundError):
    """A script or module that `halfstep run` cannot find; `exit_code` is python's for it."""

    exit_code = 1
