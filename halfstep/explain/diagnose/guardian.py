"""The guardian: notices that steps keep being skipped, records the next one that is skipped, and explains it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.edits import spell
from halfstep.explain.diagnose.blame import LEAST, NOT_SEEN
from halfstep.explain.diagnose.counter import LONGEST_GAP, WINDOW, Counter, Watched, degree, outgrown, sizes_of
from halfstep.explain.diagnose.cures import lower_scales, scaling_cure, untried_cure
from halfstep.explain.diagnose.diagnosis import Diagnosis, diagnose, find_origin
from halfstep.explain.diagnose.words import of_another, say
from halfstep.explain.tape.recorder import Note, OpRecorder
from halfstep.formats import Format
from halfstep.kinds import Kind
from halfstep.modes import put_on_top
from halfstep.pages import NAN, more
from halfstep.records import NumericsError, StepRecord, Verdict
from halfstep.torch_internals import NO_BACKWARD, backward_task, mode_stack
from halfstep.train.processes.shards import local
from halfstep.train.session.parts import Part, Runtime

OnFailure = Literal["raise", "warn"]
TOO_LONG = (
    "steps keep being skipped, and the cause could not be recorded, because a step has too many operations (such as "
    "long rollouts before its backward pass); call halfstep.blame(session, closure) with a closure that computes part "
    "of the loss"
)
PASSED = (
    "an earlier forward without gradients in the same step was not recorded and may be the cause: "
    "call halfstep.blame(session, closure) with that forward in the closure"
)
_OPERATIONS = 2**17  # notes: more would take too much memory and time
_BEFORE = 2**12  # notes before a forward
# What may come before the backward pass of a step, at first: 64 training forwards, or 4 without gradients among them,
# or 4,096 without gradients before them, which cost little. If there is more, no step is coming, or it is a long one.
# 64 steps of other optimizers may also come first.
_PATIENCE = 2**12
_TRAINING, _EVALUATION, _PASSING = 2**6, 2**10, 1
_MORE_PATIENCE = 8  # factor by which the patience grows each time that it was not enough
_OTHERS = 32  # steps of other optimizers that stay recorded while one is waited for
_INTERVAL = 2000  # steps after which a dynamic scale grows, by default
_LOG = logging.getLogger("halfstep")


class Watching(OpRecorder):
    """A recorder that watches training steps; an error in the recorder ends the recording, but not the step.

    Before the first forward, operations are recorded if gradients are enabled, because user code may combine weights or
    masks there. If there are too many of them, as in a loop that prepares a data set, this recording stops.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__(roots)
        self.spent = 0  # the cost, in arbitrary units, of all model calls since the last backward pass
        # the index of the first operation that can belong to a backward pass of the session, and the pass's loss scale
        self.carried: list[tuple[int, Tensor]] = []
        self.on = self.ended = self.too_many = False  # ended: it failed, or met too many operations
        self.waiting = True  # for the first forward

    def sees(self) -> bool:
        """Tells whether the running operation is recorded, as some are before the forward that is waited for."""
        if self.on or not self.waiting or not torch.is_grad_enabled():
            return self.on
        if len(self.notes) >= _BEFORE:
            self.forget()
            self.waiting = False
        return self.waiting

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if backward_task() != NO_BACKWARD:
            self.spent = 0
        if len(self.notes) < _OPERATIONS:
            return super().run(func, args, kwargs)
        self.too_many = True
        self._end()
        return self.compute(func, args, kwargs)

    def failed(self, error: Exception) -> bool:
        self._end()
        return True

    def scale_of(self, note: Note | None, otherwise: Tensor) -> float:
        """Returns the loss scale of the backward pass that `note` is part of, or `otherwise` if that is unknown."""
        begun = [scale for first, scale in self.carried if note is not None and first <= note.index]
        return float(begun[-1] if begun else otherwise)

    def is_unscaled(self, note: Note | None) -> bool:
        """Tells whether an operation ran in a backward pass before those of the session, as of torch.autograd.grad."""
        early = note is not None and bool(self.carried) and note.index < self.carried[0][0]
        return early and note is not None and note.phase == "backward"

    def forget(self) -> None:
        """Drops what was recorded, and records nothing until the recorder is switched on again."""
        super().forget()
        self.carried = []

    def _end(self) -> None:
        self.ended, self.waiting = True, False
        self.forget()


