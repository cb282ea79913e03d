"""Tries on small tensors whether an optimizer can step from a state, since only the optimizer knows what it needs."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from halfstep.optim.table import has_row

Group = dict[str, Any]
State = dict[str, Any]
# Options that choose a kernel, not numbers.
CHOICES = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}


def can_try_step(optimizer: Optimizer) -> bool:
    """Returns whether a step is safe to try: the optimizer is one of torch's or halfstep's and needs no closure."""
    inner = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(inner).parameters.get("closure")
    known = has_row(type(optimizer)) or f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return known and (closure is None or closure.default is not inspect.Parameter.empty)


@torch.no_grad()
def try_step(optimizer: Optimizer, p: Tensor, group: Group, state: State) -> State:
    """Makes a step from `state` with the options of `group`, on small tensors; returns the state after it.

    The step is made on the CPU, on a stand-in for `p`: a parameter of zeros with a gradient of zeros, in fp32
    (complex64 if `p` is complex). In the shapes of the stand-in and of the state, every size except 0 and 1 is replaced
    by a small one: equal sizes stay equal, and different sizes stay different.

    Raises:
        Exception: whatever the optimizer raises if it cannot step from `state`.
    """
    small = _Small()
    dtype = torch.complex64 if p.is_complex() else torch.float32
    stand_in = Parameter(torch.zeros(small.shape(p), dtype=dtype, device="cpu"))
    zeros = torch.zeros_like(stand_in)
    stand_in.grad = zeros.to_sparse() if isinstance(optimizer, SparseAdam) else zeros
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in ("step", "state")})
    options = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items()}
    options |= {key: value for key, value in CHOICES.items() if key in optimizer.defaults}
    held: defaultdict[Any, State] = defaultdict(dict)
    if state:
        held[stand_in] = {key: small.value(key, value) for key, value in state.items()}
    shadow.__setstate__({"state": held, "param_groups": [{**options, "params": [stand_in]}]})
    inspect.unwrap(type(optimizer).step)(shadow)
    return dict(held[stand_in])


def small_state(p: Tensor, state: State) -> State:
    """Returns `state` as `try_step` passes it to the optimizer: each tensor is a small one, of zeros."""
    small = _Small()
    small.shape(p)
    return {key: small.value(key, value) for key, value in state.items()}


class _Small:
    """Replaces the sizes in the shapes of one parameter and its state by small ones, equal sizes by equal ones."""

    def __init__(self) -> None:
        self._sizes = {0: 0, 1: 1}

    def shape(self, t: Tensor) -> tuple[int, ...]:
        return tuple(self._sizes.setdefault(size, len(self._sizes)) for size in t.shape)

    def value(self, key: str, value: Any) -> Any:
        """Returns `value` with each tensor is a small one, of zeros; a 0-dim tensor or a step count keeps its value."""
        if isinstance(value, Mapping):
            return {name: self.value(name, one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.value("", one) for one in value)
        if not isinstance(value, Tensor):
            return value
        dtype = torch.float32 if value.is_floating_point() else torch.complex64 if value.is_complex() else value.dtype
        if key == "step" or not value.dim():
            return value.detach().to("cpu", dtype, copy=True)
        return torch.zeros(self.shape(value), dtype=dtype, device="cpu")  # torch casts what it loads
