"""Mixed precision training for PyTorch that says what broke, where and why, and measures what was gained."""

from typing import TYPE_CHECKING

from halfstep.edits import FULL, LOW, Edit, OpChange, OpChanges, Policy, Rule, Scaling
from halfstep.errors import (
    FormatError,
    HalfstepError,
    LogError,
    ObserveError,
    OpError,
    PlanError,
    SessionError,
    SetupError,
    StateError,
    WorkloadError,
)
from halfstep.explain.diagnose.blame import blame
from halfstep.explain.diagnose.rehearsal import on_gathered_copy
from halfstep.explain.forecast.whatif import whatif
from halfstep.explain.preflight.check import check
from halfstep.explain.report.log import RunLog
from halfstep.explain.report.run import Run, read_log
from halfstep.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format
from halfstep.initialize import initialize
from halfstep.kinds import Kind
from halfstep.measurements import Inspection
from halfstep.plan.io import edit_from_dict, load_plan, save_plan
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, ModuleFormats, resolve
from halfstep.records import (
    AbsorbedOverflow,
    Finding,
    Foreseen,
    NumericsError,
    Observation,
    OpCall,
    ProductLoss,
    Recorder,
    Rounded,
    ScaleRange,
    SessionStart,
    Status,
    StepRecord,
    TensorStats,
    Verdict,
    WhatIf,
)
from halfstep.train.cast.ops import autocast
from halfstep.train.optim.optimizers import Lamb, Lion, NovoGrad
from halfstep.train.probe.probe import Probe
from halfstep.train.probe.rows import measure
from halfstep.train.processes.shards import fsdp_policy
from halfstep.train.scale.grad_scaler import GradScaler
from halfstep.train.session.session import Session
from halfstep.version import __version__

if TYPE_CHECKING:
    from halfstep.lab.inspection.inspect import inspect
else:  # loaded when it is first asked for, as it only measures

    def __getattr__(name: str) -> object:
        if name != "inspect":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from halfstep.lab.inspection.inspect import inspect

        return inspect

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "BF16", "E4M3", "E5M2", "FP16", "FP32", "FULL", "LOW", "TF32", "AbsorbedOverflow", "Assignment", "Edit",
    "Finding", "Foreseen", "Format", "FormatError", "GradScaler", "HalfstepError", "Inspection", "Kind", "Lamb",
    "Lion", "LogError", "ModuleFormats", "NovoGrad", "NumericsError", "Observation", "ObserveError", "OpCall",
    "OpChange", "OpChanges", "OpError", "Plan", "PlanError", "Policy", "Probe", "ProductLoss", "Recorder",
    "Rounded", "Rule", "Run", "RunLog", "ScaleRange", "Scaling", "Session", "SessionError", "SessionStart",
    "SetupError", "StateError", "Status", "StepRecord", "TensorStats", "Verdict", "WhatIf", "WorkloadError",
    "__version__", "autocast", "blame", "check", "edit_from_dict", "fsdp_policy", "initialize", "inspect", "level",
    "load_plan", "measure", "on_gathered_copy", "read_log", "resolve", "save_plan", "whatif",
]  # fmt: skip
