"""What a step adds to each weight before any rounding, for code that observes the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.train.kernels.batch import Batch, as_real, chunks, in_layout_of, is_dense, mapped
from halfstep.train.kernels.stats import (
    Updates,
    add_stats,
    add_updates,
    addresses_of,
    in_last_places,
    is_sampled,
    sampled_places,
    takes_updates,
)
from halfstep.train.optim.codes import opened
from halfstep.train.optim.gradients import widened
from halfstep.train.optim.laws import Group, Row
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.moments import add
from halfstep.train.optim.split import join
from halfstep.train.optim.step import OnePassStepper
from halfstep.train.optim.steppers import ForeignStepper, Stepper
from halfstep.train.optim.table import row_of

_PART = 2**16  # elements at a time, 256 KiB each of some eight tensors


class UpdateWatch:
    """Computes what one step of one optimizer adds to some of its parameters.

    By the law of a row, apart from the step: what the stored format would round away is included. For other optimizers,
    and for laws of whole weights (LAMB, NovoGrad), it is the change that the step makes to the fp32 value.
    """

    def __init__(self, optimizer: Optimizer, stepper: Stepper, store: MasterStore, skipped: Tensor) -> None:
        self._optimizer = optimizer
        self._stepper = stepper
        self._store = store
        self._skipped = skipped
        self._held: list[tuple[Parameter, Tensor, Tensor]] = []  # with the stored and the fp32 value before the step

    @torch.no_grad()
    def before(self, params: Sequence[Parameter], grads: Sequence[Tensor], factor: Tensor | None) -> Iterator[Updates]:
        """Yields the updates that can be computed before a step with `grads` times `factor`."""
        if isinstance(self._stepper, ForeignStepper):
            self._stepper.unrounded = {}
        row = row_of(self._optimizer)
        if row is None or row.whole:
            self._held = [(p, p.detach().clone(), self._store.full(p).clone()) for p in params]
            return
        self._store.adopt_changed(params)
        given = {id(p): grad for p, grad in zip(params, grads, strict=True)}
        for group in self._optimizer.param_groups:
            coming: dict[tuple[Any, ...], Coming] = {}
            for p in group["params"]:
                if id(p) in given and p.numel() and self._fits(p, given[id(p)]):
                    self._gather(row, p, given[id(p)], group, factor, coming)
            yield from coming.values()

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

    def _fits(self, p: Parameter, grad: Tensor) -> bool:
        """Returns whether the update of `p` can be computed; if not, the step raises an error that says why."""
        states = [t for t in self._optimizer.state.get(p, {}).values() if isinstance(t, Tensor) and t.dim()]
        return grad.device == p.device and all(t.shape == p.shape for t in [grad, *states])

    def _gather(
        self,
        row: Row,
        p: Parameter,
        grad: Tensor,
        group: Group,
        factor: Tensor | None,
        coming: dict[Any, Coming],
    ) -> None:
        """Adds `p` to the batch in `coming` for its layout, device, dtype and density; makes the batch if missing."""
        layout = self._store.layout(p)
        weight = as_real(p.detach())
        codes = self._stepper.codes_of(p, group) if isinstance(self._stepper, OnePassStepper) else None
        kept = None if codes is None or codes.kept is None else codes.kept.emptied()
        key = (layout, p.device, weight.dtype, is_dense(weight), kept and kept.kind)
        if key not in coming:
            local = None if factor is None else factor.to(p.device, non_blocking=True)
            batch = Batch(layout, [], [], [], {name: [] for name in row.states(group)}, kept=kept)
            coming[key] = Coming(row, [], batch, group, local, self._skipped.to(p.device, non_blocking=True))
        coming[key].params.append(p)
        batch = coming[key].batch
        batch.weights.append(weight)
        if layout in ("copy", "split"):
            batch.extras.append(self._store.extra(p))
        dense = widened(grad).to_dense() if grad.is_sparse else grad
        batch.grads.append(in_layout_of(as_real(dense.detach()), weight))
        state = self._optimizer.state.get(p, {})
        if codes is not None:
            add(batch, codes)
        for name, tensors in [] if codes is not None else batch.states.items():
            held = state.get(name)
            if held is None:
                tensors.append(torch.full_like(weight, row.start, dtype=batch.dtype))
            else:
                tensors.append(in_layout_of(as_real(held).to(p.device, batch.dtype), weight))
        if row.counts or codes is not None:
            count = state.get("step", 0.0)
            if isinstance(count, Tensor):
                step = count.to(p.device, torch.float32, non_blocking=True)
            else:
                step = torch.full((), float(count), dtype=torch.float32, device=p.device)
            batch.steps.append(step)


@dataclass(frozen=True)
class Coming:
    """The updates that a step will make to the parameters of one batch."""

    row: Row
    params: list[Parameter]
    batch: Batch  # whose `steps` do not count that step yet
    group: Group
    factor: Tensor | None  # of the true gradients over `batch.grads`; None: 1
    skipped: Tensor  # 0-dim bool; all updates are 0

    @property
    def stored(self) -> list[Tensor]:
        """The weights as they are stored, maybe in low precision."""
        return self.batch.weights

    @torch.no_grad()
    def add_to(self, rows: Tensor, places: Sequence[int | None], *, sample: int | None) -> None:
        """Adds the statistics of the update of `params[i]` to `rows[places[i]]`; skips it if `places[i]` is None."""
        kernel, options = self.row.native, self.row.options(self.group)
        if kernel is not None and self.row.compiled(self.group) and takes_updates(self.batch, options, rows):
            places = addresses_of(rows, places)
            add_updates(kernel, self.batch, options, self.factor, self.skipped, places, sample=sample)
            return
        for index, place in enumerate(places):
            if place is not None:
                for stored, update in self.parts(index, sample):
                    add_stats([in_last_places(update, stored)], rows, [place], sample=sample)

    def parts(self, index: int, sample: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (stored weight, update in float64) of one parameter, in parts that fit into a processor's cache."""
        # Of a weight with more than `sample` elements, the parts hold only those that `add_stats` would read.
        alone = self._batch_of(index)
        if alone.kept is not None:
            (alone,) = chunks(alone, alone.weights[0].numel())  # in one row
            alone = replace(alone, states=opened(alone), kept=None)
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
class Made:
    """The update that a step has made to one parameter, in float64."""

    params: list[Parameter]
    stored: list[Tensor]
    update: Tensor

    def add_to(self, rows: Tensor, places: Sequence[int | None], *, sample: int | None) -> None:
        """Adds the statistics of the update to `rows[places[0]]`; does nothing if `places[0]` is None."""
        (place,) = places
        if place is not None:
            add_stats([in_last_places(self.update, self.stored[0])], rows, [place], sample=sample)


def _update_of(row: Row, part: Batch, group: Group, factor: Tensor | None) -> Tensor:
    """Returns in float64 what an update adds to the weight of `part`, a batch of one parameter; does not change `part`.

    The weight is used only for weight decay. The rest is computed on a weight of zero, so that an update far smaller
    than the weight is not rounded away.
    """
    weight, dtype = part.weights[0], part.dtype
    grad = part.grads[0].to(dtype) if factor is None else part.grads[0].to(dtype) * factor
    grad = -grad if group["maximize"] else grad
    decay, decoupled = group["weight_decay"], row.decoupled(group)
    if decay and not decoupled:
        grad = grad + weight * decay
    alone = replace(part, weights=[torch.zeros_like(weight)], grads=[grad])
    ((update, *_),) = row.law(alone, {**group, "weight_decay": 0.0, "maximize": False})
    return update.double() - weight.double() * (group["lr"] * decay) if decay and decoupled else update.double()
