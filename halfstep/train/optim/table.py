"""The table of optimizers that halfstep updates itself; CONTRIBUTING.md says how to add one."""

from __future__ import annotations

import inspect

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from halfstep.train.optim import laws
from halfstep.train.optim.laws import Row
from halfstep.train.optim.optimizers import Lamb, Lion, NovoGrad

TABLE: dict[type[Optimizer], Row] = {
    Adam: laws.ADAM,
    AdamW: laws.ADAM,
    SGD: laws.SGD,
    Muon: laws.MUON,
    Lion: laws.LION,
    Lamb: laws.LAMB,
    NovoGrad: laws.NOVOGRAD,
}

KERNELS = {"foreach", "fused", "capturable"}  # options of torch that choose how its own step computes, not what


def any_row_of(cls: type[Optimizer]) -> Row | None:
    """Returns the row of a class of optimizers, whatever their options; None if it has none."""
    return TABLE.get(_class_of_row(cls))


def row_of(optimizer: Optimizer) -> Row | None:
    """Returns the row of `optimizer`; None if it has none, or has options that only its own `step` supports."""
    return None if unsupported_options(optimizer) else any_row_of(type(optimizer))


def unsupported_options(optimizer: Optimizer) -> list[str]:
    """Returns the options of an optimizer that only its own `step` supports, as "name=value"."""
    # Those that its row does not read, unless they have the default value or only choose a kernel, and tensors, except
    # as the learning rate.
    cls, found = _class_of_row(type(optimizer)), []
    if cls not in TABLE:
        return []
    parameters = inspect.signature(cls).parameters
    for group in optimizer.param_groups:
        for name in optimizer.defaults.keys() & group.keys() - KERNELS:
            value = group[name]
            if any(isinstance(each, Tensor) for each in (value if isinstance(value, tuple | list) else [value])):
                supported = name == "lr"
            else:
                supported = name in TABLE[cls].reads or (name in parameters and value == parameters[name].default)
            if not supported:
                found.append(f"{name}={value!r}")
    return sorted({*found})


def _class_of_row(cls: type[Optimizer]) -> type[Optimizer]:
    # A subclass that differs in its constructor alone names its class. Not inherited: one of it may compute otherwise.
    named: type[Optimizer] = vars(cls).get("updates_as", cls)
    return named
