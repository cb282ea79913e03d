"""How a session makes an update (by halfstep, by the optimizer on masters, or by it alone), and what that adds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.torch_internals import mark_stepped
from halfstep.train.kernels.batch import Batch, Scratch, as_real, chunks, in_layout_of, is_dense, mapped
from halfstep.train.kernels.stats import (
    Updates,
    add_updates,
    addresses_of,
    is_sampled,
    sampled_places,
    takes_updates,
)
from halfstep.train.optim.hooks import check_gradients, named, original_step, run_own_step, true_gradients, updated_by
from halfstep.train.optim.laws import Group, Row, precise
from halfstep.train.optim.masters import COPIED, PICKLED, MasterStore, join
from halfstep.train.optim.moments import Moments, opened
from halfstep.train.optim.optimizers import row_of
from halfstep.train.optim.step import OnePassStepper
from halfstep.train.processes.shards import part_of

_PART = 2**16  # elements at a time, 256 KiB each of some eight tensors


class PlainStepper:
    """Makes one optimizer's updates by its own step, on the parameters and gradients as they are, as at O0."""

    syncs = False  # whether `step` waits to read `found`, which else takes effect on the device

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

    def bytes(self) -> dict[str, int]:
        """Returns how many bytes of optimizer state are kept outside of `optimizer.state`, by how they are."""
        return {}

    def close(self) -> None:
        """Removes what the stepper attached to the optimizer."""


class ForeignStepper(PlainStepper):
    """Runs an optimizer's own `step`, with stand-ins for low-precision parameters: fp32 value, unscaled gradient."""

    syncs = True

    def __init__(
        self, optimizer: Optimizer, store: MasterStore, name_of: Callable[[Parameter], str] | None = None
    ) -> None:
        super().__init__(optimizer)
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
        params = [p for p in updated_by(self._optimizer) if p.grad is not None]
        grads = [part_of(p.grad, p) for p in params if p.grad is not None]
        if failed := self.step(params, grads, None, torch.zeros((), dtype=torch.bool, device="cpu")):
            raise failed

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
        for optimizer in _with_inner(self._optimizer):
            for group in optimizer.param_groups:
                group["params"][:] = [by.get(p, p) for p in group["params"]]
            items = list(optimizer.state.items())
            optimizer.state.clear()
            for key, value in items:
                optimizer.state[by.get(key, key) if isinstance(key, Parameter) else key] = value


def _with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it wraps, as Lookahead does."""
    found = [optimizer]
    for each in found:
        found += [v for v in vars(each).values() if isinstance(v, Optimizer) and all(v is not f for f in found)]
    return found


Stepper = PlainStepper | OnePassStepper
"""Makes one optimizer's updates."""


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


def holds_a_part(optimizer: Optimizer) -> bool:
    """Returns whether each process has the states of some parameters alone, as torch's ZeroRedundancyOptimizer has."""
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)  # its import takes long


def needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether `optimizer.step` cannot be called without a closure, like that of LBFGS."""
    step: Callable[..., Any] = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextmanager
def watching(  # the arguments of a step, and who looks on
    stepper: Stepper,
    store: MasterStore,
    factor: Tensor | None,
    found: Tensor,
    params: Sequence[Parameter],
    grads: Sequence[Tensor],
    take: Callable[[Updates], None],
) -> Iterator[None]:
    """Passes to `take` what a step within a `with` block adds to `params`, a part of its own, before any rounding."""
    # By the law of a row, before the step. For other optimizers, and for laws of whole weights (LAMB, NovoGrad), it is
    # the change that the step makes to the fp32 value.
    foreign = stepper if isinstance(stepper, ForeignStepper) else None
    held: list[tuple[Parameter, Tensor, Tensor]] = []
    unrounded: dict[Parameter, Tensor] = {}
    with torch.no_grad():
        if not isinstance(stepper, OnePassStepper) or stepper.row.whole:
            held = [(p, p.detach().clone(), store.full(p).clone()) for p in params]
        else:
            for group, dense in stepper.batches(params, grads):
                for each in dense:
                    device = each.batch.device
                    local = None if factor is None else factor.to(device, non_blocking=True)
                    given = [params[i] for i in each.places]
                    skipped = found.to(device, non_blocking=True)
                    take(Coming(given, each.batch.weights, stepper.row, each.batch, group, local, skipped))
    if foreign is not None:
        foreign.unrounded = unrounded
    try:
        yield
        with torch.no_grad():
            for p, stored, full in held:
                value = unrounded[p] if p in unrounded else store.full(p)
                take(Made([p], [as_real(stored)], as_real(value).double() - as_real(full).double()))
    finally:
        if foreign is not None:
            foreign.unrounded = None


@dataclass(frozen=True)
class Coming(Updates):
    """The updates that a step will make to the parameters of one batch."""

    row: Row
    batch: Batch  # whose `steps` do not count that step yet
    group: Group
    factor: Tensor | None  # of the true gradients over `batch.grads`; None: 1
    skipped: Tensor  # 0-dim bool; all updates are 0

    @torch.no_grad()
    def add_to(self, rows: Tensor, places: Sequence[int | None], *, sample: int | None) -> None:
        """Adds the statistics of the update of `params[i]` to `rows[places[i]]`; skips it if `places[i]` is None."""
        kernel, options = self.row.native, self.row.options(self.group)
        if kernel is not None and self.row.compiled(self.group) and takes_updates(self.batch, options, rows):
            found = addresses_of(rows, places)
            add_updates(kernel, self.batch, options, self.factor, self.skipped, found, sample=sample)
        else:
            super().add_to(rows, places, sample=sample)

    def parts(self, index: int, sample: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (stored weight, update in float64) of one parameter, in parts that fit into a processor's cache."""
        # Of a weight with more than `sample` elements, the parts hold only those that `add_stats` would read.
        alone = self._batch_of(index)
        if alone.kept is not None:
            coded = alone.kept.kind != "full"
            (alone,) = chunks(alone, alone.weights[0].numel())  # in one row
            alone = replace(alone, states=opened(alone) if coded else alone.states, kept=None)
        if sample is not None and is_sampled(alone.weights[0], sample) and is_dense(alone.weights[0]):
            chosen = sampled_places(alone.weights[0].numel(), sample, alone.device)
            alone = mapped(alone, lambda ts: [t.as_strided((t.numel(),), (1,)).index_select(0, chosen) for t in ts])
        for part in chunks(alone, _PART):
            yield part.extras[0], torch.where(self.skipped, 0.0, _update_of(self.row, part, self.group, self.factor))

    def _batch_of(self, index: int) -> Batch:
        """Returns one parameter as a batch: its full weight as `weights`, its stored weight as `extras`."""
        batch, stored = self.batch, self.batch.weights[index]
        full = stored.float() if batch.layout == "low" else stored
        if batch.extras:
            extra = batch.extras[index]
            full = join(stored, extra) if batch.layout == "split" else extra
        return Batch(
            "full",
            [in_layout_of(full, stored)],
            [stored],
            [batch.grads[index]],
            {name: [tensors[index]] for name, tensors in batch.states.items()},
            [batch.steps[index] + 1] if batch.steps else [],
            kept=batch.kept and batch.kept.cut([(index, 0, 0)]),
        )


@dataclass(frozen=True)
class Made(Updates):
    """The update that a step has made to one parameter, in float64."""

    update: Tensor

    def parts(self, index: int, sample: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the stored weight and the update."""
        yield self.stored[index], self.update


def _update_of(row: Row, part: Batch, group: Group, factor: Tensor | None) -> Tensor:
    """Returns in float64 what an update adds to the weight of `part`, a batch of one parameter."""
    # On a weight of zero but for its decay, so that an update far smaller than the weight is not rounded away.
    weight, dtype = part.weights[0], part.dtype
    grad = part.grads[0].to(dtype) if factor is None else part.grads[0].to(dtype) * factor
    grad = -grad if group["maximize"] else grad
    decay, decoupled = group["weight_decay"], row.decoupled(group)
    if decay and not decoupled:
        grad = grad + weight * decay
    alone = replace(part, weights=[torch.zeros_like(weight)], grads=[grad])
    ((update, *_),) = row.law(alone, {**group, "weight_decay": 0.0, "maximize": False})
    kept = weight.double() * (precise(group["lr"], part) * decay) if decay and decoupled else 0.0
    return update.double() - kept
