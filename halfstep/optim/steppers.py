"""How a session makes an optimizer's update: by halfstep, by the optimizer on masters, or by the optimizer alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.optim.foreign import ForeignStepper
from halfstep.optim.guard import original_step
from halfstep.optim.hooks import run_own_step
from halfstep.optim.masters import MasterStore
from halfstep.optim.one_pass import OnePassStepper
from halfstep.optim.table import row_of
from halfstep.torch_internals import mark_stepped


class Stepper(Protocol):
    """Makes one optimizer's updates.

    `syncs` says that `step` waits for the device to read `found`; otherwise `found` takes effect on the device.
    """

    syncs: bool

    def step(
        self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor
    ) -> BaseException | None:
        """Updates `params` from `grads` times `factor`; changes nothing if `found` is true."""

    def prepare(self) -> None:
        """Makes the state that a first update of the parameters with a gradient needs, before it is read or loaded."""

    def close(self) -> None:
        """Removes what the stepper attached to the optimizer."""


class PlainStepper:
    """The optimizer's own step on the parameters and gradients as they are, as at O0."""

    syncs = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(
        self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor
    ) -> BaseException | None:
        """Steps the optimizer; ignores all arguments, because nothing is scaled and nothing is skipped."""
        mark_stepped(self._optimizer)  # a scheduler's wrapper may stand above the guard
        return run_own_step(self._optimizer, original_step(self._optimizer))

    def prepare(self) -> None:
        """Makes the optimizer's initial state by calling its `step`; all gradients and learning rates must be zero."""
        original_step(self._optimizer)()

    def close(self) -> None:
        """Does nothing: nothing was attached."""


def make_stepper(
    optimizer: Optimizer,
    store: MasterStore,
    *,
    plain: bool,
    name_of: Callable[[Parameter], str] | None = None,
) -> Stepper:
    """Returns the stepper for `optimizer`: its own step (`plain`), halfstep's update, or its own step on the masters.

    `name_of` names a parameter in errors. halfstep updates optimizers of exactly the classes in its table
    (`halfstep.optim.table`); a subclass may compute something else.
    """
    if plain:
        return PlainStepper(optimizer)
    row = row_of(optimizer)
    if row is not None:
        return OnePassStepper(optimizer, store, row, name_of=name_of)
    return ForeignStepper(optimizer, store, name_of)


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer.step` cannot be called without a closure, like that of LBFGS."""
    step: Callable[..., Any] = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
