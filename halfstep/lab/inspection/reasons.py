"""Explains why products of a step ran full, and finds the plan edits that make them run low."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from halfstep.edits import Edit, OpChange, Policy, Rule
from halfstep.errors import PlanError
from halfstep.explain.diagnose.words import in_model
from halfstep.explain.tape.recorder import Note
from halfstep.explain.tape.schemas import is_collective
from halfstep.lab.inspection.meter import Call, Meter
from halfstep.modes import is_custom
from halfstep.plan.matching import Site, find_sites
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import ModuleFormats, resolve
from halfstep.train.session.session import Session

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
