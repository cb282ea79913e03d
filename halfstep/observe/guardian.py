"""The guardian: sees from counters that steps are skipped for no good reason, and has the next step recorded.

The counters are read one step late, once in eight steps, so that nothing waits for the device.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from halfstep.errors import NumericsError
from halfstep.formats import Format
from halfstep.modes import as_called
from halfstep.observe.blame import NOT_SEEN, Subject
from halfstep.observe.cures import candidates, scaling_cure
from halfstep.observe.diagnosis import UNSEEN, Diagnosis, diagnose
from halfstep.observe.origin import find_origin
from halfstep.observe.places import Places
from halfstep.observe.recorder import OpRecorder
from halfstep.observe.words import say
from halfstep.records import StepRecord, Verdict

OnFailure = Literal["raise", "warn"]
WINDOW = 8  # steps, a power of two: as many skips in a row divide a dynamic scale by 256
_OPERATIONS = 2**17  # notes, more than a step has: the caller has left it and computes something else
_FORWARDS = 64  # of a model before a backward pass, more than a step has
_EVALUATION = 16  # training forwards, that one without gradients counts as: few stand between a forward and its step
_LOG = logging.getLogger("halfstep")


class Counters:
    """Reads the number of skips and the scale of a session after every eighth step, on CUDA at the step after it."""

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type != "cuda"
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        self._values: tuple[float, float] | None = None

    def take(self, skips: Tensor, scale: Tensor) -> None:
        """Begins to read two 0-dim tensors; not while a CUDA graph is captured, which would read at each replay."""
        if self._on_host:
            self._values = (float(skips.numpy()), float(scale.numpy()))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        both = torch.stack((skips.to(torch.float64), scale.to(torch.float64)))
        host = torch.empty(2, dtype=torch.float64, pin_memory=True).copy_(both, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending = (host, event)

    def read(self) -> tuple[int, float] | None:
        """Returns skips and scale as they were when reading began; None where there are none yet."""
        if self._pending is not None and not torch.cuda.is_current_stream_capturing():
            host, event = self._pending
            if not event.query():  # type: ignore[no-untyped-call]
                return None
            self._values, self._pending = (float(host[0]), float(host[1])), None
        return None if self._values is None else (int(self._values[0]), self._values[1])


class Watching(OpRecorder):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """Records as any recorder; what goes wrong in it ends the recording, and never the step that it watches.

    `forwards` counts the model's calls since the last backward pass. It has `ended` where it failed, or where it noted
    more operations than a step has.
    """

    def __init__(self, places: Places, *, on: bool) -> None:
        super().__init__(places, on=on)
        self.forwards = 0
        self.ended = False

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch._C._current_graph_task_id() != -1:
            self.forwards = 0
        if len(self.notes) >= _OPERATIONS:
            self._end()
            return as_called(func, args, kwargs)
        self._local.started, self._local.results = False, []
        try:
            return super()._run(func, args, kwargs)
        except Exception:
            if self._local.started and not self._local.results:
                raise  # the operation's own
            self._end()
            return self._local.results[0] if self._local.started else as_called(func, args, kwargs)
        finally:
            self._local.results = []

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._local.started = True
        result = super()._compute(func, args, kwargs)
        self._local.results = [result]
        return result

    def _end(self) -> None:
        self.ended = True
        self.forget()


class Armed:
    """A recorder that lies in wait for the next training forward and is taken off at the end of that step.

    It lies on the stack of modes from the start: put there inside a compiled model's call, it would miss the loss. It
    is `lost` where the caller's own modes, or threads, took it off before. Where forwards go on without a backward
    pass, no step is coming: the caller was interrupted, and `give_up` is called.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.recorder = Watching(Places(roots), on=False)
        self.lost = False
        self.give_up: Callable[[], None] = self.leave
        self._thread = threading.get_ident()
        self.recorder.__enter__()
        self._finally = weakref.finalize(self, _take_off, self.recorder, self._thread)  # of a session never closed
        self._finally.atexit = False

    def around(self, inner: Callable[[], AbstractContextManager[Any]] | None) -> AbstractContextManager[Any]:
        """Begins to record where a forward is for training; returns the context that was around it before."""
        self.recorder.on = not self.recorder.ended and (self.recorder.on or torch.is_grad_enabled())
        if self.recorder.on:
            self.recorder.forwards += 1 if torch.is_grad_enabled() else _EVALUATION
            if self.recorder.forwards > _FORWARDS:
                self.give_up()
        return nullcontext() if inner is None else inner()

    def leave(self) -> None:
        """Takes the recorder off."""
        self.lost = threading.get_ident() != self._thread or _get_current_dispatch_mode() is not self.recorder
        if self._finally.detach() is not None:
            _take_off(self.recorder, self._thread)


