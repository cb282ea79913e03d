"""What the module-level functions of `apex.amp` have in common: the sessions that they opened, and what they print."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.adapters.apex.properties import Properties
from halfstep.cast.casting import Casting
from halfstep.edits import OpChange
from halfstep.records import StepRecord
from halfstep.session.parts import Part
from halfstep.session.session import Session

__all__ = ["_amp_state", "master_params", "maybe_print", "warn_or_err"]

NOT_INITIALIZED = (
    "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
    "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
)

_STASH = "_amp_stash"
_LAZY = ("_amp_lazy_init", "_lazy_init_maybe_master_weights")
"""What scripts that resume call on an optimizer, so that apex made its masters at once; here they are there by then."""


class AmpState:
    """apex's `_amp_state`, as far as scripts read it; the options and scales are there from the first `initialize` on.

    `opt_properties` has the options, `loss_scalers` a view of each loss scale, `handle` tells whether casts are on.
    Settings are `verbosity` (0: nothing is printed), `hard_override` (what contradicts a level is printed, not raised)
    and `allow_incoming_model_not_fp32`.
    """

    opt_properties: Properties
    loss_scalers: list[LossScaler]
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.handle = Handle()
        self._low = torch.float16
        self._trained: weakref.WeakSet[Trained] = weakref.WeakSet()  # each lives as long as its optimizers
        self._current: Trained | None = None
        self._registered: list[OpChange] = []

    def reset(self) -> None:
        """Closes all sessions and forgets all settings."""
        self.handle._deactivate()
        for trained in list(self._trained):
            trained.end()
        vars(self).clear()
        AmpState.__init__(self)

    def sessions(self) -> list[Trained]:
        """Returns the calls of `initialize` whose sessions are open."""
        return [trained for trained in self._trained if not trained.session.closed]

    def castings(self) -> list[Casting]:
        """Returns what casts ops by their list now: the sessions at O1, and `init`."""
        own = [trained.session.runtime.casting for trained in self.sessions() if trained.casts]
        return own if self.handle.casting is None else [*own, self.handle.casting]

    def of(self, optimizers: Sequence[Optimizer]) -> Trained:
        """Returns the call of `initialize` that these optimizers were given to.

        Raises:
            RuntimeError: they were given to none, or not to one.
        """
        if not hasattr(self, "opt_properties"):
            raise RuntimeError(NOT_INITIALIZED)
        for trained in self.sessions():
            known = {id(optimizer) for optimizer in trained.session.optimizers}
            if optimizers and all(id(optimizer) in known for optimizer in optimizers):
                return trained
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
        raise RuntimeError(
            f"amp.scale_loss was given {names}, which one call of amp.initialize did not return; give amp.initialize "
            "all models and optimizers that train together, in one call"
        )


@dataclass(frozen=True, eq=False)
class _Coming:
    """A skipped flag, and the scales of some losses before and after the step, on their way to the host."""

    numbers: Tensor
    loss_ids: tuple[int, ...]
    arrived: torch.cuda.Event | None

    def has_arrived(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]


class Trained:
    """One call of `initialize`: its session, which holds it, and the steps whose overflow is still to be printed.

    It watches the session's steps. On a CUDA device what it prints comes up to a step late, so that nothing waits.
    """

    pending: BaseException | None = None

    def __init__(self, session: Session, num_losses: int, *, casts: bool) -> None:
        self.session = session
        self.num_losses = num_losses
        self.casts = casts
        self._coming: deque[_Coming] = deque()
        for optimizer in session.optimizers:
            vars(optimizer).update({_STASH: SimpleNamespace(lazy_init_called=True), **dict.fromkeys(_LAZY, _nothing)})
        session.watchers.append(self)

    def carry(self, scale: Tensor) -> None:
        """Does nothing."""

    def after_step(
        self, record: StepRecord, parts: Sequence[Part], scales: Mapping[int, Tensor], stopping: Sequence[int]
    ) -> None:
        """Notes whether a step was skipped, and the scale of each of its losses before and after."""
        if STATE.verbosity > 0 and scales and not _is_capturing(record.skipped):
            now = [self.session.runtime.scales.of(loss_id).value for loss_id in scales]
            numbers = [number.to(record.skipped.device) for number in (record.skipped.float(), *scales.values(), *now)]
            self._coming.append(_Coming(*_sent(torch.stack(numbers), tuple(scales))))
        while self._coming and self._coming[0].has_arrived():
            self._say(self._coming.popleft())

    def close(self) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Closes the session, and takes from the optimizers what apex's had."""
        self.session.close()
        for optimizer in self.session.optimizers:
            for name in (_STASH, *_LAZY):
                vars(optimizer).pop(name, None)

    def load(self, scales: Mapping[int, tuple[float, int]]) -> None:
        """Goes on from the scales of some losses, and the clean steps in a row since each last changed.

        Raises:
            StateError: a scale is out of range, or they are not dynamic; nothing is changed.
        """
        state: dict[str, Any] = self.session.state_dict()
        for loss_id, (scale, unskipped) in scales.items():
            state["scales"][str(loss_id)] = {
                "kind": "dynamic",
                "scale": scale,
                "clean_steps": unskipped,
                "overflows_left": self.session.plan.scale.hysteresis,
            }
        self.session.load_state_dict(state)

    def _say(self, coming: _Coming) -> None:
        skipped, *scales = coming.numbers.tolist()
        if not skipped:
            return
        count = len(coming.loss_ids)
        steps = list(zip(coming.loss_ids, scales[:count], scales[count:], strict=True))
        lowered = [(loss_id, now) for loss_id, before, now in steps if now < before]
        for loss_id, now in lowered:
            maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {now}")
        if not lowered:
            loss_id, _, now = steps[0]
            maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} keeping loss scale {now}")


