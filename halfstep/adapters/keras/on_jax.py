"""Implements the functions of `backend.py` for JAX: optimizer steps, gradients, batches, and the state `fit` keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from halfstep.adapters.keras.installed import keras
from halfstep.records import Verdict


def apply_where_finite(optimizer: Any, found: Any, grads: Sequence[Any], norm: Any, variables: Sequence[Any]) -> None:
    """Applies the gradients unless `found` says that one of them overflowed; adapts the loss scale."""
    # Waits for the device to compute `found`, since a branch that runs on the device (`jax.lax.cond`) must not assign
    # variables.
    if not bool(found):
        optimizer.inner_optimizer.apply(grads, variables)
    optimizer.adapt(found, norm)


def gradients(run: Callable[[Callable[[Any], Any]], Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns two lists of gradients of `run(tap)`: with respect to the tensors passed to `tap`, and to the variables.

    `run` must compute with the tensors that `tap` returns. It is called in a `StatelessScope`, so that its assignments
    do not last. It must not open a second `StatelessScope`, which would hide the values of the variables. JAX has no
    gradients of intermediate tensors, so zeros are added to each tapped tensor, and the gradient of the zeros is
    returned; it equals the gradient of the tensor.
    """
    zeros: list[Any] = []

    def measure(tensor: Any) -> Any:
        zeros.append(jax.numpy.zeros_like(tensor))
        return tensor

    with keras.StatelessScope(collect_losses=True):
        run(measure)

    def loss(added: Sequence[Any], values: Sequence[Any]) -> Any:
        rest = iter(added)
        with keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True):
            return run(lambda tensor: tensor + next(rest))

    of_tapped, of_variables = jax.grad(loss, argnums=(0, 1))(zeros, [v.value for v in variables])
    return of_tapped, of_variables


def blame_step(model: Any, loss: Callable[[], Any]) -> Verdict | None:
    """Returns None: only on the torch backend can halfstep find the operation that fails."""
    return None


def hand_out_batches(model: Any, take: Callable[[Any], None]) -> None:
    """Makes `fit` pass each batch to `take` before its step; does nothing if Keras makes several steps per call."""
    if model.steps_per_execution > 1:
        return
    step = model.train_function

    def train_function(state: Any, iterator: Any) -> Any:
        batch = next(iterator)
        take(batch)
        return step(state, iter([batch]))

    model.train_function = train_function


def summed(grads: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients unchanged, since they are already combined over all devices."""
    return grads


def sync(model: Any) -> None:
    """Writes the state that `fit` keeps outside of the model to the variables of the model and its optimizer."""
    model.jax_state_sync()


def rewrite_graphs() -> None:
    """Does nothing: only TensorFlow can rewrite graphs to compute in fp16."""
