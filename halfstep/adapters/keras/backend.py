"""Imports Keras, with an error that says what to install, and has what differs between its backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, cast

from halfstep.records import Verdict
from halfstep.validate import check_version

try:
    import keras
except ImportError as error:
    missing = (error.name or "keras").partition(".")[0]
    raise ImportError(
        "halfstep.adapters.keras needs keras; run: pip install 'halfstep[keras]'"
        if missing == "keras"
        else f"Keras is set to run on {missing}, which is not installed; run: pip install {missing}, or choose an "
        "installed backend before importing keras: os.environ['KERAS_BACKEND'] = 'torch'"
    ) from error
except ValueError as error:  # of a name that no backend has
    raise ImportError(
        f"{error}; choose tensorflow, jax or torch before importing keras: os.environ['KERAS_BACKEND'] = 'torch'"
    ) from error

check_version("keras", keras.__version__, first="3.15", below="3.16")

BACKEND: str = keras.backend.backend()
if BACKEND not in ("tensorflow", "jax", "torch"):
    raise ImportError(
        f"halfstep supports the Keras backends tensorflow, jax and torch, not {BACKEND}; choose one before importing "
        "keras: os.environ['KERAS_BACKEND'] = 'jax'"
    )

__all__ = ["BACKEND", "Backend", "Run", "backend", "keras"]

Run = Callable[[Callable[[Any], Any]], Any]


class Backend:
    """A backend of Keras, with what most of them do."""

    def apply_where_finite(
        self, optimizer: Any, found: Any, grads: Sequence[Any], norm: Any, variables: Sequence[Any]
    ) -> None:
        """Applies the gradients unless `found` says that one of them overflowed; adapts the loss scale."""
        # Waits for `found`: a branch that runs on the device, such as `jax.lax.cond`, must not assign variables.
        if not bool(found):
            optimizer.inner_optimizer.apply(grads, variables)
        optimizer.adapt(found, norm)

    def gradients(self, run: Run, variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of `run(tap)`: of the tensors that `run` passes to `tap`, and of the variables."""
        # `run` is called in a `StatelessScope`, so that assignments do not last; a second one inside would hide it.
        raise NotImplementedError

    def hand_out_batches(self, model: Any, take: Callable[[Any], None]) -> None:
        """Makes `fit`, at one step per call, pass each batch to `take` before its step."""
        raise NotImplementedError

    def blame_step(self, model: Any, loss: Callable[[], Any]) -> Verdict | None:
        """Returns which operation makes the first non-finite value of a loss or its gradients, where that is known."""
        return None

    def summed(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Returns the gradients that are not None, as the optimizer sums them over its replicas in its step."""
        return [g for g in grads if g is not None]

    def sync(self, model: Any) -> None:
        """Writes state that `fit` keeps outside of the model to the variables of the model and its optimizer."""

    def rewrite_graphs(self) -> None:
        """Makes the backend rewrite the graphs of functions, where it can, to compute in fp16."""


@cache
def backend() -> Backend:
    """Returns the backend that Keras runs on."""
    return cast(Backend, import_module(f"halfstep.adapters.keras.on_{BACKEND}").HERE)
