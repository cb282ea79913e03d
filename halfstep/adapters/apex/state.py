"""The state that the functions of `apex.amp` share, such as their open sessions, and the messages they print."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.adapters.apex.properties import Properties
from halfstep.edits import OpChange
from halfstep.later import Later, is_capturing
from halfstep.records import StepRecord
from halfstep.train.cast.casting import Casting
from halfstep.train.processes.shards import own_number
from halfstep.train.session.parts import Part
from halfstep.train.session.session import Session

__all__ = ["_amp_state", "master_params", "maybe_print", "warn_or_err"]

NOT_INITIALIZED = (
    "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
    "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
)

_STASH = "_amp_stash"
_LAZY = ("_amp_lazy_init", "_lazy_init_maybe_master_weights")
"""Methods that resuming scripts call to make apex create the masters; halfstep has created them by then."""


class AmpState:
    """The object that apex calls `_amp_state`, with the attributes that scripts read or set.

    `opt_properties` has the options and `loss_scalers` a view of each loss scale; both exist after the first
    `initialize`. `handle` tells whether casts are on. Scripts may set three attributes. `verbosity=0` prints nothing.
    `hard_override=True` prints a warning, instead of raising an error, if an option contradicts the level.
    `allow_incoming_model_not_fp32=True` allows models with fp16 or bf16 values.
    """

    opt_properties: Properties
    loss_scalers: list[LossScaler]

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.handle = Handle()
        self._low = torch.float16
        self._trained: weakref.WeakSet[Trained] = weakref.WeakSet()  # each lives as long as its optimizers
        self._registered: list[OpChange] = []

    def reset(self) -> None:
        for trained in list(self._trained):
            trained.end()
        vars(self).clear()
        AmpState.__init__(self)

    def sessions(self) -> list[Trained]:
        """Returns a `Trained` for each call of `initialize` whose session is still open."""
        return [trained for trained in self._trained if not trained.session.closed]

    def castings(self) -> list[Casting]:
        """Returns the Castings in use, which cast torch ops by op list: one per session at O1."""
        return [trained.session.runtime.casting for trained in self.sessions() if trained.casts]

    def of(self, optimizers: Sequence[Optimizer]) -> Trained:
        """Returns the `Trained` made by the call of `initialize` that these optimizers were passed to."""
        if not hasattr(self, "opt_properties"):
            raise RuntimeError(NOT_INITIALIZED)
        for trained in self.sessions():
            known = {id(optimizer) for optimizer in trained.session.optimizers}
            if optimizers and all(id(optimizer) in known for optimizer in optimizers):
                return trained
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
        raise RuntimeError(
            f"amp.scale_loss got {names}, but expects optimizers that one call of amp.initialize returned; pass all "
            "models and optimizers that train together to one call of amp.initialize"
        )


class Trained:
    """One call of `initialize`: its session, and the steps whose overflow is not printed yet (on CUDA a step late)."""

    pending: BaseException | None = None

    def __init__(self, session: Session, num_losses: int, *, casts: bool) -> None:
        self.session = session
        self.num_losses = num_losses
        self.casts = casts
        self._coming: deque[tuple[tuple[int, ...], Later]] = deque()
        for optimizer in session.optimizers:
            vars(optimizer).update({_STASH: SimpleNamespace(lazy_init_called=True), **dict.fromkeys(_LAZY, _nothing)})
        session.runtime.scales.as_torch_amp = True
        session.watchers.append(self)

    def carry(self, scale: Tensor) -> None:
        """Does nothing; a watcher of a session must have this method."""

    def after_step(
        self, record: StepRecord, parts: Sequence[Part], scales: Mapping[int, Tensor], stopping: Sequence[int]
    ) -> None:
        """Records whether a step was skipped, and the scale of each of its losses before and after the step."""
        if STATE.verbosity > 0 and scales and not is_capturing():
            now = [self.session.runtime.scales.of(loss_id).value for loss_id in scales]
            numbers = [number.to(record.skipped.device) for number in (record.skipped.float(), *scales.values(), *now)]
            self._coming.append((tuple(scales), Later([torch.stack(numbers)])))
        while self._coming and self._coming[0][1].arrived():
            self._say(*self._coming.popleft())

    def close(self) -> None:
        """Does nothing; a watcher of a session must have this method."""

    def end(self) -> None:
        """Closes the session, and removes apex's attributes from the optimizers."""
        self.session.close()
        for optimizer in self.session.optimizers:
            for name in (_STASH, *_LAZY):
                vars(optimizer).pop(name, None)

    def load(self, scales: Mapping[int, tuple[float, int]]) -> None:
        """Sets the scales of some losses, and the number of clean steps since each scale last changed."""
        state: dict[str, Any] = self.session.state_dict()
        for loss_id, (scale, unskipped) in scales.items():
            state["scales"][str(loss_id)] = {
                "kind": "dynamic",
                "scale": scale,
                "clean_steps": unskipped,
                "overflows_left": self.session.plan.scale.hysteresis,
            }
        self.session.load_state_dict(state)

    def _say(self, loss_ids: tuple[int, ...], numbers: Later) -> None:
        # Whether the step was skipped, then the scale of each loss before the step, then after it.
        skipped, *scales = numbers.read()[0].tolist()
        before, after = scales[: len(loss_ids)], scales[len(loss_ids) :]
        changes = list(zip(loss_ids, before, after, strict=True))
        said = [(loss_id, f"reducing loss scale to {now}") for loss_id, was, now in changes if now < was]
        for loss_id, change in (said or [(loss_ids[0], f"keeping loss scale {after[0]}")]) if skipped else ():
            maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} {change}")


