"""Imports the backend-specific functions for Keras's current backend: from `on_tensorflow`, `on_jax` or `on_torch`."""

from __future__ import annotations

from halfstep.adapters.keras.installed import BACKEND

if BACKEND == "tensorflow":
    from halfstep.adapters.keras.on_tensorflow import (
        apply_where_finite,
        blame_step,
        gradients,
        hand_out_batches,
        rewrite_graphs,
        summed,
        sync,
    )
elif BACKEND == "jax":
    from halfstep.adapters.keras.on_jax import (
        apply_where_finite,
        blame_step,
        gradients,
        hand_out_batches,
        rewrite_graphs,
        summed,
        sync,
    )
elif BACKEND == "torch":
    from halfstep.adapters.keras.on_torch import (
        apply_where_finite,
        blame_step,
        gradients,
        hand_out_batches,
        rewrite_graphs,
        summed,
        sync,
    )
else:
    raise ImportError(
        f"halfstep supports the Keras backends tensorflow, jax and torch, not {BACKEND}; choose one before importing "
        "keras: os.environ['KERAS_BACKEND'] = 'jax'"
    )

__all__ = ["apply_where_finite", "blame_step", "gradients", "hand_out_batches", "rewrite_graphs", "summed", "sync"]