class Armed:
    """A recorder that starts recording at the next training forward and is removed at the end of that step.

    It is put on the stack of modes at once, because a mode pushed inside a call of a compiled model would miss the
    loss. It calls `give_up` if the recording fails, or if forwards without a backward pass cost more than `patience`.
    """

    def __init__(self, runtime: Runtime, patience: int, give_up: Callable[[], None]) -> None:
        self.recorder = Watching(runtime.roots)
        self.lost = False  # the user's own modes or threads removed it too early
        self.passed = False  # a forward without gradients ran first, which is not recorded
        self._patience, self._give_up = patience, give_up
        self._thread = threading.get_ident()
        finally_ = weakref.finalize(self, put_on_top(self.recorder))
        finally_.atexit = False  # of a session that is never closed
        with ExitStack() as stack:
            stack.callback(finally_)
            stack.enter_context(runtime.under(self.recorder))
            stack.enter_context(runtime.casting.before_forwards(self.forward_begins))
            self._undo = stack.pop_all()

    def forward_begins(self) -> None:
        """Starts recording if a forward is for training; called before the session casts the forward's inputs."""
        recorder, training = self.recorder, torch.is_grad_enabled()
        recorder.on = not recorder.ended and (recorder.on or training)
        self.passed = self.passed or not recorder.on
        recorder.spent += _TRAINING if training else _EVALUATION if recorder.on else _PASSING
        if recorder.ended or recorder.spent > self._patience:
            self._give_up()

    def leave(self) -> None:
        """Removes the recorder from the stack of modes."""
        self.lost = threading.get_ident() != self._thread or self.recorder not in mode_stack()
        self._undo.close()


