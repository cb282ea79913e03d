"""The TensorFlow backend of Keras, with replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from halfstep.adapters.keras.backend import Backend, Run, keras
from halfstep.errors import SetupError


class _TensorFlow(Backend):
    def apply_where_finite(
        self, optimizer: Any, found: Any, grads: Sequence[Any], norm: Any, variables: Sequence[Any]
    ) -> None:
        context = tf.distribute.get_replica_context()
        if context is None:
            raise SetupError("apply() was called outside a replica; call the train step as strategy.run(step, args)")
        step = optimizer.inner_optimizer.apply
        if not tf.distribute.has_strategy():
            tf.cond(found, lambda: None, lambda: step(grads, variables))
            optimizer.adapt(found, norm)
            return
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(found, tf.float32)) > 0

        def across(strategy: Any, found: Any, norm: Any, grads: Any, variables: Any) -> None:
            # A branch that holds a step, which merges the replicas itself, has to lie outside of them.
            anywhere, first_norm = (strategy.experimental_local_results(each)[0] for each in (found, norm))
            tf.cond(
                anywhere, lambda: None, lambda: strategy.extended.call_for_each_replica(step, args=(grads, variables))
            )
            optimizer.adapt(anywhere, first_norm)

        context.merge_call(across, args=(found, norm, list(grads), list(variables)))

    def gradients(self, run: Run, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        tapped: list[Any] = []
        with tf.GradientTape() as tape:

            def tap(tensor: Any) -> Any:
                tapped.append(tf.identity(tensor))
                tape.watch(tapped[-1])
                return tapped[-1]

            with keras.StatelessScope(collect_losses=True):
                loss = run(tap)
        found = tape.gradient(loss, [*tapped, *(v.value for v in variables)])
        return found[: len(tapped)], [None if g is None else tf.convert_to_tensor(g) for g in found[len(tapped) :]]

    def hand_out_batches(self, model: Any, take: Callable[[Any], None]) -> None:
        if model.distribute_strategy.num_replicas_in_sync > 1:
            return
        step = model.train_step
        if not model.run_eagerly:
            step = tf.function(step, reduce_retracing=True, jit_compile=model.jit_compile, autograph=False)

        def train_function(iterator: Any) -> Any:
            batch = next(iterator)
            take(batch)
            return step(batch)

        model.train_function = train_function

    def summed(self, grads: Sequence[Any]) -> Sequence[Any]:
        found = [g for g in grads if g is not None]
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
        return [tf.convert_to_tensor(g) for g in found]  # which adds up what comes for one row of an embedding

    def rewrite_graphs(self) -> None:
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})


HERE = _TensorFlow()
