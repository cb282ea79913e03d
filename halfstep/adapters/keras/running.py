"""Running statistics in Keras: a callback that has a skipped step leave them as they were."""

from __future__ import annotations

from typing import Any

from halfstep.adapters.keras.backend import sync
from halfstep.adapters.keras.installed import keras
from halfstep.adapters.keras.policies import layers_of, own_variables
from halfstep.adapters.keras.scale import LossScaleOptimizer
from halfstep.errors import SetupError

ops = keras.ops


class KeepStatistics(keras.callbacks.Callback):
    """Puts running statistics, as BatchNormalization's, back where `fit` skips a step.

    Keras assigns them in the forward pass, before it is known that the step is skipped: after a batch that is not
    finite they would not be either, for good. It copies them, and waits for the device, at each step.

    Raises:
        SetupError: the optimizer does not count skips, when `fit` begins.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds what is to be kept: no gradient changes it, and it is not frozen."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            raise SetupError("KeepStatistics needs to know of skips; wrap the optimizer: LossScaleOptimizer(optimizer)")
        layers = [layer for _, layer in layers_of(self.model) if layer.trainable]
        self._variables = [v for layer in layers for v in own_variables(layer) if not v.trainable]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Copies them."""
        self._skipped, self._values = self._read_skipped(), [ops.copy(v) for v in self._variables]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Puts them back after a step that was skipped."""
        if self._read_skipped() > self._skipped:
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)

    def _read_skipped(self) -> int:
        sync(self.model)
        optimizer = self.model.optimizer
        return int(ops.convert_to_numpy(optimizer.skipped)) if optimizer.built else 0
