"""Finds avoidable costs in a step: operations in fp32, weights cast repeatedly, unaligned sizes, fp32 streams."""
# A stream is a chain of fp32 activations from where low and fp32 met. Heavy custom operations are found by their time.

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in

from halfstep.edits import Edit, OpChange
from halfstep.explain.diagnose.words import place_of
from halfstep.formats import as_format, is_low
from halfstep.lab.inspection.meter import AS_CALLED, Call, Meter, Reason, Shape, Step, Stream, kept_full, place_in
from halfstep.measurements import Saving
from halfstep.modes import is_custom
from halfstep.timing import take_turns
from halfstep.torch_internals import CUSTOM_OPERATIONS, FLASH_ATTENTION_CPU_BACKWARD, schema_of, tree_leaves, tree_map
from halfstep.train.cast.products import is_emulated
from halfstep.train.cast.tree import cast_floats

_HEAVY = 0.05  # of the step's time: a slow operation that takes less is not looked at
_WORTH = 0.01  # of the step's time: what saves less is not told
_ALIGNED = 8  # elements of 16 bits
_ROUNDS = 3  # in which a step as it is and one without each fp32 stream take turns
_SOURCES = 3  # of fp32 streams: those whose casts take most
LOOKS = 6  # that `savings` takes
_PATIENCE = 20.0  # seconds after which no further round begins

Again = Callable[..., Meter]  # meters the step once more, with what is mixed at some places low

_DOUBLE: Reason = (
    "an input is fp64, which no plan casts",
    "make the input fp32 where it is created, for example by x.float() or dtype=torch.float32",
    (),
)


def savings(step: Step, again: Again, tell: Callable[[int], None]) -> tuple[Saving, ...]:
    """Returns what would save at least the share `_WORTH` of a step's time, largest saving first."""
    found: list[Saving] = []
    for done, look in enumerate((_full, custom_full, _slow, _cast_again, _not_aligned)):
        tell(done)
        found += look(step)
    tell(LOOKS - 1)
    found += _wide_streams(step, again)
    worth = [saving for saving in found if saving.seconds is None or saving.seconds >= _WORTH * step.seconds]
    return tuple(sorted(worth, key=lambda saving: -(saving.seconds or 0.0)))


def _full(step: Step) -> Iterator[Saving]:
    known: dict[tuple[torch.dtype, torch.dtype], dict[str, float]] = defaultdict(dict)
    for module, calls in step.heavy().items():
        for name, wide in (("fp64", torch.float64), ("fp32", torch.float32)):
            full = [call for call in calls if wide in call.inputs and not _is_wide_backward(call)]
            if wide is torch.float32:
                full = [call for call in full if step.custom_of(call) is None]  # see `custom_full`
            if not full:
                continue
            kept = kept_full(step, module, full[0])
            why, advice, cure = kept or AS_CALLED
            then = step.plan.low.dtype
            if wide is torch.float64:  # no plan casts it; what it is once it is fp32 is the plan's
                why, advice, cure = _DOUBLE
                then = torch.float32 if kept else then
            saved = _saved(full, partial(gain, change=narrowed(wide, then)), known[wide, then])
            count = f"{len(full)} product{'s' if len(full) > 1 else ''}"
            evidence = f"{count} in {name}, {sum(c.flops for c in full) / 1e9:,.3g} GFLOP: {why}"
            yield Saving("ran full", _place(full), evidence, advice, saved, cure)


def _is_wide_backward(call: Call) -> bool:
    """Returns whether a call is the backward pass of low attention; halfstep runs that in fp32 if it is faster."""
    forward = call.note.forward
    return call.func is FLASH_ATTENTION_CPU_BACKWARD and forward is not None and is_low(forward.dtype)


