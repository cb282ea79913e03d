"""Mixed precision training for PyTorch that says what broke, where and why, and measures what was gained."""

from halfstep.diagnose.blame import blame
from halfstep.edits import FULL, LOW, OpChange, OpChanges, Policy, Rule, Scaling
from halfstep.errors import (
    DataError,
    FormatError,
    HalfstepError,
    LogError,
    ObserveError,
    PlanError,
    SessionError,
    SetupError,
    StateError,
)
from halfstep.forecast.whatif import whatif
from halfstep.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, TF32, Format
from halfstep.initialize import initialize
from halfstep.plan.io import load_plan, save_plan
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, resolve
from halfstep.preflight.check import check
from halfstep.records import Finding, NumericsError, Observation, Status, StepRecord, TensorStats, Verdict, WhatIf
from halfstep.report.log import RunLog
from halfstep.report.run import Run, read_log
from halfstep.scale.grad_scaler import GradScaler
from halfstep.session.session import Session
from halfstep.version import __version__

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FORMATS",
    "FP16",
    "FP32",
    "FULL",
    "LOW",
    "TF32",
    "Assignment",
    "DataError",
    "Finding",
    "Format",
    "FormatError",
    "GradScaler",
    "HalfstepError",
    "LogError",
    "NumericsError",
    "Observation",
    "ObserveError",
    "OpChange",
    "OpChanges",
    "Plan",
    "PlanError",
    "Policy",
    "Rule",
    "Run",
    "RunLog",
    "Scaling",
    "Session",
    "SessionError",
    "SetupError",
    "StateError",
    "Status",
    "StepRecord",
    "TensorStats",
    "Verdict",
    "WhatIf",
    "__version__",
    "blame",
    "check",
    "initialize",
    "level",
    "load_plan",
    "read_log",
    "resolve",
    "save_plan",
    "whatif",
]
