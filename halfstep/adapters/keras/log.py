"""Callbacks for `fit`: the run log, which a class writes from custom loops too, and kept running statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, Literal

import numpy as np
import torch

from halfstep.adapters.keras.backend import backend, keras
from halfstep.adapters.keras.find import find_cause, loss_of_batch
from halfstep.adapters.keras.policies import describe, layers_of, own_variables
from halfstep.adapters.keras.scale import LossScaleOptimizer
from halfstep.errors import PlanError, SetupError
from halfstep.explain.report.log import RunLog
from halfstep.plan.io import to_dict
from halfstep.plan.plan import Plan
from halfstep.records import NumericsError, Observation, SessionStart, StepRecord, Verdict
from halfstep.train.probe.rows import format_name, measure

ops = keras.ops
_LOG = logging.getLogger("halfstep")
_VERDICTS = 3  # looked for in a run: each costs several runs of a batch without compilation


class StepLog(AbstractContextManager["StepLog"]):
    """Writes halfstep's run log from a custom training loop: call `step` after each step of the optimizer.

    Every `every` steps, histograms of the weights and of the gradients passed to `step` are written. `halfstep report
    PATH` turns the log into a page. Reading a step's values waits for the device. Use it in a `with` statement, or call
    `close` at the end.

    Raises:
        SetupError: the optimizer is not a LossScaleOptimizer.
        PlanError: a layer does not have the plan's policy.
        LogError: the path cannot be written.
    """

    def __init__(
        self, path: str | PathLike[str], model: keras.Model, optimizer: Any, plan: Plan, *, every: int = 50
    ) -> None:
        if not isinstance(optimizer, LossScaleOptimizer):
            raise SetupError(
                "expected a LossScaleOptimizer, which has the loss scale and counts skipped steps, got "
                f"{type(optimizer).__name__}; wrap it: LossScaleOptimizer(optimizer, plan.scale)"
            )
        self._model, self._optimizer, self._every = model, optimizer, every
        layers = describe(model, plan).modules
        wrong = [f"{each.name or '(model)'}: {each.reason}" for each in layers if "not as" in each.reason]
        if wrong:
            raise PlanError(
                f"{len(wrong)} layers of {model.name!r} do not have the policies of plan {plan.name!r} "
                f"({'; '.join(wrong[:3])}); call apply_plan(model, plan) before model.compile"
            )
        modules = tuple(each.name for each in layers if each.name)
        self._owners = {id(v): path for path, layer in layers_of(model) for v in own_variables(layer)}
        self.log = RunLog(path)
        device = "cuda" if torch.cuda.is_available() and keras.distribution.list_devices("gpu") else "cpu"
        self.log.record(SessionStart(to_dict(plan), device, emulated=False, modules=modules))
        self.number = 0
        self.scale, self._skipped = float(optimizer.scaling.first), 0
        if optimizer.built:  # a run that goes on counts on
            self.number, self.scale, self._skipped, _ = self._read(optimizer.variables)

    def step(
        self,
        loss: Any = None,
        gradients: Sequence[Any] | None = None,
        *,
        optimizer_variables: Sequence[Any] | None = None,
        trainable_variables: Sequence[Any] | None = None,
    ) -> bool:
        """Writes the log's row for the last step; returns whether this step was skipped.

        If the optimizer has made several steps since the last call, one row covers all of them; the row is marked as
        skipped if any of the steps was. The optimizer numbers the steps, skipped ones included. `loss` is the unscaled
        loss. `gradients` are the gradients of the scaled loss, in the order of `model.trainable_variables`. A stateless
        loop also passes `optimizer_variables` and `trainable_variables`: the values that the variables of the optimizer
        and the trainable variables of the model have after the step.
        """
        carried, skips, last = self.scale, self._skipped, self.number
        self.number, self.scale, self._skipped, norm = self._read(optimizer_variables or self._optimizer.variables)
        skipped = self._skipped > skips
        value = None if loss is None else torch.tensor(_number(loss))
        values = torch.tensor(skipped), torch.tensor(carried), torch.tensor(norm)
        self.log(StepRecord(self.number, *values, loss=value))
        if self.number // self._every > last // self._every:
            weights = trainable_variables or [v.value for v in self._model.trainable_variables]
            self._observe("weight", weights, 1.0)
            if gradients is not None:
                self._observe("weight_grad", gradients, carried)
        return skipped

    def due(self) -> bool:
        """Returns whether histograms will be written for the next step."""
        return (self.number + 1) % self._every == 0

    def _read(self, values: Sequence[Any]) -> tuple[int, float, int, float]:
        """Returns steps, scale, skipped steps and the last gradient norm, from values of the optimizer's variables."""
        optimizer = self._optimizer
        by_id = {id(v): value for v, value in zip(optimizer.variables, values, strict=True)}
        applied = next(v for v in optimizer.inner_optimizer.variables if v.name == "iteration")  # accumulating ones too
        wanted = (applied, optimizer.dynamic_scale, optimizer.skipped, optimizer.grad_norm)
        steps, scale, skipped, norm = (_number(by_id[id(v)]) for v in wanted)
        return int(steps + skipped), scale, int(skipped), norm

    def _observe(self, kind: str, values: Sequence[Any], scale: float) -> None:
        for variable, value in zip(self._model.trainable_variables, values, strict=True):
            if value is not None:
                dtype = getattr(torch, keras.backend.standardize_dtype(value.dtype))
                wide = torch.from_numpy(np.array(ops.convert_to_numpy(ops.cast(value, "float32"))))
                stats, module, name = measure(wide), self._owners[id(variable)], variable.name
                self.log.record(Observation(self.number, module, kind, name, format_name(dtype), scale, stats))

    def close(self) -> None:
        self.log.close()

    def __exit__(self, *error: Any) -> None:
        self.log.__exit__(*error)