def _nothing() -> None:
    """Does nothing, under the names of apex's methods that create masters, which some scripts call."""


class LossScaler:
    """A view of one loss scale, with the attribute names of apex; reading the scale waits for the device.

    `_loss_scale` of a dynamic scale can be set, as scripts do right after `initialize`; nothing else can be set.
    """

    __slots__ = ("_loss_id", "_trained")  # so that setting what halfstep would not heed is an error

    def __init__(self, trained: Trained, loss_id: int) -> None:
        self._trained = trained
        self._loss_id = loss_id

    @property
    def dynamic(self) -> bool:
        return self._trained.session.plan.scale.adapts

    def loss_scale(self) -> float:
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        return self._trained.session.runtime.scales.read(self._loss_id)

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        if not self.dynamic:
            raise AttributeError(
                f"the loss scale is fixed at {self._loss_scale}, so _loss_scale cannot be set; pass that number, or "
                'loss_scale="dynamic", to amp.initialize'
            )
        self._trained.load({self._loss_id: (scale, self._unskipped)})

    @property
    def _unskipped(self) -> int:
        return int(self._trained.session.state_dict()["scales"].get(str(self._loss_id), {}).get("clean_steps", 0))


class Handle:
    """What apex calls a handle: `is_active` tells whether torch ops are cast by op list."""

    def is_active(self) -> bool:
        """Returns whether casts are on: after an `initialize` at O1, and outside of `disable_casts`."""
        return any(not casting.is_as_written for casting in STATE.castings())

    _is_active = property(is_active)


def warn_or_err(message: str) -> None:
    """Raises an error with this message, or prints it as a warning if `hard_override` is set."""
    if not STATE.hard_override:
        raise RuntimeError(message)
    print("Warning:  " + message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Prints a message unless `verbosity` is 0; with `rank0` only the process of rank 0 prints."""
    if STATE.verbosity > 0 and not (rank0 and own_number()):
        print(message)


def master_params(optimizer: Any) -> Iterator[nn.Parameter]:
    """Yields the parameters of an optimizer; after `scale_loss` their gradients are unscaled and in fp32.

    At O2 apex yielded fp32 masters; here the parameters are always those of the model.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"amp.master_params got {type(optimizer).__name__}; pass the optimizer that amp.initialize returned"
        )
    for group in optimizer.param_groups:
        yield from group["params"]


STATE = _amp_state = AmpState()
