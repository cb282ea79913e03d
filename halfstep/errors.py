"""The exceptions that a caller may want to catch; every message says what came, what is allowed and what to do."""


class HalfstepError(Exception):
    """Base of all errors that halfstep raises on purpose."""


class FormatError(HalfstepError, ValueError):
    """A number format that halfstep does not know, or that cannot be used where it was given."""


class PlanError(HalfstepError, ValueError):
    """A plan, rule, op change or plan file that is unknown, contradicts itself or fits no module."""


class SetupError(HalfstepError, ValueError):
    """A model or optimizer that cannot be trained under the plan; raised before anything was changed."""


class SessionError(HalfstepError, RuntimeError):
    """A session used in the wrong order or after it was closed."""


class StateError(HalfstepError, ValueError):
    """A state or checkpoint that does not fit this session; raised before anything was changed."""


class DataError(HalfstepError, FileNotFoundError):
    """Data that is not there or not in a known layout; the message says how to get it."""


class LogError(HalfstepError, ValueError):
    """A run log that cannot be written or read: not a log, empty, or of another schema."""


class WorkloadError(HalfstepError, ValueError):
    """A workload that is unknown, gets a setting that it does not have, or lacks what a workload must have."""


class OpError(HalfstepError, RuntimeError):
    """An op that the plan refuses where it was called, such as binary_cross_entropy on low inputs."""


class ObserveError(HalfstepError, ValueError):
    """A probe on modules or tensors that do not exist, or with an invalid setting."""


class ScriptError(HalfstepError, FileNotFoundError):
    """A script or module that `halfstep run` cannot find; `exit_code` is python's for it."""

    exit_code = 1