def _slow(step: Step) -> Iterator[Saving]:
    """Yields a saving for each heavy operation whose low kernel is slow where products are emulated, as it is not."""
    if not step.session.runtime.casting.emulates:
        return
    groups: dict[tuple[str | None, Any], list[Call]] = defaultdict(list)
    for call in step.meter.calls:
        if any(is_low(dtype) for dtype in call.inputs) and not (call.is_cast or is_emulated(call.func, call.args)):
            groups[call.note.module, call.func].append(call)
    for (module, func), calls in groups.items():
        share = sum(call.seconds for call in calls) / step.seconds
        if share < _HEAVY:
            continue
        saved, refused = None, None if not_called(calls) is None else "it is not defined in Python"
        try:
            saved = None if refused else _saved(calls, lambda call: gain_of_casts(call, torch.float32), {})
        except Exception as error:  # an operation may raise anything when it is given random numbers
            if not is_custom(func):  # else whether it is slow is not known, which is said
                continue
            refused = f"on random numbers it raises {type(error).__name__}: {error}"
        kernel = "its own kernel" if is_custom(func) else "torch's own kernel, for which this device has no units,"
        evidence = (
            f"{schema_of(func).name} ran {kernel} on {step.plan.low} tensors and took {share:.0%} of the step's time: "
            "halfstep emulates products alone"
        )
        evidence += f"; the gain of fp32 was not measured: {refused}" if refused else ""
        deny = "pass it fp32 tensors" if is_custom(func) else f"deny {step.meter.operator(calls[0].note)}"
        advice = f"{deny}, or keep the module in fp32"
        yield Saving("ran slow", place_of(module, calls[0].note.line), evidence, advice, saved)


def _cast_again(step: Step) -> Iterator[Saving]:
    casts: dict[str, list[Call]] = defaultdict(list)
    for call in step.meter.calls:
        if call.is_cast and call.parameter and call.note.phase == "forward" and is_low(call.outputs[0]):
            casts[call.parameter].append(call)
    for name, calls in casts.items():
        if len(calls) > 1:
            again = calls[1:]
            evidence = f"cast to {as_format(calls[0].outputs[0])} {len(calls)} times in one forward pass"
            advice = "train at O2, which stores weights in low precision, or cast the weight once and reuse the result"
            yield Saving("cast again", name, evidence, advice, len(again) * taken(again[0]))


def _not_aligned(step: Step) -> Iterator[Saving]:
    known: dict[str, float] = {}
    for calls in step.heavy().values():
        low = [call for call in calls if any(is_low(dtype) for dtype in call.inputs)]
        sizes = sorted({size for call in low for size in _sizes(call) if size > _ALIGNED and size % _ALIGNED})
        if sizes:
            saved = _saved(low, partial(gain, change=padded(_ALIGNED)), known)
            up = ", ".join(f"{size} to {-(-size // _ALIGNED) * _ALIGNED}" for size in sizes)
            evidence = f"products with sizes {', '.join(map(str, sizes))}, which are not multiples of {_ALIGNED}"
            yield Saving("not aligned", _place(low), evidence, f"pad {up}", saved)


def _wide_streams(step: Step, again: Again) -> Iterator[Saving]:
    """Yields a saving for each fp32 input or buffer that makes later activations fp32, measured in repeated steps."""
    if step.plan.param != "low":  # where weights are fp32 streams are
        return
    by_source: dict[str, list[Stream]] = defaultdict(list)
    for stream in step.meter.streams.wide():
        by_source[stream.source].append(stream)

    def casting(streams: Sequence[Stream]) -> float:
        modules = {name for stream in streams for name in stream.casts}
        return sum(call.seconds for call in step.meter.calls if call.is_cast and call.note.module in modules)

    costliest = sorted(by_source.values(), key=casting, reverse=True)[:_SOURCES]
    rest = len(by_source) - len(costliest)
    unmeasured = f"; {rest} more sources were not measured: remove these first, then inspect again" if rest else ""
    for streams, saved in zip(costliest, _without(costliest, again), strict=True):
        first = streams[0]
        place = place_of(first.note.module, first.note.line)
        yield Saving("wide stream", place, first.evidence() + unmeasured, first.advice(), saved)


def _without(sources: Sequence[Sequence[Stream]], again: Again) -> list[float]:
    """Returns, for each source, how many seconds a step saves if this source no longer makes activations fp32."""
    # A stream is a chain of operations that compute in fp32 because the first one read an fp32 tensor, its source.
    saved: list[list[float]] = [[] for _ in sources]
    start = perf_counter()
    for turn in range(_ROUNDS if sources else 0):
        if turn and perf_counter() - start > _PATIENCE:
            break
        now = again()
        for streams, found in zip(sources, saved, strict=True):
            found.append(_less(now, again({place_in(stream.note) for stream in streams})))
    return list(map(median, saved))