def _nothing() -> None:
    """Does nothing."""


def _is_capturing(t: Tensor) -> bool:
    return t.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _sent(numbers: Tensor, loss_ids: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], torch.cuda.Event | None]:
    """Sends numbers to the host without waiting for them."""
    if numbers.device.type != "cuda":
        return numbers, loss_ids, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, loss_ids, event


class LossScaler:
    """A view of one loss scale, with the names that apex's had; reading it waits for the device.

    `_loss_scale` can be set where it is dynamic, as scripts do right after `initialize`; nothing else can.
    """

    __slots__ = ("_loss_id", "_trained")  # so that setting what halfstep would not heed is an error

    def __init__(self, trained: Trained, loss_id: int) -> None:
        self._trained = trained
        self._loss_id = loss_id

    @property
    def dynamic(self) -> bool:
        """Whether overflows change it."""
        return self._trained.session.plan.scale.adapts

    def loss_scale(self) -> float:
        """Returns the scale."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return self._trained.session.runtime.scales.read(self._loss_id)

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._trained.load({self._loss_id: (scale, self._unskipped)})

    @property
    def _unskipped(self) -> int:
        state = self._trained.session.state_dict()["scales"].get(str(self._loss_id), {})
        return int(state.get("clean_steps", 0))


class Handle:
    """What `init` returned in apex: tells whether casts are on; one with a `casting` ends it with `_deactivate`."""

    def __init__(self, casting: Casting | None = None) -> None:
        self.casting = casting
        self._stack = ExitStack()
        self._verbose = False
        if casting is not None:
            self._stack.callback(casting.open())
            self._stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            # It stays open while weights change, and a kept low copy of one would be an old one.
            torch.set_autocast_cache_enabled(False)
            self._stack.enter_context(casting.region())

    def is_active(self) -> bool:
        """Returns whether ops are cast by their list: after `init` or at O1, outside of `disable_casts`."""
        return self._is_active

    @property
    def _is_active(self) -> bool:
        return any(not casting.is_as_written for casting in STATE.castings())

    def _clear_cache(self) -> None:
        """Does nothing: no copy of a weight is kept that could be an old one."""

    def _deactivate(self) -> None:
        self.casting = None
        self._stack.close()

    def scale_loss(self, loss: Any, optimizer: Any) -> None:
        """Raises a RuntimeError, as apex did."""
        raise RuntimeError("The old Amp API is no longer supported: use amp.initialize and amp.scale_loss")

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> None:
        """Raises a RuntimeError: it was of the same old API."""
        self.scale_loss(None, optimizer)


def warn_or_err(message: str) -> None:
    """Refuses what contradicts a level; prints it where `hard_override` is set.

    Raises:
        RuntimeError: it is not set.
    """
    if not STATE.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Prints a message unless `verbosity` is 0, with `rank0` in the first process alone."""
    quiet = rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
    if STATE.verbosity > 0 and not quiet:
        print(message)


def master_params(optimizer: Any) -> Iterator[nn.Parameter]:
    """Yields the parameters of an optimizer: the model's own, with true fp32 gradients after `scale_loss`."""
    for group in optimizer.param_groups:
        yield from group["params"]


STATE = _amp_state = AmpState()
