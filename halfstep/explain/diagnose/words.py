"""Puts a diagnosis into words, as a verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from halfstep.edits import Edit, OpChange, Rule, spell
from halfstep.explain.diagnose.diagnosis import NORMALISERS, Diagnosis
from halfstep.explain.tape.recorder import OTHERS, OWN, Note
from halfstep.formats import FP32, LOW_FORMATS
from halfstep.kinds import Kind
from halfstep.plan.plan import Plan
from halfstep.records import AFTER_BACKWARD, OpCall, Verdict, called, module_words
from halfstep.train.cast.gate import INSIDE
from halfstep.validate import named

_HINT = re.compile(rf" \(\w+: {re.escape(INSIDE)}\)")  # to make a check
_BUFFER = (
    "if this buffer was computed from counts (1 / count), use 0 where a count is 0; if training updates it (running "
    "statistics), load the last checkpoint in which it is finite"
)
_TWO_MASKS = "two torch.finfo(dtype).min add up to -inf"
_NO_DATA = {
    "above": (
        "if the tensor holds class weights, such as 1 / count, use 0 for a class that does not occur; if it holds "
        "data, clean the batch before it reaches the model (torch.nan_to_num with posinf=0), or drop the sample"
    ),
    "below": (
        "if the tensor is a mask, leave one finite entry in each row, and combine masks as booleans, because "
        f"{_TWO_MASKS}; if it holds data, clean the batch before it reaches the model (torch.nan_to_num), or drop the "
        "sample"
    ),
}  # keyed by the one sign of infinity that a tensor holds: never replace by 0 what a mask excludes
_SLOWER = "load an earlier checkpoint, and use a lower learning rate, a warm-up or max_norm"
_LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "ctc_loss")
_NO_VALUE = (
    (("mean",), "the mean of no elements is NaN: skip it if no element is selected"),
    (
        ("var", "std", "var_mean", "std_mean"),
        "the variance of fewer than two elements is NaN: leave it out there, or pass correction=0, for which one "
        "element is enough",
    ),
    (
        ("cross_entropy", "nll_loss"),
        "every target is ignored or has weight 0, and a mean over no targets is NaN: skip such a batch",
    ),
    (
        ("ctc_loss",),
        "a target longer than its input has an infinite loss: pass zero_infinity=True, or use longer inputs",
    ),
)  # operations, and the advice where they have no value in any format


def of_another(processes: Sequence[int]) -> Verdict:
    """Returns the verdict for a process that found nothing itself, when the processes numbered `processes` did."""
    evidence = f"the fault is in the step of process {', '.join(map(str, processes))}; all processes skip that step"
    return Verdict("", "all_reduce", "backward", Kind.ANOTHER_PROCESS, None, (), evidence, Kind.ANOTHER_PROCESS.advice)


def say(found: Diagnosis, plan: Plan | None, cure: Sequence[Edit], *, scale: float) -> Verdict:
    """Returns the verdict on a failure at a loss scale under a plan; `cure` has the edits that cure it."""
    found = _where_it_began(found, cure) if found.kind is Kind.ERROR else found
    assert found.kind is not None  # nothing is said of what was not seen
    return Verdict(
        module=in_model(found.module)[1],
        operator=found.operator,
        phase=found.phase,
        kind=found.kind,
        where=found.line,
        cure=tuple(cure),
        evidence=_evidence(found, scale) + which_model(found.module),
        advice=_advice(found, plan, cure),
        call=None if found.call is None else replace(found.call, module=in_model(found.call.module)[1]),
        outside=found.module is None,
    )


def _where_it_began(found: Diagnosis, cure: Sequence[Edit]) -> Diagnosis:
    """Returns the diagnosis of an error at the low result that the cure changes; at the last if no operation raised."""
    changed = [edit.op for edit in cure if isinstance(edit, OpChange)]
    at = next((each for each in found.behind if each[0] in changed or not (changed or found.operator)), None)
    if at is None:
        return found if found.operator else replace(found, operator="forward")
    return replace(found, operator=at[0], module=at[1], line=at[2])


def error_words(error: Exception | None) -> str:
    """Returns an error's class and the first line of its message, without what halfstep has added."""
    first, _, _ = _HINT.sub("", str(error)).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