def _less(now: Meter, then: Meter) -> float:
    kinds = [Counter(map(_kind, meter.calls)) for meter in (now, then)]
    took = [sum(c.seconds for c in m.calls if kinds[0][_kind(c)] != kinds[1][_kind(c)]) for m in (now, then)]
    return took[0] - took[1]


def _kind(call: Call) -> tuple[object, ...]:
    return call.func, call.note.phase, call.note.module, call.inputs, call.outputs, call.bytes


def _sizes(call: Call) -> Iterator[int]:
    for each in tree_leaves(call.args):
        if isinstance(each, Shape) and len(each.shape) >= 2:
            yield from each.shape[-2:] if len(each.shape) < 4 else each.shape[:2]


def _saved(calls: Sequence[Call], gain_of: Callable[[Call], float], known: dict[str, float]) -> float:
    # `known` caches the saving for each operation and its shapes, so that equal calls are timed once.
    keys = [f"{call.func} {call.args} {call.kwargs}" for call in calls]
    for key, call in zip(keys, calls, strict=True):
        if key not in known:
            known[key] = gain_of(call)
    return sum(known[key] for key in keys)


def _place(calls: Sequence[Call]) -> str:
    return place_of(calls[0].note.module, next((c.note.line for c in calls if c.note.line), None))


def custom_full(step: Step) -> Iterator[Saving]:
    """Yields a saving for each custom operation that ran in fp32 and, with its backward pass, took much of the step."""
    if step.plan.ops == "none":  # everything as written
        return
    groups: dict[tuple[str | None, Any], list[Call]] = defaultdict(list)
    for call in step.meter.calls:
        first, formats = step.custom_of(call), {*call.inputs, *call.outputs}
        is_full = torch.float32 in formats and not any(map(is_low, formats))
        if first is not None and (call.flops or is_custom(call.func)) and is_full:
            groups[first.note.module, first.func].append(call)
    for (module, func), calls in groups.items():
        share = sum(call.seconds for call in calls) / step.seconds
        if share >= _HEAVY:
            why, advice, cure = _reason(step, module, func, calls[0])
            evidence = (
                f"{schema_of(func).name} ran in fp32 and took {share:.0%} of the step's time, backward pass included "
                f"(its FLOPs are unknown): {why}"
            )
            saved, refused = None, not_called(calls)
            if refused is None:
                try:
                    low, change = step.plan.low.dtype, narrowed(torch.float32, step.plan.low.dtype)
                    saved = sum(gain_of_casts(c, low) if is_custom(c.func) else gain(c, change) for c in calls)
                except Exception as error:  # an operation may raise anything
                    refused = f"with {step.plan.low} inputs it raises {type(error).__name__}: {error}"
                    advice, cure = f"compute in {step.plan.low} inside it", ()
            evidence += f"; the gain was not measured: {refused}" if refused else ""
            yield Saving("ran full", place_of(module, calls[0].note.line), evidence, advice, saved, cure)


def _reason(step: Step, module: str | None, func: Any, call: Call) -> Reason:
    """Returns why a custom operation ran in fp32, what to do about it, and the edits if they are sure to work."""
    kept = kept_full(step, module, call)
    name = None if schema_of(func).is_mutable else _function(func)  # casts are copies, and nobody reads what they hold
    listed = {op: category for category, op in step.plan.op_changes.listed()}.get(name or "")
    low = step.plan.low
    why = "it is a custom op, which runs in the format of its inputs"
    advice, edits = f"cast to {low} inside it", tuple[Edit, ...]()
    if listed == "allow":
        why = f"it is a custom op; the plan allows {name}, but this call used another name"
        advice = f"call it as {name}, or cast to {low} inside it"
    elif name is not None:
        why = f"it is a custom op, which the plan has on its {listed} list" if listed else why
        advice, edits = f"allow {name}, or cast to {low} inside it", (OpChange("allow", name),)
    if kept is None:
        return why, advice, edits
    return f"{why}, and {kept[0]}", f"{advice}; {kept[1]}", (*kept[2], *edits) if kept[2] else ()


