"""The JAX backend of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from halfstep.adapters.keras.backend import Backend, Run, keras


class _Jax(Backend):
    def gradients(self, run: Run, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # JAX has no gradients of intermediate tensors, so zeros are added to each tapped tensor, and the gradient of
        # the zeros is returned; it equals the gradient of the tensor.
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

    def hand_out_batches(self, model: Any, take: Callable[[Any], None]) -> None:
        step = model.train_function

        def train_function(state: Any, iterator: Any) -> Any:
            batch = next(iterator)
            take(batch)
            return step(state, iter([batch]))

        model.train_function = train_function

    def sync(self, model: Any) -> None:
        model.jax_state_sync()


HERE = _Jax()
