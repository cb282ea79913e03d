"""Whether the forwards that an assignment needs to enter can be entered; reads the models, changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn

from halfstep.errors import SetupError
from halfstep.plan.resolve import Assignment


def check_forwards(models: Sequence[nn.Module], assignment: Assignment) -> None:
    """Refuses modules whose forward the plan would have to enter and cannot.

    Raises:
        SetupError: names a module whose forward is set on the instance, is a generator, or is scripted.
    """
    modules = [pair for model in models for pair in model.named_modules()]
    for (name, module), formats in zip(modules, assignment.modules, strict=True):
        what = f"{type(module).__name__} {name!r}" if name else f"the model ({type(module).__name__})"
        scripted = isinstance(module, torch.jit.ScriptModule)
        if scripted and (formats.boundary or assignment.plan.param == "low"):
            raise SetupError(f"{what} is scripted, and halfstep can neither enter its forward nor cast its weights")
        if not formats.boundary:
            continue
        if "forward" in module.__dict__:
            raise SetupError(
                f"{what} has its forward set on the instance, which hides that of its class, through which halfstep "
                "enters it; define it in the class (or wrap the module in one), or set it after initialize"
            )
        if inspect.isgeneratorfunction(type(module).forward):
            raise SetupError(f"{what} has a generator as its forward, which runs after the call; return the values")
