"""Running a session's models aside from its books: for blame, the guardian and the check."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from halfstep.cast.casting import Casting
from halfstep.cast.enter import plain_copies
from halfstep.diagnose.blame import Subject
from halfstep.diagnose.guardian import Armed
from halfstep.diagnose.replay import refused, standing_in
from halfstep.modes import run_uncompiled
from halfstep.observe.probe import Probes
from halfstep.observe.recorder import OpRecorder, Recorded
from halfstep.plan.plan import Plan
from halfstep.scale.loss import FP16_LOSS_CEILING, wide
from halfstep.scale.scales import LossScales

IN_A_CLOSURE = (
    "a closure for blame or check is to compute the loss and return it: they run the backward pass, and no step"
)


class Owner(Protocol):
    """A session, as those see it who run its models aside."""

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context in which code of the user's runs under the plan."""

    def close(self) -> None:
        """Ends it."""

    def _end_recording(self) -> None:
        """Takes off what lies in wait for the next step."""

    @property
    def _aside(self) -> Aside:
        """What runs its models aside."""


@dataclass(frozen=True, eq=False)
class Aside:
    """The parts of a session that its models run with; `open_trial` opens one of the same kind on other models."""

    owner: Owner
    plan: Plan
    roots: Sequence[nn.Module]
    casting: Casting
    scales: LossScales
    probes: Probes
    full: Callable[[nn.Parameter], Tensor]
    open_trial: Callable[[Sequence[nn.Module], Plan], Owner]

    def subject(self) -> Subject:
        """Returns what blame works on."""
        return Subject(
            self.plan, self.roots, self._recording, self.backward, self.scales.held_at, self.trial, self.full
        )

    @contextmanager
    def out_of_the_books(self) -> Iterator[None]:
        """Keeps what a closure does inside out of the books: no probe looks, and the closure takes no step."""
        self.owner._end_recording()  # of the step, which is what is looked at now
        with self.probes.paused(), refused(self.owner, ("backward", "step", "unscale_"), IN_A_CLOSURE):
            yield

    def backward(self, loss: Tensor, scale: float) -> None:
        """Runs the backward pass of a loss times a scale, as training would, and keeps its graph."""
        low_loss = loss.dtype is torch.float16 or self.scales.ceiling is not None  # one that a forward returned
        if low_loss and self.plan.scale.kind == "dynamic":
            scale = min(scale, FP16_LOSS_CEILING)
        with self.casting.backward():
            (wide(loss) * scale).backward(retain_graph=True)  # type: ignore[no-untyped-call]

    def arm(self) -> tuple[Armed, Callable[[], None]]:
        """Has the next step recorded; returns the recording and what ends it."""
        armed = Armed(self.roots)
        with ExitStack() as stack:
            release = run_uncompiled()
            stack.callback(release)
            weakref.finalize(armed, release).atexit = False  # of a session that is never closed
            stack.enter_context(self._under(armed.recorder))
            stack.enter_context(self.casting.before_forwards(armed.forward_begins))
            disarm = stack.pop_all().close
        return armed, disarm

    @contextmanager
    def _recording(self, recorder: OpRecorder) -> Iterator[None]:
        with self._under(recorder), recorder:
            yield

    def _under(self, recorder: OpRecorder) -> AbstractContextManager[None]:
        """Puts the recorder over emulation, which changes operations."""
        return self.casting.over_emulation(lambda emulation: Recorded(emulation, recorder))

    @contextmanager
    def trial(self, plan: Plan) -> Iterator[Subject]:
        """Opens a session with another plan over copies of the models, which stand in for them."""
        twins = plain_copies(self.roots)
        trial = self.open_trial(twins, plan)
        try:
            self.owner.__dict__["autocast"] = trial.autocast
            with standing_in(self.roots, twins):
                yield trial._aside.subject()
        finally:
            del self.owner.__dict__["autocast"]
            trial.close()
