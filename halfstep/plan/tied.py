"""Modules that share parameters, which one rule cannot tell apart."""

from __future__ import annotations

from torch import nn

from halfstep.plan.matching import uncompiled
from halfstep.torch_internals import parameters_of


def together(name: str, model: nn.Module) -> tuple[str, ...]:
    """Returns the name of a module, and those of all others that hold one of its parameters and are not inside it.

    Names are as rules spell them.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> model[2].weight = model[0].weight
    >>> together("2", model), together("1", model)
    (('2', '0'), ('1',))
    """
    modules = {uncompiled(known): module for known, module in model.named_modules()}
    if name not in modules:
        return (name,)
    own = {id(parameter) for parameter in modules[name].parameters()}
    others = (
        known
        for known, module in modules.items()
        if any(parameter is not None and id(parameter) in own for parameter in parameters_of(module).values())
        and not f"{known}.".startswith(f"{name}.")
    )
    return (name, *others)
