"""Implements the functions of `backend.py` for TensorFlow: optimizer steps in all replicas, gradients, and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from halfstep.adapters.keras.installed import keras
from halfstep.errors import SetupError
from halfstep.records import Verdict


def apply_where_finite(optimizer: Any, found: Any, grads: Sequence[Any], norm: Any, variables: Sequence[Any]) -> None:
    """Applies the gradients unless one overflowed in any replica, and adapts the loss scale."""
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
            anywhere,
            lambda: None,
            lambda: strategy.extended.call_for_each_replica(step, args=(grads, variables)),
        )
        optimizer.adapt(anywhere, first_norm)

    context.merge_call(across, args=(found, norm, list(grads), list(variables)))


def gradients(run: Callable[[Callable[[Any], Any]], Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns two lists of gradients of `run(tap)`: with respect to the tensors passed to `tap`, and to the variables.

    `run` must compute with the tensors that `tap` returns. It is called in a `StatelessScope`, so that its assignments
    do not last. It must not open a second `StatelessScope`, which would hide the first one.
    """
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


def blame_step(model: Any, loss: Callable[[], Any]) -> Verdict | None:
    """Returns None: only on the torch backend can halfstep find the operation that fails."""
    return None


def hand_out_batches(model: Any, take: Callable[[Any], None]) -> None:
    """Makes `fit` pass each batch to `take` before its step."""
    if model.distribute_strategy.num_replicas_in_sync > 1 or model.steps_per_execution > 1:
        return
    step = model.train_step
    if not model.run_eagerly:
        step = tf.function(step, reduce_retracing=True, jit_compile=model.jit_compile, autograph=False)

    def train_function(iterator: Any) -> Any:
        batch = next(iterator)
        take(batch)
        return step(batch)

    model.train_function = train_function


def summed(grads: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients that are not None, each summed over the replicas, as the optimizer sums them in its step.

    A sparse gradient, such as that of an embedding, is returned as a dense tensor of its rows. Rows with the same index
    are added up into one row.
    """
    found = [g for g in grads if g is not None]
    context = tf.distribute.get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        found = context.all_reduce(tf.distribute.ReduceOp.SUM, found)
    return [_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in found]


def _rows(grad: tf.IndexedSlices) -> Any:
    """Returns the rows of a sparse gradient as a dense tensor, with rows of the same index added up into one row."""
    # Rows of zeros at the end keep the number of rows as it was, since XLA refuses tensors whose size depends on
    # values.
    order = tf.argsort(grad.indices)
    indices = tf.gather(grad.indices, order)
    is_next = tf.cast(indices[1:] != indices[:-1], tf.int32)
    places = tf.concat([[0], tf.cumsum(is_next)], 0)
    return tf.math.unsorted_segment_sum(tf.gather(grad.values, order), places, tf.size(indices))


def sync(model: Any) -> None:
    """Does nothing: on TensorFlow, `fit` keeps all state in the variables of the model and its optimizer."""


def rewrite_graphs() -> None:
    """Makes TensorFlow rewrite the graphs of functions, where it can, to compute in fp16."""
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
