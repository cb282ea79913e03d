"""What a step adds to each weight before any rounding, for those who watch a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.kernels.batch import Adam, Batch
from halfstep.optim import eager
from halfstep.optim.arranged import state_names
from halfstep.optim.foreign import ForeignStepper
from halfstep.optim.masters import MasterStore
from halfstep.optim.own import OwnStepper, options_of
from halfstep.optim.rows import widened
from halfstep.optim.steppers import Stepper, is_own


class Added(NamedTuple):
    """A weight as it was stored before the step, and what the step adds to it (float64, zero on a skipped step)."""

    param: Parameter
    before: Tensor
    update: Tensor


class UpdateWatch:
    """Sees what one step of one optimizer adds to some of its parameters.

    For torch's Adam, AdamW and SGD that is computed beside the step, in float64, from the state and the gradients that
    the step is given (not what a step hook makes of them): so it also shows what the stored format, or fp32, cannot
    hold. For other optimizers it is the change of the fp32 value that they update.
    """

    def __init__(self, optimizer: Optimizer, stepper: Stepper, store: MasterStore, skipped: Tensor) -> None:
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
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for p, grad in zip(params, grads, strict=True):
            if not is_own(self._optimizer):
                self._held.append((p, p.detach().clone(), self._store.full(p).clone()))
            elif p.numel():
                group = groups[id(p)]
                batch = self._shadow(p, grad, factor, group)
                start = batch.weights[0].clone()
                eager.update(batch, options_of(self._optimizer, group), self._skipped.to(p.device, non_blocking=True))
                yield Added(p, _real(p.detach()), batch.weights[0] - start)

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

    def _shadow(self, p: Parameter, grad: Tensor, factor: Tensor | None, group: dict[str, object]) -> Batch:
        """Returns copies in float64 of all that an update of `p` reads."""
        options = options_of(self._optimizer, group)
        state = self._optimizer.state.get(p, {})
        dense = widened(grad).to_dense() if grad.is_sparse else grad
        true = _real(dense.detach()).double()
        weight = _real(self._store.full(p)).to(torch.float64, copy=True)
        states = {
            name: [
                torch.zeros_like(weight) if state.get(name) is None else _real(state[name]).to(weight.device).double()
            ]
            for name in state_names(options)
        }
        batch = Batch("full", [weight], [], [true if factor is None else true * factor.to(p.device)], states)
        if isinstance(options, Adam):
            step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
            batch.steps.append(step.to(p.device, non_blocking=True) + 1)
        else:
            flag = self._stepper.fresh(p) if isinstance(self._stepper, OwnStepper) else None
            new = state.get("momentum_buffer") is None
            batch.fresh.append(torch.full((), float(new), device=p.device) if flag is None or new else flag)
        return batch


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t
