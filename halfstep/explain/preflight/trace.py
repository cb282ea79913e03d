"""Traces one step of a session; finds operations that fail, constants that do not fit, and absorbed overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep.edits import FULL, Rule, Scaling
from halfstep.explain.diagnose.cures import rules_on
from halfstep.explain.diagnose.rehearsal import Rehearsal, rehearsing
from halfstep.explain.diagnose.search import absorbed_findings, explained, passes_at, run_step
from halfstep.explain.diagnose.words import in_model, place_of, which_model
from halfstep.explain.preflight.precision import outputs_of, precision_findings, take_step
from halfstep.explain.tape.nonfinite import finite_range, nonfinite, unwrapped
from halfstep.explain.tape.recorder import Note, OpRecorder
from halfstep.explain.tape.schemas import leaves_of
from halfstep.formats import FP32, Format, as_format, is_low, needs_scale
from halfstep.plan.plan import Plan
from halfstep.records import Finding
from halfstep.torch_internals import in_backward, schema_of
from halfstep.train.scale.loss import FP16_LOSS_CEILING
from halfstep.train.session.session import Session

# Operations in which a huge constant becomes a value of the result, or a tiny one keeps the result off zero.
WRITES = (
    *("add", "add_", "sub", "sub_", "rsub", "masked_fill", "masked_fill_", "index_fill", "index_fill_"),
    *("fill", "fill_", "full", "full_like", "new_full", "scalar_tensor", "where"),
)
# Operations in which a tiny constant keeps a value off zero; in clamp only the lower bound does.
GUARDS = (*WRITES, "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum", "fmax")
CASTS = ("_to_copy", "copy_")
MADE = ("lift_fresh", "lift_fresh_copy", "_to_copy", "full", "scalar_tensor", "detach", "clone", "copy_")
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
BLAME = "halfstep.blame(session, closure) finds the operation and a cure"
MASK = "for a mask, use torch.finfo(scores.dtype).min (a row of only -inf gives NaN); otherwise compute this in fp32"


def trace_step(session: Session, closure: Callable[[], Any], *, precision: bool) -> tuple[list[Finding], set[int]]:
    """Returns the findings of a forward and backward pass (`precision`: what it loses too), and ids of weights cast."""
    scale = session.last_step().scale
    with rehearsing(session, closure) as rehearsal:
        tracer = StepTracer(rehearsal.roots, rehearsal.plan)
        with outputs_of(rehearsal.roots) as taken, rehearsal.recording(tracer), Literals(tracer.look_at_literal):
            failure, loss = run_step(rehearsal, tracer, scale, partial(taken.take_gradients, rehearsal))
        found = [*tracer.findings(rehearsal.roots)]
        if failure is not None:
            found.append(explained(rehearsal, failure))
        elif loss is not None:
            found += _of_results(rehearsal, loss)
        comparable = precision and loss is not None and bool(loss.isfinite()) and rehearsal.plan.ops != "none"
        if comparable and taken.overflowed and loss is not None:
            with suppress(Exception):  # of a function that frees what it saved
                take_step(rehearsal, loss, taken)
        absorbed = absorbed_findings(rehearsal, tracer)  # it rewinds
        found += absorbed
        if comparable and loss is not None:
            known = {(each.place, each.cure) for each in absorbed}
            lost = precision_findings(rehearsal, taken, loss)
            found += [each for each in lost if (each.place, each.cure) not in known]
    return found, tracer.rounded


class StepTracer(OpRecorder):
    """Records a step as blame does, and examines constants, casts and failures; `rounded`: ids of weights it cast."""

    def __init__(self, roots: Sequence[torch.nn.Module], plan: Plan) -> None:
        super().__init__(roots)
        self.rounded: set[int] = set()
        self._plan = plan
        # by operation, module, line and value: the operation, its format, and whether the value is 0 there, or infinite
        self._constants: dict[tuple[str, str | None, str | None, float], tuple[Note, Format, bool]] = {}

    def after(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if in_backward() or not isinstance(result, Tensor) or not is_low(result.dtype):
            return  # a checkpoint's second run was seen before
        name, fmt = schema_of(func).name.rpartition("::")[2], as_format(result.dtype)
        if name in CASTS:
            self._look_at_cast(note, next((a for a in reversed(args) if isinstance(a, Tensor)), None), result, fmt)
            return
        if name in GUARDS:
            args = [self._constant(note, arg, fmt) if isinstance(arg, Tensor) else arg for arg in args]
        guards = args[:2] if name.startswith("clamp") else (*args, *(v for k, v in kwargs.items() if k != "max"))
        for value in _numbers(guards) if name in GUARDS else ():
            self._know(name, note, fmt, value, vanishes=fmt.rounds_to_zero(value))
        for value in _numbers((*args, *kwargs.values())) if name in WRITES else ():
            self._know(name, note, fmt, value, beyond=fmt.max < abs(value) <= FP32.max)
        if name not in WRITES and note.exact is not None and note.exact.constant:  # such as (1 - mask) * -1e9
            self._know(name, note, fmt, note.exact.value, beyond=True)

    def _know(
        self, name: str, note: Note, fmt: Format, value: float, *, vanishes: bool = False, beyond: bool = False
    ) -> None:
        if vanishes or beyond:
            self._constants[name, note.module, note.line, value] = (note, fmt, vanishes)

    def look_at_literal(self, made: Tensor, values: Sequence[float]) -> None:
        """Notes the largest of the numbers that a low tensor was made from, if it became 0 or overflowed."""
        place, fmt = self.locator.here(), as_format(made.dtype)
        note = Note(len(self.notes), "tensor", place.module, "forward", place.line, [], place.function)
        largest = max(values, key=abs, default=0.0)
        beyond = fmt.max < abs(largest) <= FP32.max
        self._know("tensor", note, fmt, largest, vanishes=fmt.rounds_to_zero(largest), beyond=beyond)

    def _look_at_cast(self, note: Note, source: Tensor | None, out: Tensor, fmt: Format) -> None:
        if source is None or self._is_rounded_weight(source, fmt):
            return
        value = _overflow(source, out)
        if value is not None:
            note.scalars = (value,)
            self._know("cast", note, fmt, 0.0, beyond=True)
        fixed = source.is_floating_point() and not source.requires_grad and self._is_made(note, source)
        span = finite_range(source) if fixed and not is_low(source.dtype) else None
        if span is not None:  # of a constant tensor, such as an eps in a buffer
            largest = max(map(abs, span))
            self._know("cast", note, fmt, largest, vanishes=fmt.rounds_to_zero(largest))

    def _is_rounded_weight(self, tensor: Tensor, fmt: Format) -> bool:
        """Tells whether a tensor cast to `fmt` is a weight; if so, adds its id to `rounded`, for later checks."""
        known = self.locator.tensor(tensor)
        if known is None or known[0] != "parameter" or self._plan.ops == "none" or fmt is not self._plan.low:
            return False
        self.rounded.add(id(known[2]))
        return True

    def _constant(self, note: Note, tensor: Tensor, fmt: Format) -> Tensor | float:
        """Returns the number in a 0-dim tensor if no operation of the step computed it; otherwise the tensor."""
        if tensor.dim() or not tensor.is_floating_point() or self._is_rounded_weight(tensor, fmt):
            return tensor
        return float(tensor) if not tensor.requires_grad and self._is_made(note, tensor) else tensor

    def _is_made(self, note: Note, tensor: Tensor) -> bool:
        """Tells whether a tensor was passed into the step or made from constants, not computed by the step."""
        writer = self.last_writer(tensor)
        return writer is None or writer is note or writer.aten in MADE

    def findings(self, roots: Sequence[torch.nn.Module]) -> Iterator[Finding]:
        """Yields a finding for each constant or cast that does not fit the format."""
        for (name, _, _, value), (note, fmt, vanishes) in self._constants.items():
            module = in_model(note.module)[1]
            cure = rules_on(module, FULL, self._plan, roots) if module and self._plan.ops != "none" else ()
            yield _constant(name, value or note.scalars[0], note, self, fmt, cure, vanishes=vanishes)


class Literals(TorchFunctionMode):
    """Calls `tell(tensor, numbers)` for each low tensor made from numbers, which torch rounds before any operation."""

    def __init__(self, tell: Callable[[Tensor, list[float]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = {} if kwargs is None else kwargs
        result = func(*args, **named)
        if func in FROM_NUMBERS and is_low(result.dtype):
            self._tell(result, list(_numbers((*args, *named.values()))))
        return result


def _numbers(values: Sequence[Any]) -> Iterator[float]:
    return (float(each) for each in leaves_of(values, (int, float)) if not isinstance(each, bool))


def _constant(
    name: str, value: float, note: Note, tracer: StepTracer, fmt: Format, cure: tuple[Rule, ...], *, vanishes: bool
) -> Finding:
    place, which = place_of(note.module, tracer.line(note)), which_model(note.module)
    if vanishes:
        made = {"cast": f"a cast to {fmt} of", "tensor": f"a tensor of {fmt} made from"}
        what = made.get(name, f"{tracer.operator(note)} of {fmt} values and")
        said = f"{what} {value:g}, which is 0 in {fmt}: it guards against nothing{which}"
        advice = f"use {fmt.usable_eps:g} or more, or compute this in fp32"
        return Finding("warning", "constant vanishes", place, said, advice, cure)
    what, got = f"a cast to {fmt}" if name == "cast" else tracer.operator(note), f"{'-' if value < 0 else ''}inf"
    said = f"{what}: {value:g} becomes {got} in {fmt}, whose largest value is {fmt.max:g}{which}"
    return Finding("warning", "value beyond the format", place, said, MASK, cure)


def _overflow(source: Tensor, out: Tensor) -> float | None:
    """Returns the value of largest magnitude that a cast made infinite; None if there is none."""
    if is_low(source.dtype) or source.is_complex():
        return None
    source, out = unwrapped(source), unwrapped(out)
    if source.shape != out.shape:
        return None
    lost = source.detach()[source.isfinite() & ~out.isfinite()]
    return float(lost[lost.abs().argmax()]) if lost.numel() else None


def _of_results(rehearsal: Rehearsal, loss: Tensor) -> Iterator[Finding]:
    scale, params = rehearsal.plan.scale, rehearsal.params
    if not bool(loss.isfinite()):
        if not (scale.adapts and passes_at(rehearsal, scale.min, gradients=False) and rehearsal.inputs.same):
            what = f"the loss of the traced step is {float(loss.detach())}"
            yield Finding("error", "not finite", "the loss", what, BLAME)
        return
    if needs_scale(loss.dtype) and not scale.adapts and scale.first > FP16_LOSS_CEILING:
        what = f"the loss is fp16, so the backward pass starts from the scale in fp16: {scale.init:g} is too high"
        advice = "return the loss in fp32 (loss.float()), or use a lower scale"
        yield Finding("error", "scale too high", "the loss", what, advice, (Scaling("static", FP16_LOSS_CEILING),))
    bad = _not_finite(params)
    if not bad:
        return
    lowest = scale.min if scale.adapts else Scaling("dynamic").min
    code, place = "gradients not finite", "the backward pass"
    try:
        with rehearsal.gradients(loss, lowest):  # the lowest loss scale that skipped steps lead to
            still_bad = _not_finite(params)
    except Exception as error:  # of a function that frees what it saved
        what = f"{len(bad)} of {len(params)} gradients are not finite; a lower loss scale was not tried: {error}"
        yield Finding("note", code, place, what, BLAME)
        return
    if still_bad and scale.adapts:
        what = f"{len(still_bad)} of {len(params)} gradients are not finite even at the lowest loss scale, {lowest:g}"
        yield Finding("error", code, place, f"{what}: such a step is skipped at every loss scale", BLAME)
    elif not scale.adapts:
        cured = scale.active and not still_bad
        what = f"{len(bad)} of {len(params)} gradients are not finite at the constant loss scale {scale.first:g}"
        advice = BLAME + ("; a dynamic loss scale adapts by itself" if cured else "")
        yield Finding("warning", code, place, what, advice, (Scaling("dynamic"),) if cured else ())


def _not_finite(params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [p for p in params if p.grad is not None and nonfinite(p.grad) is not None]