class LogCallback(keras.callbacks.Callback):
    """Writes halfstep's run log while `fit` runs: loss, scale, skips and gradient norm of every step.

    Every `every` steps it adds histograms of the weights, and of their gradients on the current batch, which costs one
    more forward and backward pass. If a step is skipped and the scale cannot go lower, the batch of this step is run
    again, layer by layer. The resulting verdict names the failing layer; it is written to the log and logged as a
    warning. With `on_failure="raise"`, a NumericsError with the verdict ends the run instead of the warning.

    With `steps_per_execution` above 1, one row covers all steps of an execution. In this case, and with several
    replicas, the callback does not see the batches, so it writes no verdicts and no histograms of gradients. The loss
    of a step is computed from the mean loss that Keras keeps, so after a non-finite loss no loss is written until the
    next epoch.

    Raises:
        SetupError, PlanError, LogError: when `fit` begins, for the same reasons as `StepLog`.
        NumericsError: with `on_failure="raise"`, a step was skipped and the scale cannot go lower.
    """

    def __init__(
        self, path: str | PathLike[str], plan: Plan, *, every: int = 50, on_failure: Literal["warn", "raise"] = "warn"
    ) -> None:
        super().__init__()
        if on_failure not in ("warn", "raise"):
            raise SetupError(f"on_failure is {on_failure!r}; set it to 'warn' or 'raise'")
        self._path, self._plan, self._every, self._on_failure = path, plan, every, on_failure
        self._steps: StepLog | None = None
        self._train_function: Any = None
        self._batch: Any = None
        self._runs_again = True
        self._sums = (0.0, 0.0)
        self._found = 0
        self.verdicts: list[Verdict] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self._found = len(self.verdicts)
        self._steps = StepLog(self._path, self.model, self.model.optimizer, self._plan, every=self._every)
        self._train_function, self._runs_again = self.model.train_function, True
        if self.model.steps_per_execution == 1:
            backend().hand_out_batches(self.model, self._take)
        else:
            _LOG.warning(
                f"steps_per_execution is {self.model.steps_per_execution}: the log has one row per execution, marked "
                "as skipped if any of its steps was, and neither verdicts nor histograms of gradients; for these set "
                "steps_per_execution to 1"
            )

    def _take(self, batch: Any) -> None:
        self._batch = batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the sums from which the loss of each step is computed, as Keras does at each epoch."""
        self._sums = (0.0, 0.0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the row of the step, and a verdict if the step was skipped and the scale cannot go lower."""
        backend().sync(self.model)
        steps = self._steps
        assert steps is not None
        carried = steps.scale
        found = self._run_again(_gradients, carried) if steps.due() else None
        skipped = steps.step(self._loss(), found)
        scaling = self.model.optimizer.scaling
        if skipped and (not scaling.adapts or carried <= scaling.min):
            self._blame(carried)

    def _loss(self) -> float | None:
        """Returns the loss of the last step, computed from the change in the sums of Keras's mean loss."""
        mean = next((each for each in self.model.metrics if each.name == "loss"), None)
        if mean is None:
            return None
        before, self._sums = self._sums, (_number(mean.total), _number(mean.count))
        weight = self._sums[1] - before[1]
        return (self._sums[0] - before[0]) / weight if weight and np.isfinite(before[0]) else None

    def _run_again(self, run: Callable[..., Any], scale: float) -> Any:
        """Returns the result of `run` on the last batch; returns None if no batch was seen, or if a run has failed."""
        if self._batch is None or not self._runs_again:
            return None
        try:
            return run(self.model, *keras.utils.unpack_x_y_sample_weight(self._batch), scale=scale)
        except Exception as error:
            self._runs_again = False
            _LOG.warning(
                "no verdicts and no histograms of gradients from now on: a batch could not be run again: %s", error
            )
            return None

    def _blame(self, scale: float) -> None:
        if len(self.verdicts) - self._found == _VERDICTS:
            return
        verdict = self._run_again(find_cause, scale)
        if verdict is None:
            return
        assert self._steps is not None
        self.verdicts.append(verdict)
        self._steps.log.record(verdict)
        message = (
            f"step {self._steps.number} was skipped at a loss scale of {scale:g}, which cannot go lower: {verdict}"
        )
        if self._on_failure == "raise":
            self.close()
            raise NumericsError(message, verdict)
        _LOG.warning(message)

    def on_train_end(self, logs: Any = None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the log; call it if an error ended `fit`. Idempotent."""
        if self._steps is not None:
            self._steps.close()
            self.model.train_function = self._train_function
            self._steps = self._batch = None


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
        self._skipped, self._values = self._read_skipped(), [ops.copy(v) for v in self._variables]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._read_skipped() > self._skipped:
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)

    def _read_skipped(self) -> int:
        backend().sync(self.model)
        optimizer = self.model.optimizer
        return int(ops.convert_to_numpy(optimizer.skipped)) if optimizer.built else 0


def _gradients(model: keras.Model, x: Any, y: Any, sample_weight: Any, *, scale: float) -> list[Any]:
    def run(tap: Any) -> Any:
        return loss_of_batch(model, x, y, sample_weight) * scale

    return backend().gradients(run, model.trainable_variables)[1]


def _number(value: Any) -> float:
    return float(ops.convert_to_numpy(value))
