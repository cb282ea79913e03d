"""What is torch's own: steps, gradients, and the batches that `fit` draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from halfstep.adapters.keras.installed import keras
from halfstep.adapters.keras.modules import seen_as_modules
from halfstep.diagnose.blame import blame
from halfstep.errors import HalfstepError
from halfstep.initialize import initialize
from halfstep.records import Verdict


@torch.no_grad()
def apply_where_finite(optimizer: Any, found: Any, grads: Sequence[Any], norm: Any, variables: Sequence[Any]) -> None:
    """Steps where no gradient overflowed, and adapts the scale; waits for the device, as Keras's own branches do."""
    if not bool(found):
        optimizer.inner_optimizer.apply(grads, variables)
    optimizer.adapt(found, norm)


def gradients(run: Callable[[Callable[[Any], Any]], Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the gradients of what `run(tap)` returns for each tensor that it gives to `tap`, and for variables.

    `run` assigns nothing that stays: it runs in a `StatelessScope`, and opens none, which would hide variables.
    """
    tapped: list[torch.Tensor] = []

    def tap(tensor: torch.Tensor) -> torch.Tensor:
        tapped.append(tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().clone().requires_grad_())
        return tapped[-1]

    with torch.enable_grad():
        with keras.StatelessScope(collect_losses=True):
            loss = run(tap)
        found = torch.autograd.grad(loss, [*tapped, *(v.value for v in variables)], allow_unused=True)
    return list(found[: len(tapped)]), list(found[len(tapped) :])


def blame_step(model: Any, loss: Callable[[], Any]) -> Verdict | None:
    """Returns which operation makes the first value of a loss, or of its gradients, that is not finite.

    The model runs as it is, in its own policies. None where the operation cannot be seen.
    """
    try:
        with seen_as_modules(model), initialize(model, plan="O0") as session:
            return blame(session, loss)
    except HalfstepError:
        return None


def hand_out_batches(model: Any, take: Callable[[Any], None]) -> None:
    """Has each batch that `fit` draws given to `take` too; does nothing where a call of Keras's makes several steps."""
    if model.steps_per_execution > 1:
        return
    step = model.train_function

    def train_function(data: Any) -> Any:
        batches = list(data)
        take(batches[-1])
        return step(batches)

    model.train_function = train_function


def summed(grads: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients as they are: those of all devices together."""
    return grads


def sync(model: Any) -> None:
    """Does nothing: variables hold their values."""


def rewrite_graphs() -> None:
    """Does nothing: there are no graphs but those of Keras's layers."""
