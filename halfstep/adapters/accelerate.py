"""halfstep inside Accelerate: `prepare` in place of `accelerator.prepare`. Needs the extra [accelerate].

An Accelerator calls its scaler for whatever mixed precision does: `scale`, `step`, `update` and the states of both.
Here that is a Session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.adapters.versions import check_version
from halfstep.errors import SessionError, SetupError
from halfstep.initialize import initialize
from halfstep.optim.steppers import needs_closure
from halfstep.plan.plan import Plan
from halfstep.records import StepRecord
from halfstep.session.session import Session

try:
    import accelerate

    check_version("accelerate", accelerate.__version__, first="1.14", below="1.16")
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(
        f"halfstep.adapters.accelerate needs {error.name or 'accelerate'}; run: pip install 'halfstep[accelerate]'"
    ) from error

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, *args: Any, plan: Plan | str = "O1", **settings: Any) -> Any:
    """Returns what `accelerator.prepare(*args)` does, with all its models and optimizers trained under a plan.

    The loop stays as it is: `accelerator.backward`, `accumulate`, `clip_grad_norm_`, `optimizer.step`, `save_state` and
    `load_state`. `plan` and `settings` are those of `halfstep.initialize`, and `session_of(accelerator)` is the
    session. Give all models and optimizers of a loop in one call.

    Raises:
        PlanError: as `halfstep.initialize`.
        SetupError: as that, or this setting of Accelerate is not supported.
    """
    models = [each for each in args if isinstance(each, nn.Module)]
    optimizers = [each for each in args if isinstance(each, Optimizer)]
    if not models:
        raise SetupError("prepare was given no model; give all models and optimizers of a loop to one call of prepare")
    attach(accelerator, models, optimizers, plan, **settings)
    prepared = accelerator.prepare(*args)
    for each in prepared if isinstance(prepared, tuple) else (prepared,):
        take_over(accelerator, each)
    return prepared


def session_of(accelerator: Accelerator) -> Session:
    """Returns the session of an Accelerator.

    Raises:
        SessionError: it has none.
    """
    if not isinstance(accelerator.scaler, SessionScaler):
        raise SessionError(
            "this Accelerator has no session; call halfstep.adapters.accelerate.prepare(accelerator, ...)"
        )
    return accelerator.scaler.session


def attach(
    accelerator: Accelerator, models: list[nn.Module], optimizers: list[Optimizer], plan: Plan | str, **settings: Any
) -> Session:
    """Opens a session on models and optimizers that the Accelerator is to prepare next."""
    if accelerator.distributed_type not in SUPPORTED:
        raise SetupError(
            f"halfstep does not work with Accelerate's {accelerator.distributed_type.value}; use one device, or "
            "DistributedDataParallel (MULTI_GPU or MULTI_CPU in `accelerate config`)"
        )
    if accelerator.mixed_precision != "no":
        raise SetupError(
            f"mixed_precision={accelerator.mixed_precision!r} is on beside halfstep, which would cast and scale twice; "
            "leave it out of Accelerator(...), of TrainingArguments (bf16, fp16) and of `accelerate config`"
        )
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, SessionScaler):
        raise SetupError("the Accelerator has a scaler already; do not set accelerator.scaler beside halfstep")
    if isinstance(accelerator.scaler, SessionScaler) and not accelerator.scaler.session.closed:
        raise SetupError(
            "this Accelerator has a session already; give all models and optimizers to one call of prepare, or close "
            "the session first: session_of(accelerator).close(), also before accelerator.free_memory()"
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
    """Sends the steps of a prepared optimizer to the session; anything else that is prepared stays as it is.

    One that was prepared before there was a session has no scaler yet.
    """
    if type(prepared) is AcceleratedOptimizer and isinstance(accelerator.scaler, SessionScaler):
        prepared.scaler = accelerator.scaler
        prepared.__class__ = SessionOptimizer


class SessionScaler:
    """What an Accelerator takes for its scaler: a session, and the record of each optimizer's last step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.records: dict[Optimizer, StepRecord] = {}

    def scale(self, loss: Tensor) -> _Loss:
        """Returns what `backward` is called on."""
        return _Loss(self.session, loss)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Makes the session's step of one optimizer, or has one that calls its closure several times make its own.

        Raises:
            SetupError: the session has no such optimizer.
        """
        if not any(optimizer is each for each in self.session.optimizers):
            raise SetupError(
                f"the {type(optimizer).__name__} that steps is none of those that halfstep was given: give it to "
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
        """Does nothing: the step has adapted the scale."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Does nothing: gradients are true."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the session's state, which `save_state` writes."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back."""
        self.session.load_state_dict(state)


class _Loss:
    def __init__(self, session: Session, loss: Tensor) -> None:
        self._session, self._loss = session, loss

    def backward(self, **kwargs: Any) -> None:
        self._session.backward(self._loss, **kwargs)


class SessionOptimizer(AcceleratedOptimizer):
    """An optimizer of Accelerate's that a session steps.

    Accelerate would tell a skipped step by whether `step` was called, which is wrong where a step skips on the device.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Makes the session's step, where this backward pass is the last of those that add up."""
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device, as schedulers of Accelerate ask after each step."""
        record = self.scaler.records.get(self.optimizer)
        return record is not None and bool(record.skipped)
