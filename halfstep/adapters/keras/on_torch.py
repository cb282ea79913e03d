"""Implements the functions of `backend.py` for torch: optimizer steps, gradients, batches, and blaming an operation."""

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
    """Applies the gradients unless `found` says that one of them overflowed; adapts the loss scale."""
    if not bool(found):
        optimizer.inner_optimizer.apply(grads, variables)
    optimizer.adapt(found, norm)


def gradients(run: Callable[[Callable[[Any], Any]], Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns two lists of gradients of `run(tap)`: with respect to the tensors passed to `tap`, and to the variables.

    `run` must compute with the tensors that `tap` returns. It is called in a `StatelessScope`, so that its assignments
    do not last. It must not open a second `StatelessScope`, which would hide the first one.
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
    """Returns the verdict of `blame`: which operation makes the first non-finite value of a loss or its gradients."""
    try:
        with seen_as_modules(model), initialize(model, plan="O0") as session:
            return blame(session, loss)
    except HalfstepError:
        return None


def hand_out_batches(model: Any, take: Callable[[Any], None]) -> None:
    """Makes `fit` pass each batch to `take` before its step; does nothing if Keras makes several steps per call."""
    if model.steps_per_execution > 1:
        return
    step = model.train_function

    def train_function(data: Any) -> Any:
        batches = list(data)
        take(batches[-1])
        return step(batches)

    model.train_function = train_function


def summed(grads: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients unchanged, since they are already combined over all devices."""
    return grads


def sync(model: Any) -> None:
    """Does nothing: on torch, `fit` keeps all state in the variables of the model and its optimizer."""


def rewrite_graphs() -> None:
    """Does nothing: only TensorFlow can rewrite graphs to compute in fp16."""
