"""How a session makes an optimizer's update: by halfstep, by the optimizer on masters, or by the optimizer alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.torch_internals import mark_stepped
from halfstep.train.kernels.batch import Scratch
from halfstep.train.optim.gradients import check_gradients, named, true_gradients
from halfstep.train.optim.hooks import original_step, run_own_step
from halfstep.train.optim.masters import COPIED, PICKLED, MasterStore
from halfstep.train.optim.moments import Moments
from halfstep.train.optim.step import OnePassStepper
from halfstep.train.optim.table import row_of
from halfstep.train.processes.shards import part_of


class Stepper(Protocol):
    """Makes one optimizer's updates; `syncs`: `step` waits to read `found`, which else takes effect on the device."""

    syncs: bool

    def step(
        self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor
    ) -> BaseException | None:
        """Updates `params` from `grads` times `factor`; changes nothing if `found` is true."""

    def prepare(self) -> None:
        """Makes the state that a first update of the parameters with a gradient needs, before it is read or loaded."""

    def bytes(self) -> int:
        """Returns how many bytes of optimizer state are kept outside of `optimizer.state`."""
        return 0

    def close(self) -> None:
        """Removes what the stepper attached to the optimizer."""


class PlainStepper(Stepper):
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


class ForeignStepper(Stepper):
    """Runs an optimizer's own `step`, with stand-ins for low-precision parameters: fp32 value, unscaled gradient."""

    syncs = True

    def __init__(
        self, optimizer: Optimizer, store: MasterStore, name_of: Callable[[Parameter], str] | None = None
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._name_of = name_of
        self._stand_ins: dict[Parameter, Parameter] = {}
        self.unrounded: dict[Parameter, Tensor] | None = None  # new values of low weights, for who puts a dict here

    def step(
        self, params: list[Parameter], grads: list[Tensor], factor: Tensor | None, found: Tensor
    ) -> BaseException | None:
        """Updates `params` from `grads` times `factor`, or does nothing if `found` is true; waits for the device."""
        check_gradients(params, grads, self._name_of)
        mark_stepped(self._optimizer)  # LR schedulers should not warn about a skip
        if bool(found):
            return None
        self._store.adopt_changed(params)
        with self._stood_in(params) as seen, true_gradients(seen, grads, factor):
            return run_own_step(self._optimizer, original_step(self._optimizer))

    def prepare(self) -> None:
        """Makes the optimizer's initial state by calling its `step`; all gradients and learning rates must be zero."""
        params = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [part_of(p.grad, p) for p in params if p.grad is not None]
        if failed := self.step(params, grads, None, torch.zeros((), dtype=torch.bool, device="cpu")):
            raise failed

    def close(self) -> None:
        """Drops the fp32 stand-ins of the parameters."""
        self._stand_ins.clear()

    @contextmanager
    def _stood_in(self, params: list[Parameter]) -> Iterator[list[Parameter]]:
        """Replaces low parameters by fp32 stand-ins within a `with` block; then stores the new values in `params`."""
        swapped = {
            p: self._stand_in(p)
            for p in params
            if self._store.trained_layout(p, partial(named, p, self._name_of)) != "full"
        }
        self._exchange(swapped)
        try:
            yield [swapped.get(p, p) for p in params]
        finally:
            self._exchange({stand_in: p for p, stand_in in swapped.items()})
            for p, stand_in in swapped.items():
                self._store.write(p, stand_in.detach())
                if self.unrounded is not None:
                    self.unrounded[p] = stand_in.detach()
                stand_in.grad = None
                stand_in.data = stand_in.new_empty(0)  # between steps the store alone holds masters

    def _stand_in(self, p: Parameter) -> Parameter:
        """Returns the fp32 stand-in of `p`: always the same object, because optimizers may keep a reference to it."""
        stand_in = self._stand_ins.get(p)
        if stand_in is None:
            stand_in = self._stand_ins[p] = Parameter(torch.empty(0, dtype=torch.float32, device=p.device))
            marks = {name: value for name, value in vars(p).items() if name not in (COPIED, PICKLED)}
            vars(stand_in).update(marks)  # that users put on parameters for their optimizers
        copied = self._store.layout(p) == "copy"
        if copied:
            self._store.adopt(p)
        stand_in.data = self._store.extra(p) if copied else self._store.full(p)
        return stand_in

    def _exchange(self, by: dict[Parameter, Parameter]) -> None:
        """Replaces each parameter `p` in `by` with `by[p]`, in the same param groups and state dict."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            group["params"][:] = [by.get(p, p) for p in group["params"]]
        items = list(optimizer.state.items())
        optimizer.state.clear()
        for key, value in items:
            optimizer.state[by.get(key, key) if isinstance(key, Parameter) else key] = value


def make_stepper(
    optimizer: Optimizer,
    store: MasterStore,
    *,
    plain: bool,
    name_of: Callable[[Parameter], str] | None = None,
    moments: Moments | None = None,
    emulates: Callable[[], bool] = lambda: False,
    scratch: Scratch | None = None,
) -> Stepper:
    """Returns halfstep's update if its table has the class, else the optimizer's own step, if `plain` as it is."""
    if plain:
        return PlainStepper(optimizer)
    row = row_of(optimizer)
    if row is not None:
        return OnePassStepper(
            optimizer, store, row, name_of=name_of, moments=moments, emulates=emulates, scratch=scratch
        )
    return ForeignStepper(optimizer, store, name_of)


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer.step` cannot be called without a closure, like that of LBFGS."""
    step: Callable[..., Any] = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
