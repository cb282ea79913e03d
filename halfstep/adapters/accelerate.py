"""halfstep inside Accelerate (extra [accelerate]): a Session takes the calls that it makes to its scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.adapters.versions import extra
from halfstep.errors import SessionError, SetupError
from halfstep.initialize import initialize
from halfstep.plan.plan import Plan
from halfstep.records import StepRecord
from halfstep.train.optim.steppers import needs_closure
from halfstep.train.session.session import Session

with extra("accelerate", first="1.14", below="1.16"):
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, *args: Any, plan: Plan | str = "O1", **settings: Any) -> Any:
    """Returns the result of `accelerator.prepare(*args)`; the models and optimizers in `args` train under a plan.

    The loop does not change: `accelerator.backward`, `accumulate`, `clip_grad_norm_`, `optimizer.step`, `save_state`
    and `load_state` work as before. `plan` and `settings` are those of `halfstep.initialize`. Pass all models and
    optimizers of a loop in one call. `session_of(accelerator)` returns the session.

    Raises:
        PlanError: for the same reasons as `halfstep.initialize`.
        SetupError: for the same reasons as `halfstep.initialize`, or because no model was passed, the Accelerator
            already has a session or a scaler, or one of its settings is not supported.
    """
    models = [each for each in args if isinstance(each, nn.Module)]
    optimizers = [each for each in args if isinstance(each, Optimizer)]
    if not models:
        raise SetupError(
            "prepare was called without a model; pass all models and optimizers of a loop to one call of prepare"
        )
    attach(accelerator, models, optimizers, plan, **settings)
    prepared = accelerator.prepare(*args)
    for each in prepared if isinstance(prepared, tuple) else (prepared,):
        take_over(accelerator, each)
    return prepared


def session_of(accelerator: Accelerator) -> Session:
    """Returns the session of an Accelerator.

    Raises:
        SessionError: the Accelerator has no session.
    """
    if not isinstance(accelerator.scaler, SessionScaler):
        raise SessionError(
            "this Accelerator has no session; call halfstep.adapters.accelerate.prepare(accelerator, ...)"
        )
    return accelerator.scaler.session


def attach(
    accelerator: Accelerator, models: list[nn.Module], optimizers: list[Optimizer], plan: Plan | str, **settings: Any
) -> Session:
    """Opens a session on models and optimizers; call it before the Accelerator prepares them."""
    if accelerator.distributed_type not in SUPPORTED:
        raise SetupError(
            f"halfstep does not work with Accelerate's {accelerator.distributed_type.value}; use one device, or "
            "DistributedDataParallel (MULTI_GPU or MULTI_CPU in `accelerate config`)"
        )
    if accelerator.mixed_precision != "no":
        raise SetupError(
            f"mixed_precision={accelerator.mixed_precision!r} together with halfstep would cast and scale twice; leave "
            "mixed_precision out of Accelerator(...) and `accelerate config`, and bf16 and fp16 out of "
            "TrainingArguments"
        )
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, SessionScaler):
        raise SetupError(
            "the Accelerator already has a scaler, and halfstep sets its own; do not set accelerator.scaler"
        )
    if isinstance(accelerator.scaler, SessionScaler) and not accelerator.scaler.session.closed:
        raise SetupError(
            "this Accelerator already has a session; pass all models and optimizers to one call of prepare, or close "
            "the session first: session_of(accelerator).close(). Close it before accelerator.free_memory() too"
        )
    for model in models:
        model.to(accelerator.device)
    own = [each.optimizer if isinstance(each, AcceleratedOptimizer) else each for each in optimizers]
    session = initialize(models, own or None, plan, stepping="optimizer", **settings)
    if accelerator.scaler is None:
        accelerator.scaler = SessionScaler(session)
    accelerator.scaler.session = session  # optimizers that are prepared again keep their scaler
    return session


def take_over(accelerator: Accelerator, prepared: Any) -> None:
    """Turns an AcceleratedOptimizer into a SessionOptimizer, which steps through the session; ignores other objects."""
    # The optimizer's scaler is set too, since it is missing if the optimizer was prepared before the session was
    # opened.
    if type(prepared) is AcceleratedOptimizer and isinstance(accelerator.scaler, SessionScaler):
        prepared.scaler = accelerator.scaler
        prepared.__class__ = SessionOptimizer


class SessionScaler:
    """The scaler of an Accelerator: passes its calls to a session, and keeps the last StepRecord of each optimizer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.records: dict[Optimizer, StepRecord] = {}

    def scale(self, loss: Tensor) -> _Loss:
        """Returns an object to use in place of the loss: its `backward()` is `session.backward(loss)`."""
        return _Loss(self.session, loss)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Steps one optimizer through the session; calls `closure`, if any, once before the step."""
        if not any(optimizer is each for each in self.session.optimizers):
            raise SetupError(
                f"this {type(optimizer).__name__} is not an optimizer of the session; pass it to "
                "prepare(accelerator, ...), and do not replace it afterwards"
            )
        if needs_closure(optimizer):
            optimizer.step(closure)
            return
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.records[optimizer] = self.session.step(optimizer)

    def update(self) -> None:
        """Does nothing, since `step` has already adapted the loss scale."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Does nothing, since the session unscales gradients at the end of each backward pass."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the session's state, which `save_state` writes."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of the session, as `state_dict` returned it."""
        self.session.load_state_dict(state)


class _Loss:
    def __init__(self, session: Session, loss: Tensor) -> None:
        self._session, self._loss = session, loss

    def backward(self, **kwargs: Any) -> None:
        self._session.backward(self._loss, **kwargs)


class SessionOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around an optimizer, changed so that `step` goes through a session.

    `step_was_skipped` also reports the steps that the session skipped on the device. Accelerate's own class reports a
    step as skipped only if `step` of the wrapped optimizer was not called.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Steps the optimizer through the session; does nothing while Accelerate still accumulates gradients."""
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device. Accelerate's schedulers read it after each step."""
        record = self.scaler.records.get(self.optimizer)
        return record is not None and bool(record.skipped)
