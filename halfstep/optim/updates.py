"""What a step adds to each weight before any rounding, for those who watch a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.kernels.batch import Adam, Batch, Options, chunks, in_layout_of, is_dense
from halfstep.kernels.stats import is_sampled, sampled_places
from halfstep.optim import eager
from halfstep.optim.arranged import state_names
from halfstep.optim.foreign import ForeignStepper
from halfstep.optim.masters import MasterStore
from halfstep.optim.own import OwnStepper, options_of
from halfstep.optim.rows import widened
from halfstep.optim.steppers import Stepper, is_own

_PART = 2**16  # elements at a time, 256 KiB each of some eight tensors


class Added(NamedTuple):
    """A weight, or a part of it, as it was stored before the step, and what the step adds to it.

    The update is in float64, and zero where the step is skipped. `sampled` says that the parts are not all.
    """

    param: Parameter
    before: Tensor
    update: Tensor
    sampled: bool = False


class UpdateWatch:
    """Sees what one step of one optimizer adds to some of its parameters.

    For torch's Adam, AdamW and SGD that is computed beside the step, from the state and the gradients that the step is
    given (not what a step hook makes of them), and not added to the weight: so it also shows what the stored format, or
    fp32, cannot hold. For other optimizers it is the change of the fp32 value that they update. With a `sample`, of
    larger weights only so many elements may be computed: those that `halfstep.kernels.stats.add_stats` reads.
    """

    def __init__(
        self, optimizer: Optimizer, stepper: Stepper, store: MasterStore, skipped: Tensor, sample: int | None
    ) -> None:
        self._sample = sample
        self._optimizer = optimizer
        self._stepper = stepper
        self._store = store
        self._skipped = skipped
        self._held: list[tuple[Parameter, Tensor, Tensor]] = []  # with the stored and the fp32 value before the step

    @torch.no_grad()
    def before(self, params: Sequence[Parameter], grads: Sequence[Tensor], factor: Tensor | None) -> Iterator[Added]:
        """Yields what is known before the step, which gets these gradients times `factor`, and prepares the rest."""
        if isinstance(self._stepper, ForeignStepper):
            self._stepper.unrounded = {}
        own = is_own(self._optimizer)
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for p, grad in zip(params, grads, strict=True):
            if own and p.numel():
                yield from self._computed(p, grad, factor, groups[id(p)])
            elif not own:
                self._held.append((p, p.detach().clone(), self._store.full(p).clone()))

    @torch.no_grad()
    def after(self) -> Iterator[Added]:
        """Yields the rest, once the step is made."""
        unrounded = self._stepper.unrounded if isinstance(self._stepper, ForeignStepper) else None
        for p, stored, full in self._held:
            value = self._store.full(p) if not unrounded or p not in unrounded else unrounded[p]
            yield Added(p, _real(stored), _real(value).double() - _real(full).double())
        self._held.clear()
        if isinstance(self._stepper, ForeignStepper):
            self._stepper.unrounded = None

    def _computed(self, p: Parameter, grad: Tensor, factor: Tensor | None, group: dict[str, Any]) -> Iterator[Added]:
        """Yields what the update of `p` adds, in parts that stay in a cache."""
        options = options_of(self._optimizer, group)
        skipped = self._skipped.to(p.device, non_blocking=True)
        batch = self._gathered(p, grad, options)
        sampled = is_sampled(p, self._sample) and is_dense(batch.weights[0])
        if sampled and self._sample is not None:
            batch = _picked(batch, sampled_places(batch.weights[0].numel(), self._sample, p.device))
        for part in chunks(batch, _PART):
            update = _update_of(part, options, factor)
            yield Added(p, part.extras[0], torch.where(skipped, 0.0, update), sampled)

    def _gathered(self, p: Parameter, grad: Tensor, options: Options) -> Batch:
        """Returns what an update of `p` reads, the weight in full, and beside it, as `extras`, as it is stored."""
        state = self._optimizer.state.get(p, {})
        stored = _real(p.detach())
        weight = in_layout_of(_real(self._store.full(p)), stored)
        dense = widened(grad).to_dense() if grad.is_sparse else grad
        batch = Batch("full", [weight], [stored], [in_layout_of(_real(dense.detach()), stored)])
        for name in state_names(options):
            held = state.get(name)
            zero = torch.zeros_like(weight) if held is None else in_layout_of(_real(held).to(weight.device), stored)
            batch.states = {**batch.states, name: [zero]}
        if isinstance(options, Adam):
            step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
            batch.steps.append(step.to(p.device, non_blocking=True) + 1)
        else:
            flag = self._stepper.fresh(p) if isinstance(self._stepper, OwnStepper) else None
            new = state.get("momentum_buffer") is None
            batch.fresh.append(torch.full((), float(new), device=p.device) if flag is None or new else flag)
        return batch


def _update_of(part: Batch, options: Options, factor: Tensor | None) -> Tensor:
    """Returns what an update adds to the one weight of a part, as float64; the part stays as it is.

    The weight takes part in its decay alone, so that what is far smaller than the weight is not rounded away.
    """
    weight, dtype = part.weights[0], part.dtype
    grad = part.grads[0].to(dtype) if factor is None else part.grads[0].to(dtype) * factor.to(weight.device)
    grad = -grad if options.maximize else grad
    decoupled = isinstance(options, Adam) and options.decoupled
    if options.weight_decay and not decoupled:
        grad = grad + weight * options.weight_decay
    alone = replace(
        part,
        weights=[torch.zeros_like(weight)],
        grads=[grad],
        states={name: [tensors[0].to(dtype, copy=True)] for name, tensors in part.states.items()},
    )
    never = torch.zeros((), dtype=torch.bool, device=weight.device)
    eager.update(alone, replace(options, weight_decay=0.0, maximize=False), never)
    update = alone.weights[0].double()
    return (
        update - weight.double() * (options.lr * options.weight_decay) if decoupled and options.weight_decay else update
    )


def _picked(batch: Batch, places: Tensor) -> Batch:
    """Returns the elements at some places in memory of the one parameter of a batch, all its tensors alike dense."""

    def pick(tensors: list[Tensor]) -> list[Tensor]:
        return [t.as_strided((t.numel(),), (1,)).index_select(0, places) for t in tensors]

    return replace(
        batch,
        weights=pick(batch.weights),
        extras=pick(batch.extras),
        grads=pick(batch.grads),
        states={name: pick(tensors) for name, tensors in batch.states.items()},
    )


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t
