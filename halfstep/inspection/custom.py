"""Finds custom operations that ran in fp32. Their FLOPs are unknown, so the heavy ones are found by their time."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch

from halfstep.diagnose.words import place_of
from halfstep.edits import Edit, OpChange
from halfstep.formats import LOW_DTYPES
from halfstep.inspection.meter import Call
from halfstep.inspection.reasons import Reason, Step, kept_full
from halfstep.inspection.replay import gain, gain_of_casts, narrowed
from halfstep.measurements import Saving
from halfstep.modes import is_custom
from halfstep.torch_internals import CUSTOM_OPERATIONS, schema_of

_HEAVY = 0.05  # of the step's time: what takes less is not looked at


def custom_full(step: Step) -> Iterator[Saving]:
    """Yields a saving for each custom operation that ran in fp32 and, with its backward pass, took much of the step."""
    if step.plan.ops == "none":  # everything as written
        return
    groups: dict[tuple[str | None, Any], list[Call]] = defaultdict(list)
    for call in step.meter.calls:
        first = step.custom_of(call)
        if first is not None and (call.flops or is_custom(call.func)) and _is_full(call):
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
                    saved = _saved(calls, step.plan.low.dtype)
                except Exception as error:  # an operation may raise anything
                    refused = f"with {step.plan.low} inputs it raises {type(error).__name__}: {error}"
                    advice, cure = f"compute in {step.plan.low} inside it", ()
            evidence += f"; the gain was not measured: {refused}" if refused else ""
            yield Saving("ran full", place_of(module, calls[0].note.line), evidence, advice, saved, cure)


def _is_full(call: Call) -> bool:
    formats = {*call.inputs, *call.outputs}
    return torch.float32 in formats and formats.isdisjoint(LOW_DTYPES)


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


def _saved(calls: Sequence[Call], low: torch.dtype) -> float:
    """Returns the seconds that the calls would save in total with inputs in format `low`."""
    change = narrowed(torch.float32, low)
    return sum(gain_of_casts(call, low) if is_custom(call.func) else gain(call, change) for call in calls)
