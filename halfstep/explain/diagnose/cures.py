"""The edits of a plan that may cure a failure, from the one that changes least to the one that changes most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from halfstep.edits import FULL, Edit, OpChange, Policy, Rule, Scaling, Width
from halfstep.errors import OpError, PlanError
from halfstep.explain.diagnose.diagnosis import Diagnosis
from halfstep.kinds import Kind
from halfstep.plan.matching import find_sites, norm_kind, together, uncompiled, unwrap
from halfstep.plan.optable import REFUSED, ROWS, ListedOp, find
from halfstep.plan.plan import Plan
from halfstep.records import AFTER_BACKWARD

FULL_OUT = Policy("full", "full", "full")
WHOLE: tuple[Edit, ...] = (Rule("", FULL),)
_WAY_DOWN = 2.0**12  # how far below the estimate for one operation the later ones may need the scale
_ROOM = 4.0  # a constant scale is set this factor below the largest that passes: gradients grow
_MOST = 16  # edits for one error


def candidates(plan: Plan, found: Diagnosis, roots: Sequence[nn.Module]) -> list[tuple[Edit, ...]]:
    """Returns edits that may cure a failure, in the order in which to try them; empty if no edit can."""
    if plan.ops == "none" or not found.may_be_format or found.phase == AFTER_BACKWARD:
        return []
    edits: list[tuple[Edit, ...]] = []
    if found.module is not None and _is_cheap(found.operator):
        edits.append((OpChange("deny", found.operator),))
    if found.module and found.note is not None and found.note.recipe:
        edits.append(rules_on(found.module, Policy(plan.param, "low", "low", products="low"), plan, roots))
    edits += rules_around(found.module, plan, roots)
    return [*edits, WHOLE] if found.module is not None else edits


def candidates_of_error(plan: Plan, found: Diagnosis, roots: Sequence[nn.Module]) -> list[tuple[Edit, ...]]:
    """Returns edits that may cure an error: of what raised it, of modules around, of the low results that led there."""
    if plan.ops == "none":
        return []
    changes = [OpChange("deny", op) for op in REFUSED if isinstance(found.raised, OpError)]
    if is_op(found.operator):
        changes += [OpChange("promote", found.operator), OpChange("deny", found.operator)]
    edits: list[tuple[Edit, ...]] = [*((change,) for change in changes), *rules_around(found.module, plan, roots)]
    for operator, module, _ in found.behind:
        edits += rules_around(module, plan, roots) or [(OpChange("deny", operator),)] * is_op(operator)
    return list(dict.fromkeys(edits))[:_MOST]


def rules_around(module: str | None, plan: Plan, roots: Sequence[nn.Module]) -> list[tuple[Edit, ...]]:
    """Returns rules that keep a module full, then rules for each module around it, except the model itself."""
    around = filter(None, _upwards(module))
    return list(dict.fromkeys(rules_on(name, policy, plan, roots) for name in around for policy in (FULL, FULL_OUT)))


def rules_on(name: str, policy: Policy, plan: Plan, roots: Sequence[nn.Module]) -> tuple[Rule, ...]:
    """Returns rules that give a module a policy, in a form that agrees with the other rules of the plan."""
    models = [unwrap(root) for root in roots]
    sites = [site for number, model in enumerate(models) for site in find_sites(model, number)]
    patterns: list[str] = []
    for each in dict.fromkeys(each for model in models for each in together(name, model)) or [name]:
        own = [site for site in sites if each in site.names]
        ruled = [rule.pattern for rule in plan.rules for site in own if rule.matches(site.names, site.type_names)]
        patterns += ruled or [each]
    return tuple(Rule(pattern, policy) for pattern in dict.fromkeys(patterns))


def edited(plan: Plan, candidates: Iterable[tuple[Edit, ...]]) -> Iterator[tuple[tuple[Edit, ...], Plan]]:
    """Yields each candidate with the edited plan; skips candidates that contradict the plan."""
    for edits in candidates:
        try:
            yield edits, plan.edit(*edits)
        except PlanError:
            continue


def narrow_candidates(plan: Plan, found: Diagnosis, roots: Sequence[nn.Module]) -> list[tuple[Edit, ...]]:
    """Returns edits that may cure a failure and leave part of the model low."""
    if found.module is None and found.kind is not Kind.ERROR:
        in_forward = found.may_be_format and found.phase != AFTER_BACKWARD
        known = plan.ops != "none" and in_forward and _is_cheap(found.operator)
        return [(OpChange("deny", found.operator),)] if known else []
    every = (candidates_of_error if found.kind is Kind.ERROR else candidates)(plan, found, roots)
    narrow = [edits for edits in every if edits != WHOLE]
    own = found.may_be_format and _upwards(found.module) == [""]
    return [*narrow, *(own_code(plan, roots) if own else [])]


def with_edits(kept: tuple[Edit, ...], more: tuple[Edit, ...]) -> tuple[Edit, ...]:
    """Returns the edits `kept`, then `more`; a rule in `more` replaces one in `kept` with the same pattern."""
    anew = {edit.pattern for edit in more if isinstance(edit, Rule)}
    return (*(edit for edit in kept if not (isinstance(edit, Rule) and edit.pattern in anew)), *more)


def is_whole(edits: tuple[Edit, ...]) -> bool:
    """Tells whether edits make the model itself full and leave none of its parts low."""
    return WHOLE[0] in edits and not any(isinstance(edit, Rule) and edit.policy.compute == "low" for edit in edits)


def own_code(plan: Plan, roots: Sequence[nn.Module], param: Width | None = None) -> list[tuple[Edit, ...]]:
    """Returns edits that run the model's own code in fp32 and its parts low as before, or with weights as `param`."""
    if plan.ops == "none":
        return []
    parts = {uncompiled(name): part for root in map(unwrap, roots) for name, part in root.named_children()}
    ruled = {rule.pattern for rule in plan.rules}
    trained = [name for name, part in parts.items() if norm_kind(part) is None and [*part.parameters()]]
    low = [name for name in trained if name not in ruled]
    policy = Policy(param or plan.param, "low", "full")
    return [(*WHOLE, *(Rule(name, policy) for name in low))] if low else []