def _evidence(found: Diagnosis, scale: float) -> str:
    parts = [_seen(found)]
    if found.raised is not None and found.kind is not Kind.ERROR:
        parts.append(f"the closure then raised {type(found.raised).__name__}")
    if found.unscaled:
        parts.append("in a backward pass of your own (torch.autograd.grad), which no loss scale reaches")
    elif found.phase == "backward" and scale != 1 and found.kind != Kind.STALE_GRADIENTS:
        parts.append(f"this was at loss scale {scale:g}")
    if found.lower_scale is not None and found.untried:
        parts.append(f"this operation needs a loss scale of {found.lower_scale:g} or less")
        parts.append("later operations of the backward pass may need less")
    elif found.lower_scale is not None:
        parts.append(f"at loss scale {found.lower_scale:g} all gradients are finite")
    if not found.repeats:
        parts.append(
            "the closure does not repeat: another run got different inputs, or did not fail in the same place (an "
            "iterator moved on, or the model keeps state between runs)"
        )
    elif found.tried and found.full is None:
        parts.append(f"in fp32 the closure's loss is {found.full_loss:g}")
    elif found.tried and found.full is not None:
        fails = "in fp32 the same closure fails too"
        if found.full.low in LOW_FORMATS:  # the code uses weights as they are stored, or casts by itself
            fails = f"with the models {fails}, in an operation that still computes in {found.full.low}"
        parts.append(fails if found.in_full is None else f"{fails}, in another place: {_place(found.in_full)}")
    return "; ".join(parts + _growth(found))


def _growth(found: Diagnosis) -> list[str]:
    parts = []
    if found.loss_has_grown:
        parts.append(f"in the first step of this session the loss was {found.first_loss:g}")
    if found.grown is not None:
        parts.append(f"{found.grown[0]} has grown to {found.grown[1]:,.0f}")
    if found.outgrown is not None:
        name, first, now = found.outgrown.name, found.outgrown.first, found.outgrown.now
        size = f" and is {now:.3g} now" if math.isfinite(now) else f"; the sum of its squares is {now:g} in fp32 now"
        parts.append(f"the root mean square of {name} was {first:.3g} at the start of this session{size}")
    return parts


def in_model(name: str | None) -> tuple[str, str]:
    """Splits a module's name into the number of its model ("" if there is one model) and the name as rules spell it.

    >>> in_model("1:encoder.attn"), in_model("encoder.attn"), in_model(None)
    (('1', 'encoder.attn'), ('', 'encoder.attn'), ('', ''))
    """
    number, _, module = (name or "").rpartition(":")
    return number, module


def place_of(module: str | None, line: str | None) -> str:
    """Returns a place as findings show it: the module's name as rules spell it, and the line."""
    name = in_model(module)[1] or "(model)"
    return name if line is None else f"{name}, {line}"


def which_model(module: str | None) -> str:
    """Returns the words that say which of several models a module is in; "" if there is only one model."""
    number, _ = in_model(module)
    return f"; in model {number} (the first is 0)" if number else ""


def _place(found: Diagnosis) -> str:
    number, module = in_model(found.module)
    where = (f" in {module_words(module)}" if module else "") + (f" of model {number}" if number else "")
    line = f", {found.line}" if found.line else ""
    return f"{found.kind} of {called(found.operator)}{where}{line} ({found.phase})"


