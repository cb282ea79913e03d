"""The public surface: its names, the types of what a user handles, and the README's code under strict mypy."""

import dataclasses
import importlib.util
import inspect
import os
import subprocess
import sys
import textwrap
import typing
from pathlib import Path

import pytest

import halfstep
from tests.test_readme import BLOCKS

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = {
    "blame",
    "check",
    "edit_from_dict",
    "fsdp_policy",
    "initialize",
    "inspect",
    "level",
    "load_plan",
    "measure",
    "on_gathered_copy",
    "read_log",
    "resolve",
    "save_plan",
    "whatif",
}
FORMATS = {"BF16", "E4M3", "E5M2", "FP16", "FP32", "TF32"}
EDITS = {"FULL", "LOW", "Edit", "OpChange", "OpChanges", "Policy", "Rule", "Scaling"}
RESULTS = {
    "AbsorbedOverflow", "Assignment", "Finding", "Foreseen", "Inspection", "ModuleFormats", "Observation", "OpCall",
    "Plan", "ProductLoss", "Rounded", "Run", "ScaleRange", "SessionStart", "Status", "StepRecord", "TensorStats",
    "Verdict", "WhatIf",
}  # fmt: skip
CLASSES = {
    "Format", "GradScaler", "Kind", "Lamb", "Lion", "NovoGrad", "Probe", "Recorder", "RunLog", "Session", "autocast",
}  # fmt: skip
ERRORS = {
    "FormatError", "HalfstepError", "LogError", "NumericsError", "ObserveError", "OpError", "PlanError", "SessionError",
    "SetupError", "StateError", "WorkloadError",
}  # fmt: skip
ENTRIES = dict[str, typing.Any]  # a plan as `to_dict` gives it, which a log holds whatever halfstep wrote it
# What a block of the README takes as given, as the parameters of a function that the block is the body of.
GIVEN = {
    "first lines": (
        "model: Any, optimizer: Optimizer, loader: list[tuple[Tensor, Tensor]], loss_fn: Loss, scheduler: LRScheduler, "
        "evaluate: Callable[[nn.Module], float], path: Path"
    ),
    "plan": "model: nn.Module, optimizer: Optimizer",
    "observe": "session: halfstep.Session, train: Callable[..., None]",
    "seeing": "model: nn.Module, optimizer: Optimizer",
    "before": "model: nn.Module, optimizer: Optimizer, loss_fn: Loss, batches: Iterator[tuple[Tensor, Tensor]]",
    "blame": (
        "session: halfstep.Session, model: nn.Module, optimizer: Optimizer, loss_fn: Loss, inputs: Tensor, "
        "targets: Tensor"
    ),
    "average": "model: nn.Module",
    "schedule": "session: halfstep.Session, optimizer: Optimizer",
}
HEAD = """\
# mypy: allow-untyped-defs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import halfstep

Loss = Callable[[Tensor, Tensor], Tensor]
"""


def test_the_public_names_are_these():
    assert set(halfstep.__all__) == {"__version__"} | FUNCTIONS | FORMATS | EDITS | RESULTS | CLASSES | ERRORS
    assert all(isinstance(getattr(halfstep, name), halfstep.Format) for name in FORMATS)
    assert all(issubclass(getattr(halfstep, name), halfstep.HalfstepError) for name in ERRORS)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function_names_the_keyword_nearest_to_an_unknown_one(name):
    *_, last = inspect.signature(getattr(halfstep, name)).parameters
    with pytest.raises(TypeError, match=rf"^{name}\(\) has no keyword '{last}x'; did you mean '{last}'"):
        getattr(halfstep, name)(**{f"{last}x": None})


def unsaid(kind):
    """Whether a type has an Any or an object in it."""
    return kind in (typing.Any, object) or (kind != ENTRIES and any(map(unsaid, typing.get_args(kind))))


@pytest.mark.parametrize("name", sorted(RESULTS | EDITS - {"Edit", "FULL", "LOW"}))
def test_every_field_of_a_result_and_of_an_edit_has_a_type(name):
    kind = getattr(halfstep, name)
    assert dataclasses.is_dataclass(kind)
    assert [field for field, hint in typing.get_type_hints(kind).items() if unsaid(hint)] == []


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_the_code_of_the_readme_passes_strict_mypy(tmp_path):
    file = tmp_path / "readme.py"
    bodies = (
        f"\n\ndef block_{number}({GIVEN[name]}) -> None:\n{textwrap.indent(code, '    ')}"
        for number, (name, code) in enumerate(BLOCKS.items())
        if name in GIVEN  # apex is there only once its stand-in is installed
    )
    file.write_text(HEAD + "".join(bodies), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", file],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
