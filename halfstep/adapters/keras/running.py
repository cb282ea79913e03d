"""A Keras callback that keeps running statistics unchanged when a step is skipped."""

from __future__ import annotations

from typing import Any

from halfstep.adapters.keras.backend import backend
from halfstep.adapters.keras.installed import keras
from halfstep.adapters.keras.policies import layers_of, own_variables
from halfstep.adapters.keras.scale import LossScaleOptimizer
from halfstep.errors import SetupError

ops = keras.ops


class KeepStatistics(keras.callbacks.Callback):
    """Restores running statistics, such as BatchNormalization's, when `fit` skips a step.

    Keras assigns them in the forward pass, before it is known that the step is skipped, so one non-finite batch would
    make them non-finite for good. The callback copies them, and waits for the device, at each step.

    Raises:
        SetupError: when `fit` begins, the optimizer is not a LossScaleOptimizer.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the running statistics: variables that no gradient changes, in layers that are not frozen."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            raise SetupError(
                "KeepStatistics requires an optimizer that counts skips; wrap yours: LossScaleOptimizer(optimizer)"
            )
        layers = [layer for _, layer in layers_of(self.model) if layer.trainable]
        self._variables = [v for layer in layers for v in own_variables(layer) if not v.trainable]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Copies the running statistics."""
        self._skipped, self._values = self._read_skipped(), [ops.copy(v) for v in self._variables]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Restores the running statistics if the step was skipped."""
        if self._read_skipped() > self._skipped:
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)

    def _read_skipped(self) -> int:
        backend().sync(self.model)
        optimizer = self.model.optimizer
        return int(ops.convert_to_numpy(optimizer.skipped)) if optimizer.built else 0