def _function(func: Any) -> str | None:
    """Returns the Python function that defines a custom operation, as "module:function"; None if there is none."""
    definition = CUSTOM_OPERATIONS.get(schema_of(func).name)
    for name, module in list(sys.modules.items()):
        if definition is not None and isinstance(module, ModuleType):
            for bound, value in list(vars(module).items()):
                if type(value) in (FunctionType, type(definition)) and inspect.unwrap(value) is definition:
                    return f"{name}:{bound}"
    return None


def not_called(calls: Sequence[Call]) -> str | None:
    """Returns why it is unsafe to time these calls on low inputs by repeating them; None if it is safe."""
    names = (schema_of(call.func).name for call in calls if is_custom(call.func))
    foreign = next((name for name in names if name not in CUSTOM_OPERATIONS), None)
    return None if foreign is None else f"{foreign} is not defined in Python, and may read low inputs as fp32 memory"


# ---- calls made again on random numbers, in other formats or shapes

SECONDS, TURNS = 0.15, 9  # of one comparison: it ends when both are over
LONG = 1.0  # seconds of a call that is compared twice, and no more

Change = Callable[[Shape], Shape]


def gain(call: Call, change: Change) -> float:
    """Returns how many seconds a call saves if `change` is applied to its tensors."""
    try:
        return _gain(call, lambda: _again(call, change))
    except (RuntimeError, IndexError):
        return 0.0


def gain_of_casts(call: Call, dtype: torch.dtype) -> float:
    """Returns the seconds that a custom operation saves if its inputs are cast to `dtype`; raises as it does."""
    cast = replace(call, func=lambda *a, **k: call.func(*cast_floats(a, dtype), **cast_floats(k, dtype)), autocast=None)
    return _gain(call, lambda: _again(cast))


def _gain(call: Call, make: Callable[[], Callable[[], object]]) -> float:
    device = _device(call)
    made = {"now": _again(call), "then": make()}
    for each in made.values():
        each()
    times = take_turns(made, device=device, seconds=SECONDS, least=2 if call.seconds > LONG else TURNS)
    saved = [now - then for now, then in zip(times["now"], times["then"], strict=False)]
    return quantiles(saved, n=10, method="inclusive")[0]


def taken(call: Call) -> float:
    """Returns the median seconds of a call that is repeated many times."""
    return median(take_turns({"now": _again(call)}, device=_device(call), seconds=SECONDS)["now"])


def _device(call: Call) -> torch.device:
    return next(each.device for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Shape))


def narrowed(wide: torch.dtype, dtype: torch.dtype) -> Change:
    """Returns a change that converts tensors of dtype `wide` to `dtype`."""
    return lambda given: replace(given, dtype=dtype) if given.dtype is wide else given


def padded(multiple: int) -> Change:
    """Returns a change that rounds each size up to a multiple of `multiple`; sizes below `multiple` are unchanged."""

    def change(given: Shape) -> Shape:
        shape = tuple(size if size < multiple else math.ceil(size / multiple) * multiple for size in given.shape)
        order = sorted(range(len(shape)), key=lambda i: given.stride[i])
        stride, step = [0] * len(shape), 1
        for i in order:
            stride[i], step = step if given.stride[i] else 0, step * (shape[i] if given.stride[i] else 1)
        return replace(given, shape=shape, stride=tuple(stride))

    return change


def _again(call: Call, change: Change = lambda given: given) -> Callable[[], object]:
    generators: dict[torch.device, torch.Generator] = {}

    def tensor(each: Any) -> Any:
        if not isinstance(each, Shape):
            return each
        given = change(each)
        made = torch.empty_strided(given.shape, given.stride, dtype=given.dtype, device=given.device)
        if not made.is_floating_point():
            return made.zero_()
        generator = generators.setdefault(given.device, torch.Generator(device=given.device).manual_seed(0))
        return made.normal_(generator=generator)

    args, kwargs = tree_map(tensor, call.args), tree_map(tensor, call.kwargs)
    low = call.autocast
    autocast = nullcontext() if low is None else TorchAutocast(_device(call).type, dtype=low)

    def run() -> object:
        with torch.no_grad(), autocast:
            return call.func(*args, **kwargs)

    return run