def _seen(found: Diagnosis) -> str:
    if found.names:
        return f"the gradients of {named(found.names, 3)} were not finite when the backward pass began"
    if found.leaf is not None:
        leaf = found.leaf
        if leaf.kind == OTHERS:
            what = "the gradients" if found.phase == "backward" else "the values"
            return f"{what} that {leaf.name} returned hold {leaf.bad}, but what this process passed in was finite"
        dtype = str(leaf.dtype).removeprefix("torch.")
        what = f"{leaf.kind} {leaf.name}" if leaf.name else f"a {dtype} tensor of shape {leaf.shape}"
        stored = ", though its fp32 value is finite" if found.stored_overflow else ""
        first = f", first at {list(leaf.bad.first)}" if leaf.bad.first else ""
        met = f"; it spoils {found.note.recipe}" if found.note is not None and found.note.recipe else ""
        return f"{what} holds {leaf.bad}{first}{stored}{met}"
    if found.kind is Kind.ERROR:
        return f"the closure raised {error_words(found.raised)}"
    assert found.note is not None
    bad = found.note.bad
    inputs = _inputs(found.call, found.note)
    operator, recipe = called(found.operator), found.note.recipe
    part = f" ({recipe})" if recipe else _part(found.operator, found.note.aten)
    text = f"{operator}{part} gave {bad}{inputs}"
    if found.exact is not None and found.low is not None and found.exact > found.low.max:
        exact = f"{found.exact:,.0f}" if found.exact < 1e12 else f"{found.exact:.4g}"
        text += f"; the largest exact result, {exact}, exceeds {found.low}'s maximum"
    if found.note.divided_by is not None:
        zeros, count = found.note.divided_by
        text += f"; the divisor is 0 in {zeros:,} of {count:,} element{'s' * (count != 1)}"
    if found.mask is not None:
        text += f", because the mask value {found.mask:g} became -inf"
    if found.eps is not None:
        text += f", because {found.eps:g} is 0 in {found.low}"
    return text


def _inputs(call: OpCall | None, note: Note) -> str:
    if call is None:
        return ""
    spans = [*call.input_ranges, *((number, number) for number in note.scalars)]
    if call.operator in ("div", "div_") and spans == [(0.0, 0.0)] * 2:
        return ", from 0/0"
    given = [
        (name, f"[{span[0]:.4g}, {span[1]:.4g}]")
        for name, span in zip(call.input_formats, call.input_ranges, strict=True)
        if span is not None
    ][:4]
    if len({name for name, _ in given}) > 1:
        return f", from inputs in {' and '.join(f'{span} ({name})' for name, span in given)}"
    if len(given) == 1:
        return f", from a {given[0][0]} input in {given[0][1]}"
    return f", from {given[0][0]} inputs in {' and '.join(span for _, span in given)}" if given else ""


def _part(operator: str, aten: str) -> str:
    """Returns the words for the aten operation inside `operator` in which it failed; "" if they are the same."""
    if aten == "_to_copy":
        return "" if operator == "to" else " (in a cast)"
    return "" if aten.strip("_") == operator else f" (in {aten})"


def _advice(found: Diagnosis, plan: Plan | None, cure: Sequence[Edit]) -> str:
    if found.has_diverged:
        return f"training has diverged, in fp32 too, and no edit cures that: {_SLOWER}"
    if found.explodes:
        return (
            f"this operation runs {found.runs} times in one forward and its values grow from run to run, in fp32 too, "
            "and no edit cures that: use smaller initial weights, a norm or a gate between the runs, or fewer runs"
        )
    if found.outgrown is not None:
        return (
            f"the weights have grown too far, and no edit cures that: {_SLOWER}; if they are meant to be this large, "
            "halfstep.blame(session, closure) tries edits"
        )
    if (other := found.in_full) is None:
        words = _words(found, plan)
    else:
        full = "with the models in fp32" if other.low in LOW_FORMATS else "in fp32"
        said = "there are two faults; fix the other one first, because it also occurs"
        words = [f"{said} {full}: {_place(other)}"]
    if cure:
        whole = any(isinstance(edit, Rule) and not edit.pattern for edit in cure)
        words.insert(0, spell(cure) + (" ('' is the whole model)" if whole else ""))
        if found.cured_loss is not None:
            words.insert(1, f"tried: the closure's loss is then {found.cured_loss:g}, and its gradients are finite")
        elif found.untried:
            words.insert(1, f"this edit was not tried: {found.untried}")
    if found.loss_has_grown:
        words.append(f"if the weights have grown too far, no edit cures that: {_SLOWER}")
    known = bool(found.kind and found.kind.advice) or found.phase == AFTER_BACKWARD or _brought_in(found)
    if not cure and found.untried and not known:
        words.append(f"no edit was tried, so no cure is known: {found.untried}")
    return "; ".join(words)