def untried_cure(plan: Plan, found: Diagnosis, roots: Sequence[nn.Module]) -> tuple[Edit, ...]:
    """Returns the smallest edit that should cure a failure, found without a further run; () if there is none."""
    if found.outgrown is not None:
        return ()
    rounded = found.eps is not None or found.mask is not None  # before the operation, which cannot help it
    if found.exact is None and not found.stored_overflow and not rounded:
        return ()
    too_large = found.stored_overflow or (found.exact is not None and found.exact > plan.low.max)
    if too_large and _is_of(found.operator, lambda row: row.why == "steep"):
        return ()
    beyond = found.phase == "forward" and too_large
    edits = [each for each in candidates(plan, found, roots) if not (rounded and isinstance(each[0], OpChange))]
    if found.unscaled and too_large:  # the gradient leaves each module, and no loss scale makes it fit
        edits = [each for each in edits if each == WHOLE]
    for each, new in edited(plan, edits):
        gives_back_low = each != WHOLE and isinstance(each[0], Rule) and each[0].policy == FULL
        same = set(new.rules) == set(plan.rules) and replace(new, rules=()) == replace(plan, rules=())
        if not (same or (beyond and gives_back_low)):
            return each
    return ()


def lower_scales(scale: float, least: float) -> Iterator[float]:
    """Yields half of a loss scale, a quarter, and so on down to `least`."""
    while scale > least:
        scale = max(scale / 2, least)
        yield scale


def scaling_cure(scaling: Scaling, lower: float, *, estimated: bool = False) -> tuple[Edit, ...]:
    """Returns an edit that replaces a scaling whose loss scale was too high."""
    # `lower` is a loss scale at which all gradients are finite, or, with `estimated`, one that may be low enough. In
    # that case the new scaling is dynamic, so that the scale can fall further if other operations need it. It is also
    # dynamic if `lower` is below the floor of the present scaling, because later batches may need a lower scale.
    if not estimated and not scaling.adapts:
        return (Scaling("static", init=lower / _ROOM),)
    own = scaling if scaling.adapts else Scaling("dynamic")
    floor = min(own.min, lower / _WAY_DOWN if estimated or lower < own.min else lower, 1.0)
    return (replace(own, init=lower, min=floor, max=max(own.max, lower)),)


def is_op(operator: str) -> bool:
    """Tells whether an edit of the op table can name the operation."""
    return bool(_overloads(operator))


def is_product(operator: str) -> bool:
    """Tells whether an operation runs low by the op table, as products do."""
    return _is_of(operator, lambda row: row.category == "allow")


def _is_cheap(operator: str) -> bool:
    """Tells whether running an operation full everywhere costs little."""
    return _is_of(operator, lambda row: row.category == "deny")


def _is_of(operator: str, holds: Callable[[ListedOp], bool]) -> bool:
    """Tells whether an operation is in a row of the op table for which `holds` is true."""
    overloads = _overloads(operator)
    return any(holds(row) and overloads & set(row.overloads) for row in ROWS)


def _overloads(operator: str) -> set[object]:
    try:
        return set(find(operator))
    except PlanError:
        return set()


def _upwards(module: str | None) -> list[str]:
    """Returns a module's name as rules spell it, then those of the modules around it, the model itself, "", last."""
    if module is None:
        return []
    name = module.rpartition(":")[2]
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
