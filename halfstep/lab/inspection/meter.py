"""Measures each operation of a step: place, formats, FLOPs, bytes, seconds; explains why products ran full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.edits import Edit, OpChange, Policy, Rule
from halfstep.errors import PlanError
from halfstep.explain.diagnose.words import in_model, which_model
from halfstep.explain.tape.locator import Locator
from halfstep.explain.tape.recorder import Note, OpRecorder
from halfstep.explain.tape.schemas import is_collective, is_view, tensors_of
from halfstep.formats import is_low
from halfstep.modes import autocast_outside, is_custom
from halfstep.plan.matching import Site, find_sites
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import ModuleFormats, resolve
from halfstep.timing import clock_of, synchronize
from halfstep.torch_internals import (
    FLASH_ATTENTION_CPU,
    FLASH_ATTENTION_CPU_BACKWARD,
    NO_BACKWARD,
    backward_task,
    schema_of,
    tree_map,
)
from halfstep.train.session.session import Session

Place = tuple[str, str | None, str | None]  # operation, module and line
_RNN, _RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default


@dataclass(frozen=True)
class Shape:
    """A tensor argument of an operation without its values: shape, stride, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: Any) -> Any:
        """Returns the `Shape` of a strided tensor; any other value unchanged."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        return Shape(tuple(value.shape), value.stride(), value.dtype, value.device)


@dataclass(frozen=True, eq=False)
class Call:
    """An operation of the step: what ran, a note of where it ran (phase, module and line of code), and its cost."""

    func: Any
    note: Note
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    flops: int
    bytes: int
    seconds: float
    parameter: str = ""  # the name of the parameter that it reads
    # With shapes in place of tensors, for products, custom operations, and what reads a parameter or a low tensor:
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None  # the format of the autocast region around a custom operation, if it was on

    @property
    def is_cast(self) -> bool:
        """Whether the operation only copies numbers from one floating-point format to another."""
        if schema_of(self.func).name.rpartition("::")[2] not in ("_to_copy", "copy_"):
            return False
        return len({*self.inputs[-1:], *self.outputs}) == 2


class Meter(OpRecorder):
    """Records each operation of a step with its place and cost; at places in `low_at` casts its fp32 inputs to low."""

    def __init__(self, roots: Sequence[nn.Module], device: torch.device, low_at: Collection[Place] = ()) -> None:
        super().__init__(roots, examine=False)
        self.calls: list[Call] = []
        self.streams = Streams(self.locator)
        self._device, self._low_at, self._clock = device, low_at, clock_of(device)

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if is_view(func):
            return super().compute(func, args, kwargs)
        note = self.notes[-1]
        tensors = tensors_of((args, kwargs))
        given = [t for t in tensors if t.is_floating_point()]
        read = sum(map(_bytes, tensors))
        synchronize(self._device)
        start = self._clock()
        low = next((t.dtype for t in given if is_low(t.dtype)), None)
        here = note.phase == "forward" and place_in(note) in self._low_at and not schema_of(func).is_mutable
        if here and low is not None:
            args = tree_map(
                lambda t: t.to(low) if isinstance(t, Tensor) and t.dtype is torch.float32 and t.dim() else t, args
            )
        result = super().compute(func, args, kwargs)
        synchronize(self._device)
        took = self._clock() - start
        made = tensors_of(result)
        done = flops(func, args, kwargs, result)
        known = self.locator.tensor(given[-1]) if given else None
        parameter = known[1] if known is not None and known[0] == "parameter" else ""
        kept = done or parameter or is_custom(func) or low is not None
        call = Call(
            func,
            note,
            tuple(t.dtype for t in given),
            tuple(t.dtype for t in made if t.is_floating_point()),
            done,
            read + sum(_bytes(t) for t in made),
            took,
            parameter,
            tuple(tree_map(Shape.of, args)) if kept else (),
            tree_map(Shape.of, kwargs) if kept else None,
            autocast_outside(self._device.type) if is_custom(func) else None,
        )
        self.calls.append(call)
        return result

    def after(self, note: Note, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if backward_task() == NO_BACKWARD and not is_view(func):
            self.streams.look(note, tensors_of((args, kwargs)))


def place_in(note: Note) -> Place:
    """Returns where an operation ran: its name, the module and the line of code."""
    return note.aten, note.module, note.line


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the FLOPs of a call that computes products, such as a convolution or attention; 0 for any other call."""
    # Attention is counted as if nothing were masked, as in torch's formula.
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count  # it brings Triton

    if func is FLASH_ATTENTION_CPU:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))  # type: ignore[no-untyped-call]
    if func is FLASH_ATTENTION_CPU_BACKWARD:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))  # type: ignore[no-untyped-call]
    if func is _RNN:
        return _recurrent(args[0].shape, args[1].shape, args[2].shape)
    if func is _RNN_BACKWARD:  # gradients of inputs and of weights, each a product of the same size
        return 2 * _recurrent(args[0].shape, args[1].shape, args[2].shape)
    packet = getattr(getattr(torch.ops, func.namespace), schema_of(func).name.rpartition("::")[2])
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _recurrent(given: Sequence[int], weight: Sequence[int], recurrent: Sequence[int]) -> int:
    """Returns the FLOPs of a recurrent layer, from the shapes of its input, input weight and recurrent weight."""
    steps, batch = given[0], given[1]
    return 2 * steps * batch * (weight[0] * weight[1] + recurrent[0] * recurrent[1])