class Guardian:
    """Watches the steps of a session; if steps keep being skipped, passes a verdict to `tell`, then raises or logs it.

    After an alarm it records the following steps, one at a time, until one is skipped, or for a limited number of
    steps. If several processes train together, an error is kept in `pending` until all processes know of it, since one
    that raised alone would leave the others waiting; all raise at the end of the same step.
    """

    def __init__(self, runtime: Runtime, tell: Callable[[Verdict], None], *, on_failure: OnFailure) -> None:
        self._runtime, self._tell = runtime, tell
        self._on_failure = on_failure
        self.pending: BaseException | None = None
        scaling = runtime.plan.scale
        self._floor = scaling.min if scaling.adapts else 0.0
        self._counter = Counter(self._floor, scaling.growth)
        self._armed: Armed | None = None
        self._about: Watched = ((), None)  # whose step is waited for
        self._often, self._mild = "", False  # how often it is skipped
        self._left = 0  # steps that are still recorded where those before were fine
        self._others = 0  # steps of others while one is waited for
        self._patience = _PATIENCE
        self._said: set[object] = set()
        self._sizes = sizes_of(runtime.roots, runtime.full)

    def carry(self, scale: Tensor) -> None:
        if self._armed is not None:
            recorder = self._armed.recorder
            recorder.carried.append((len(recorder.notes), scale.detach().clone()))

    def after_step(
        self,
        record: StepRecord,
        parts: Sequence[Part],
        scales: Mapping[int, Tensor],
        stopping: Sequence[int] = (),
    ) -> None:
        """Counts a step for the alarm, or examines it if it was recorded; raises if the processes `stopping` do."""
        if stopping or (self.pending is not None and not self._runtime.summing()):
            self.close()
            error, self.pending = self.pending, None
            if error is None:
                verdict = of_another(stopping)
                self._tell(verdict)
                said = f"step {record.step} was skipped like those before it\n{verdict}\n  {more(NAN)}"
                error = NumericsError(said, verdict)
            raise error
        if self._armed is None:
            alarm = self._counter.count(parts, record.skipped, record.bad_loss, scales or {None: record.scale})
            if alarm is not None:
                self._about, self._often, self._mild = alarm
                rare = self._mild or self._counter.lives_at_floor(self._about)
                self._left = LONGEST_GAP if rare else WINDOW
                self._arm_next()
            return
        waited_for, loss_id = self._about
        if tuple(map(id, parts)) == waited_for and (loss_id is None or loss_id in scales):
            self._conclude(self._armed, record, parts, scales)
            return
        self._others += 1  # it stays recorded for a while, because it may affect the awaited step
        if self._others * _TRAINING > self._patience:  # which may never come
            self._give_up()
        elif self._others % (_OTHERS + 1) == 0:
            self._armed.recorder.forget()

    def _arm_next(self) -> None:
        self._left -= 1
        self._others = 0
        self._armed = Armed(self._runtime, self._patience, self._give_up)

    def _give_up(self) -> None:
        assert self._armed is not None
        recorder = self._armed.recorder
        if recorder.ended:
            self._say_unseen(recorder)
        else:
            self._patience *= _MORE_PATIENCE
        self._counter.rest(self._about)
        self.close()

    def _say_unseen(self, recorder: Watching) -> None:
        if recorder.too_many:
            self._patience = _PATIENCE  # to record as much again would show no more
        notice = TOO_LONG if recorder.too_many else NOT_SEEN
        if notice not in self._said:
            self._said.add(notice)
            _LOG.warning(notice)

    def close(self) -> None:
        """Ends a recording that a failed or unfinished step has left on."""
        if self._armed is not None:
            armed, self._armed = self._armed, None
            armed.leave()

    def _conclude(self, armed: Armed, record: StepRecord, parts: Sequence[Part], scales: Mapping[int, Tensor]) -> None:
        """Ends the recording, and raises or warns if the recorded step failed for a reason that persists."""
        was_on = armed.recorder.on
        self.close()
        seen, skipped = was_on and not armed.lost, bool(record.skipped)
        if seen and not skipped and self._left > 0:
            self._arm_next()
            return
        if skipped and not seen:
            self._say_unseen(armed.recorder)
        judged = None
        if skipped and seen:
            try:
                judged = self._explain(armed, record, parts, scales)
                if judged is None and not self._mild:
                    return
            except Exception:  # explaining a failure must never cause one
                _LOG.warning(NOT_SEEN, exc_info=True)
        if judged is None:
            self._counter.rest(self._about)
        else:
            self._report(*judged, record.step)

    def _explain(
        self, armed: Armed, record: StepRecord, parts: Sequence[Part], scales: Mapping[int, Tensor]
    ) -> tuple[Verdict, str] | None:
        """Returns the verdict on a recorded step and a phrase on what a lower loss scale would do."""
        recorder, runtime = armed.recorder, self._runtime
        losses = [record.loss] if record.loss is not None else []
        gradients = [local(p.grad) for part in parts for p in part.parameters() if p.grad is not None]
        origin = find_origin(recorder, losses) or find_origin(recorder, gradients)
        note = None if origin is None else origin.note
        scale = recorder.scale_of(note, record.scale)
        found = None if origin is None else diagnose(recorder, origin, runtime.plan, runtime.full)
        if found is None or found.kind is None:
            self._say_unseen(recorder)
            self._counter.rest(self._about)
            return None
        lowest = min(map(float, scales.values()), default=scale)
        found = replace(found, unscaled=recorder.is_unscaled(note))
        bad_loss = record.bad_loss is not None and bool(record.bad_loss)
        judged = self._judge(found, scale, shared=lowest if recorder.communicated and not bad_loss else None)
        if judged is None or not armed.passed or found.kind != Kind.INPUT_DATA:
            return judged
        verdict, about_scale = judged
        return replace(verdict, advice=f"{verdict.advice}; {PASSED}"), about_scale

    def _judge(self, found: Diagnosis, scale: float, *, shared: float | None) -> tuple[Verdict, str] | None:
        """Returns the verdict on the recorded step and a phrase on what a lower loss scale would do."""
        # `shared` is the lowest loss scale of the step if that may fall for the sake of another process, else None.
        plan = self._runtime.plan
        found = replace(found, untried="halfstep.blame(session, closure) tries edits")
        may_help, lower = _lower_scale(found, plan.low, scale)
        dynamic = plan.scale.adapts
        lives_at_floor = self._counter.lives_at_floor(self._about) and scale <= self._floor * plan.scale.growth
        floor = scale if lives_at_floor else self._floor
        comes_down = dynamic and scale > floor
        if dynamic and shared is not None and shared > floor:
            _LOG.info("skipped steps may be normal: loss scale %g comes down for all processes", shared)
            return None
        if found.kind == Kind.ANOTHER_PROCESS:
            return say(found, plan, (), scale=scale), ""
        if comes_down and may_help and (lower is None or lower >= self._floor):
            _LOG.info("skipped steps are normal: the gradients overflow at loss scale %g, which comes down", scale)
            return None
        if lower is None:
            roots = self._runtime.roots
            if found.kind in (Kind.OVERFLOW, Kind.INVALID):
                found = replace(found, outgrown=outgrown(self._sizes, sizes_of(roots, self._runtime.full)))
            verdict = say(found, plan, untried_cure(plan, found, roots), scale=scale)
            said = "; whether a lower loss scale helps is unknown"
            return verdict, said if may_help else ", and a lower loss scale would not help"
        found = replace(found, kind=Kind.SCALE_TOO_HIGH, lower_scale=lower)
        if lives_at_floor and scale > self._floor:
            return self._of_rhythm(found, scale)
        limit = f"its floor is {self._floor:g}" if dynamic else f"it stays at {scale:g}"
        verdict = say(found, plan, scaling_cure(plan.scale, lower, estimated=True), scale=scale)
        return verdict, f": the loss scale is too high, and {limit}"

    def _of_rhythm(self, found: Diagnosis, scale: float) -> tuple[Verdict, str]:
        """Returns a verdict, and a phrase, on a loss scale that overflows whenever it grows from its floor."""
        scaling = self._runtime.plan.scale
        found = replace(found, lower_scale=self._floor)
        cure = (replace(scaling, init=self._floor, growth_interval=max(scaling.growth_interval, _INTERVAL)),)
        verdict = say(found, self._runtime.plan, cure, scale=scale)
        advice = (
            f"{spell(cure)}, with which the scale grows only after {cure[0].growth_interval} steps without a skip; "
            f"with growth_interval={scaling.growth_interval} it soon grows from {self._floor:g} back to {scale:g}, at "
            "which these gradients overflow"
        )
        return replace(verdict, advice=advice), f": the loss scale keeps returning to its floor, {self._floor:g}"

    def _report(self, verdict: Verdict, about_scale: str, step: int) -> None:
        key = (verdict.kind, verdict.module, verdict.operator)
        raises = self._on_failure == "raise" and not self._mild
        if not raises and key in self._said:
            self._counter.rest(self._about)
            return
        self._said.add(key)
        self._tell(verdict)
        text = f"step {step} was skipped {self._often}{about_scale}\n{verdict}\n  {more(NAN)}"
        if raises and not self._runtime.summing():
            raise NumericsError(text, verdict)
        if raises:
            self.pending = NumericsError(text, verdict)
        _LOG.warning(text)


def _lower_scale(found: Diagnosis, low: Format, scale: float) -> tuple[bool, float | None]:
    """Returns whether a lower loss scale may help, and the largest at which the result fits, if its size is known."""
    power = degree(found.note) if found.note is not None else 0.0
    if not found.may_be_scale or found.kind != Kind.OVERFLOW or power <= 0:
        return False, None
    if found.exact is None:
        return True, None
    for lower in lower_scales(scale, LEAST):
        if found.exact * (lower / scale) ** power <= low.max:  # it is proportional to a power of the scale
            return True, lower
    return False, None