class Guardian:
    """Watches a session's steps; `arm` has its next step recorded and returns the Armed and what ends that.

    Where `WINDOW` steps in a row were skipped, or one was while the scale lies at `floor`, the next steps are recorded,
    one at a time, until one is skipped; `WINDOW` of them at most.
    It is then told apart what a falling scale cures, which is normal, from what it does not.
    """

    def __init__(
        self,
        subject: Subject,
        arm: Callable[[], tuple[Armed, Callable[[], None]]],
        tell: Callable[[Verdict], None],
        *,
        device: torch.device,
        on_failure: OnFailure,
    ) -> None:
        self._subject, self._arm, self._tell = subject, arm, tell
        self._on_failure = on_failure
        self._counters = Counters(device)
        scaling = subject.plan.scale
        self._floor = scaling.min if scaling.kind == "dynamic" else 0.0
        self._seen = (0, 0)  # steps and skips at the last reading
        self._armed: tuple[Armed, Callable[[], None]] | None = None
        self._left = 0  # steps that are still recorded where those before were fine
        self._wait, self._pause = 0, 1  # windows until the next look, and how many after a look that found nothing
        self._said: set[tuple[str, str, str]] = set()

    def after_step(self, record: StepRecord, skips: Tensor) -> None:
        """Looks at the counters where it is time, or at what was recorded.

        Raises:
            NumericsError: the recorded step was skipped for a reason that a lower loss scale does not cure.
        """
        if self._armed is not None:
            self._conclude(record)
            return
        phase = record.step % WINDOW
        if phase == 0:
            self._counters.take(skips, record.scale)
        elif phase == 1 and record.step > WINDOW:
            found = self._counters.read()
            if found is not None and self._is_alarming(record.step - 1, *found):
                self._left = WINDOW
                self._arm_next()

    def _arm_next(self) -> None:
        self._left -= 1
        self._armed = self._arm()
        self._armed[0].give_up = self._give_up

    def _give_up(self) -> None:
        self._wait, self._pause = self._pause, min(2 * self._pause, 64)
        self.close()

    def close(self) -> None:
        """Ends what a failed or an unfinished step has left on."""
        if self._armed is not None:
            armed, disarm = self._armed
            self._armed = None
            armed.leave()
            disarm()

    def _is_alarming(self, steps: int, skips: int, scale: float) -> bool:
        taken, more = steps - self._seen[0], skips - self._seen[1]
        self._seen = (steps, skips)
        if self._wait > 0:
            self._wait -= 1
            return False
        return more >= taken or (more > 0 and scale <= self._floor)

    def _conclude(self, record: StepRecord) -> None:
        """Ends the recording, and raises or warns where the recorded step failed for good."""
        assert self._armed is not None
        armed, _ = self._armed
        params = [p for root in self._subject.roots for p in root.parameters() if p.grad is not None]
        recorder, was_on = armed.recorder, armed.recorder.on
        self.close()
        if bool(record.skipped) and (armed.lost or not was_on):
            _LOG.warning(NOT_SEEN)
        if armed.lost or not was_on or not bool(record.skipped):
            if was_on and not armed.lost and self._left > 0:
                self._arm_next()
                return
            self._wait, self._pause = self._pause, min(2 * self._pause, 64)
            return
        sinks = [p.grad for p in params if p.grad is not None]
        losses = [record.loss] if record.loss is not None else []
        try:
            verdict = self._judge(recorder, losses, sinks, float(record.scale))
        except Exception:  # what only explains a failure is never to be one
            _LOG.warning(NOT_SEEN, exc_info=True)
            return
        if verdict is not None:
            self._report(verdict, record.step)

    def _judge(self, recorder: OpRecorder, losses: list[Tensor], sinks: list[Tensor], scale: float) -> Verdict | None:
        """Returns the verdict on the recorded step; None where a lower scale, which will come, is the cure."""
        plan = self._subject.plan
        origin = find_origin(recorder, losses) or find_origin(recorder, sinks)
        found = None if origin is None else diagnose(recorder, origin, plan, self._subject.full, scale)
        if found is None or found.kind == UNSEEN:
            _LOG.warning(NOT_SEEN)
            return None
        found = replace(found, untried="session.blame(closure) would")
        if not found.may_be_scale or scale <= 1:
            return say(found, plan, next(iter(candidates(plan, found)), ()), scale=scale)
        lower = _estimate(found, plan.low, scale)
        if lower is None:
            return say(found, plan, next(iter(candidates(plan, found)), ()), scale=scale)
        if plan.scale.kind == "dynamic" and scale > self._floor:
            _LOG.info("skipped steps are normal: the gradients overflow at loss scale %g, which comes down", scale)
            return None
        found = replace(found, kind="scale too high", lower_scale=lower)
        return say(found, plan, scaling_cure(plan.scale, scale, lower), scale=scale)

    def _report(self, verdict: Verdict, step: int) -> None:
        key = (verdict.kind, verdict.module, verdict.operator)
        if self._on_failure == "warn" and key in self._said:
            self._wait, self._pause = self._pause, min(2 * self._pause, 64)
            return
        self._said.add(key)
        self._tell(verdict)
        text = f"step {step} was skipped like those before it, and a lower loss scale would not help\n{verdict}"
        if self._on_failure == "raise":
            raise NumericsError(text, verdict)
        _LOG.warning(text)


def _take_off(recorder: Watching, thread: int) -> None:
    """Takes a recorder off the stack of modes, from below those that came later."""
    recorder.on = False
    if threading.get_ident() != thread:  # it lies on the stack of another
        return
    stack = _get_current_dispatch_mode_stack()
    if not stack:
        return
    below = next((index for index, mode in enumerate(stack) if mode is recorder), None)
    later = [] if below is None else [_pop_mode() for _ in stack[below + 1 :]]
    recorder.__exit__(None, None, None)
    for mode in reversed(later):
        _push_mode(mode)


def _estimate(found: Diagnosis, low: Format, scale: float) -> float | None:
    """Returns the largest halved scale of at least 1 at which the largest result fits the format; None for none."""
    if found.exact is None:
        return None if found.kind == "invalid" else 1.0
    while scale > 1:
        scale, found = scale / 2, replace(found, exact=(found.exact or 0.0) / 2)
        if found.exact is not None and found.exact <= low.max:
            return scale
    return None