def _words(found: Diagnosis, plan: Plan | None) -> list[str]:
    if found.kind == Kind.INPUT_DATA and found.leaf is not None:
        bad = found.leaf.bad
        alone = {bad.above: "above", bad.below: "below"}.get(bad.nan + bad.above + bad.below, "")
        return [_NO_DATA.get(alone, found.kind.advice)]
    if found.kind == Kind.WEIGHTS and found.leaf is not None and found.leaf.kind == "buffer":
        return [_BUFFER]
    if found.kind is not None and found.kind.advice:
        return [found.kind.advice]
    if found.phase == AFTER_BACKWARD:
        by = f", {found.line}," if found.line else ""
        return [
            f"the gradients were finite until the code between the backward pass and the step{by} changed them: check "
            f"what it passes to {found.operator}"
        ]
    if found.kind == Kind.SCALE_TOO_HIGH:
        return _about_scale(found, plan)
    if found.kind != Kind.MASKED_ROW:
        return _about_operation(found)
    if found.mask is not None:
        return [
            f"the mask value {found.mask:g} is -inf in the low format, and at least one row is masked entirely: "
            "compute the scores in fp32, or leave one entry of each row unmasked"
        ]
    return [
        "leave at least one entry of each row unmasked, or set the scores of such a row to zero with torch.where "
        "before the softmax and discard its result"
    ]


def _about_operation(found: Diagnosis) -> list[str]:
    if found.eps is not None and found.low is not None and (found.full is None or found.full.eps is not None):
        smallest = f"{found.low.smallest_subnormal:.0e}"
        return [
            f"an eps of {found.eps:g} is 0 in {found.low}, whose smallest number is {smallest}: use "
            f"{found.low.usable_eps:g} or more (0.001 allows a higher loss scale, because gradients are divided by eps)"
        ]
    if found.full is not None:
        return [_in_every_format(found, found.full)]
    words = [own] if found.untried and (own := _brought_in(found)) else []
    if found.kind == Kind.INVALID and found.tried and not (found.note and found.note.recipe):
        low = found.low if found.low in LOW_FORMATS else "the low format"
        words.append(f"the inputs of {found.operator} leave its domain when rounded to {low}, but not in fp32")
    if found.mask is not None:
        words.append(f"use masked_fill with -inf, or torch.finfo(scores.dtype).min, instead of {found.mask:g}")
    elif found.infinity:
        words.append(_met(found))
    if found.tried and found.cured_loss is None:
        words.append(
            f"none of the edits tried helps: cast the inputs of {found.operator} to fp32 in the code (.float())"
        )
    return words