# ---- why products ran full, and the edits that make them run low
_HEAVY = 0.02  # of the step's FLOPs: what has less is not looked at

Reason = tuple[str, str, tuple[Edit, ...]]  # why, what to do about it, and the edits that do it

AS_CALLED: Reason = (
    "it is called where autocast is off, or by an operation that has no row in halfstep's op table",
    "call it inside the model's forward with autocast on, or allow the operation",
    (),
)


@dataclass(frozen=True)
class Step:
    """A measured step: its operations, the session that ran it, and the formats of each module under the plan."""

    meter: Meter
    session: Session
    formats: dict[str, ModuleFormats]

    @property
    def plan(self) -> Plan:
        return self.session.plan

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.meter.calls)

    @cached_property
    def _custom(self) -> dict[Note, Call]:
        calls = self.meter.calls
        return {call.note: call for call in calls if is_custom(call.func) and not is_collective(call.func)}

    def custom_of(self, call: Call) -> Call | None:
        """Returns the custom operation to whose forward or backward pass a call belongs; None for other calls."""
        forward = call.note.forward
        return (self._custom.get(forward) if forward is not None else None) or self._custom.get(call.note)

    def heavy(self) -> dict[str | None, list[Call]]:
        total = sum(call.flops for call in self.meter.calls)
        found: dict[str | None, list[Call]] = defaultdict(list)
        for call in self.meter.calls:
            if call.flops:
                found[call.note.module].append(call)
        return {name: calls for name, calls in found.items() if sum(c.flops for c in calls) >= _HEAVY * total}


def kept_full(step: Step, module: str | None, call: Call) -> Reason | None:
    """Returns what in the plan makes a product run in fp32, what to do about it, and all edits that are needed."""
    # The edits are empty if the edited plan would not fit the model or would leave the module in fp32.
    plan, operator = step.plan, step.meter.operator(call.note)
    if plan.ops == "none":
        return f"{plan.name} runs everything as written", "train at O1 or O2", ()
    why: list[str] = []
    advice: list[str] = []
    edits: list[Edit] = []
    for listed, because, instead in (
        ("deny", f"the plan denies {operator}", f"take {operator} off the deny list"),
        ("promote", f"the plan promotes {operator}, and an input is fp32", f"allow {operator}"),
    ):
        if (listed, operator) in plan.op_changes.listed():
            why.append(because)
            advice.append(instead)
            edits.append(OpChange("allow", operator))
    rules = _rules_over(step, module)
    if rules:
        several = len(rules) > 1
        why.append(f"{' and '.join(map(repr, rules))} keep{'' if several else 's'} it in fp32")
        advice.append(f"remove the rule{'s' if several else ''} if no longer needed")
        edits += [Rule(rule.pattern, Policy(plan.param, "low", "low"), rule.buffers) for rule in rules]
    if edits:
        return ", and ".join(why), "; ".join(advice), tuple(edits) if _has_run_low(step, module, edits) else ()
    known = step.formats.get(module or "")
    return None if known is None or known.compute in (None, plan.low) else (known.reason, AS_CALLED[1], ())


