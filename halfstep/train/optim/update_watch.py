"""What a step adds to each weight before any rounding, for code that observes the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.train.kernels.batch import Batch, as_real, chunks, in_layout_of, is_dense, mapped
from halfstep.train.kernels.stats import (
    Updates,
    add_updates,
    addresses_of,
    is_sampled,
    sampled_places,
    takes_updates,
)
from halfstep.train.optim.codes import opened
from halfstep.train.optim.laws import Group, Row, precise
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.split import join
from halfstep.train.optim.step import OnePassStepper
from halfstep.train.optim.steppers import ForeignStepper, Stepper

_PART = 2**16  # elements at a time, 256 KiB each of some eight tensors


class UpdateWatch:
    """Computes what one step of one optimizer adds to some of its parameters, before any rounding."""

    # By the law of a row, apart from the step. For other optimizers, and for laws of whole weights (LAMB, NovoGrad), it
    # is the change that the step makes to the fp32 value.

    def __init__(self, stepper: Stepper, store: MasterStore, skipped: Tensor) -> None:
        self._stepper = stepper
        self._store = store
        self._skipped = skipped
        self._held: list[tuple[Parameter, Tensor, Tensor]] = []  # with the stored and the fp32 value before the step

    @torch.no_grad()
    def before(self, params: Sequence[Parameter], grads: Sequence[Tensor], factor: Tensor | None) -> Iterator[Updates]:
        """Yields the updates that can be computed before a step with `grads` times `factor`."""
        if isinstance(self._stepper, ForeignStepper):
            self._stepper.unrounded = {}
        if not isinstance(self._stepper, OnePassStepper) or self._stepper.row.whole:
            self._held = [(p, p.detach().clone(), self._store.full(p).clone()) for p in params]
            return
        for group, dense in self._stepper.batches(params, grads):
            for each in dense:
                device = each.batch.device
                local = None if factor is None else factor.to(device, non_blocking=True)
                skipped = self._skipped.to(device, non_blocking=True)
                given = [params[i] for i in each.places]
                yield Coming(given, each.batch.weights, self._stepper.row, each.batch, group, local, skipped)

    @torch.no_grad()
    def after(self) -> Iterator[Updates]:
        """Yields, after the step, the updates that `before` could not compute."""
        unrounded = self._stepper.unrounded if isinstance(self._stepper, ForeignStepper) else None
        for p, stored, full in self._held:
            value = self._store.full(p) if not unrounded or p not in unrounded else unrounded[p]
            yield Made([p], [as_real(stored)], as_real(value).double() - as_real(full).double())
        self.forget()

    def forget(self) -> None:
        """Releases what was held for the step, also if the step was not made."""
        self._held.clear()
        if isinstance(self._stepper, ForeignStepper):
            self._stepper.unrounded = None


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