def _in_every_format(found: Diagnosis, full: Diagnosis) -> str:
    name, note = found.operator, found.note
    overflows, backward = found.kind == Kind.OVERFLOW, found.phase == "backward"
    spans = found.call.input_ranges if found.call is not None and name == "add" else ()
    masks = [span is not None and span[0] in [-fmt.max for fmt in (FP32, *LOW_FORMATS)] for span in spans]
    inputs = "" if name == "to" else f"the inputs of {name} "
    result = "the result" if found.exact is None else "a later result"  # the first is finite in fp32
    operand = "divisor" if name == "div" else "input"
    rows: tuple[tuple[object, str], ...] = (
        (
            name.startswith("empty"),
            "uninitialized memory was read: allocate it with torch.zeros, or write to all of it first",
        ),
        (own := _brought_in(found), own),
        (found.infinity, _met(found)),
        (
            full.low in LOW_FORMATS and found.exact is not None,
            f"no edit helps: the code itself casts {inputs}to {found.low} (remove that cast), or uses weights as they "
            "are stored (add .float())",
        ),
        (
            overflows and len(masks) == 2 and all(masks),
            f"{_TWO_MASKS}: combine masks as booleans, and leave one entry of each row unmasked",
        ),
        (overflows, f"no format helps: {result} of {name} is too large even for fp32; scale its inputs down"),
        (
            backward and note is not None and note.line is not None,
            f"no format helps: {name}, called on a gradient, is not finite here; keep its inputs in its domain with an "
            "eps or a clamp",
        ),
        (
            backward,
            f"no format helps: the gradient of {name} is not finite here; add an eps to its {operand}, or apply "
            f"torch.where to the {operand} first (torch.where on the result leaves NaN gradients)",
        ),
        *((name in names, words) for names, words in _NO_VALUE),
    )
    otherwise = "has no finite value at these inputs; keep them in its domain with an eps or a clamp"
    return next((words for holds, words in rows if holds), f"no format helps: {name} {otherwise}")


def _brought_in(found: Diagnosis) -> str:
    """Returns the advice on a number or tensor that user code passed to the operation and that is not finite."""
    note, name = found.note, found.operator
    if note is None:
        return ""
    if note.unseen:
        return f"the backward of {name} computes these values outside of torch, or sets them: check what it does here"
    own = [s for s in note.scalars if math.isnan(s) or (math.isinf(s) and note.of_gradient)]
    if note.of_gradient:
        own += [leaf.number for leaf in note.leaves if leaf.number is not None]
    if own:
        number = "NaN" if math.isnan(own[0]) else own[0]
        return f"the code passes {number} to {called(name)}: check where it comes from"
    held = next((str(leaf.bad) for leaf in note.leaves if leaf.kind == OWN), "")
    return f"the tensor that the code passes to {called(name)} holds {held}: check where it comes from" if held else ""


def _met(found: Diagnosis) -> str:
    source = found.infinity
    if source == f"{found.operator} at {found.line}":
        source = f"an earlier {found.operator} on the same line"
    return f"{called(found.operator)} received an infinity from {source}, and {_about_infinity(found)}"


def _about_infinity(found: Diagnosis) -> str:
    name, note = found.operator, found.note
    rows = (
        (note is not None and note.recipe, "all that shares its scale is NaN then"),
        (
            name in _LOSSES,
            "the loss of a target that is masked is infinite: unmask it (label smoothing makes every class a target)",
        ),
        (
            note is not None and note.bad is not None and not note.bad.nan,
            "passed it on; check why that value is infinite",
        ),
        (
            name in ("sub", "add", *NORMALISERS),
            "inf minus inf is NaN; mask with -inf, and leave a finite entry in each row",
        ),
        (True, "0 times inf is NaN; mask with masked_fill or torch.where, and do not multiply masked values"),
    )
    return next(words for holds, words in rows if holds)


def _about_scale(found: Diagnosis, plan: Plan | None) -> list[str]:
    lower = found.lower_scale
    if found.untried and lower is not None:
        at_floor = plan is not None and lower == plan.scale.min
        further = "lower its `min`" if at_floor else "a dynamic loss scale comes down further by itself"
        loses = ", but a scale below 1 loses small gradients" if lower < 1 else ""
        return [f"if {lower:g} is still too high, {further}{loses}"]
    if plan is None or lower is None or not plan.scale.adapts:
        if lower is not None and lower < 1:
            return [
                f"use a loss scale of {lower:g} or less, or a dynamic one whose min is that low; a scale below 1 loses "
                "small gradients"
            ]
        return [
            f"all gradients are finite up to a loss scale of {lower:g}; a lower one leaves room, a dynamic one adapts"
        ]
    if lower >= plan.scale.min:
        return [
            f"skipped steps are normal while a dynamic loss scale comes down, here to {lower:g}; with this edit it "
            "starts there"
        ]
    return [f"the floor of the loss scale, {plan.scale.min:g}, is too high: let it come down to {lower:g} or less"]