def _rules_over(step: Step, module: str | None) -> list[Rule]:
    """Returns the rules that keep this module in fp32, and those that would contradict them once they are edited."""
    sites = [site for number, root in enumerate(step.session.runtime.roots) for site in find_sites(root, number)]
    number, name = in_model(module)
    here = {path: site for site in sites if site.model == int(number or 0) for path in site.names}
    parts = name.split(".") if name else []
    above = [here.get(".".join(parts[:i])) for i in range(len(parts), -1, -1)]
    hits = ([rule for rule in step.plan.rules if _matches(rule, site)] for site in above if site is not None)
    found = [rule for rule in next(filter(None, hits), []) if rule.policy.compute == "full"]  # the nearest decide
    full = [rule for rule in step.plan.rules if rule.policy.compute == "full"]
    for rule in found:  # which grows: two rules that match one module must agree
        met = [site for site in sites if _matches(rule, site)]
        found += [other for other in full if other not in found and any(_matches(other, site) for site in met)]
    return found


def _matches(rule: Rule, site: Site) -> bool:
    return rule.matches(site.names, site.type_names)


def _has_run_low(step: Step, module: str | None, edits: Sequence[Edit]) -> bool:
    """Returns whether the plan with these edits fits the model and makes the module compute low."""
    session, (number, name) = step.session, in_model(module)
    try:
        plan = session.plan.edit(*edits)
        assignment = resolve(plan, session.runtime.roots, made_low=session.low_parameters())
        return assignment.of(name, model=int(number or 0)).compute == plan.low
    except PlanError:
        return False


# ---- fp32 inputs and buffers that turn all later values into fp32, which modules then cast again and again
INPUT = "an input"
ENOUGH = 2  # modules that must cast the widened values: with only one there is no stream


@dataclass
class Stream:
    """A chain of fp32 values that began when an operation combined low and fp32 values."""

    note: Note  # that operation
    source: str  # of its fp32 operand: an input or a buffer, in words
    casts: dict[str, None] = field(default_factory=dict)  # modules that have cast values of the chain to low since then

    def evidence(self) -> str:
        """Returns a sentence on what was observed: where the stream starts, and how many modules cast its values."""
        note, source = self.note, self.source
        added = note.aten in ("add", "add_", "sub", "sub_", "rsub")
        what = f"{source} is added" if added else f"{source} meets low values in {note.aten}"
        return (
            f"values are fp32 from here on, because {what} here; {len(self.casts)} modules cast them to the low "
            f"format, first {in_model(next(iter(self.casts)))[1]}{which_model(note.module)}"
        )

    def advice(self) -> str:
        cure = f"to keep activations low, cast {self.source} where it is used"
        plan = ", or set input='low' in the plan, which rounds all inputs"
        return cure + plan * self.source.startswith((INPUT, "the input"))


class Streams:
    """Finds streams in a traced forward: an operation turns low values into fp32, and later values stay fp32."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator
        self._outside: dict[int, str] = {}  # by the index of the note that was computed from outside values only
        self._wide: dict[int, Stream] = {}  # by the index of the note
        self._streams: list[Stream] = []

    def look(self, note: Note, given: Sequence[Tensor]) -> None:
        """Examines one operation of a forward and its input tensors; skips views and non-floating-point results."""
        if note.dtype is None:
            return
        pairs = [(t, source) for t, source in zip(given, note.sources, strict=True) if t.is_floating_point()]
        wide = next((self._wide[s.index] for _, s in pairs if s is not None and s.index in self._wide), None)
        if wide is not None:
            if note.dtype is torch.float32:
                self._wide[note.index] = wide
            elif is_low(note.dtype) and note.module is not None:
                wide.casts[note.module] = None
            return
        if note.dtype is not torch.float32:
            return
        full = [(t, source) for t, source in pairs if t.dtype is torch.float32]
        known = [self._from_outside(t, source) for t, source in full]
        if any(is_low(t.dtype) for t, _ in pairs):
            found = next((each for (t, _), each in zip(full, known, strict=True) if each is not None and t.dim()), None)
            if found is not None and note.module is not None:
                stream = Stream(note, found)
                self._streams.append(stream)
                self._wide[note.index] = stream
        elif None not in known and (known or note.module is None):  # what the closure makes is an input
            self._outside[note.index] = next(filter(None, known), INPUT)

    def _from_outside(self, tensor: Tensor, source: Note | None) -> str | None:
        """Returns the outside source of a tensor; None if a module computed the tensor or it is a parameter."""
        if source is not None:
            return self._outside.get(source.index)
        kind, name, _ = self._locator.tensor(tensor) or ("input", "", tensor)
        if kind not in ("input", "buffer"):
            return None
        return f"the {kind} {name!r}" if name else INPUT

    def wide(self) -> list[Stream]:
        return [stream for stream in self._streams if len(stream.casts) >= ENOUGH]
