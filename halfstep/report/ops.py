"""The op table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from rich.markup import escape
from rich.table import Table

from halfstep.plan.optable import ROWS, Action, ListedOp, device_note, effective, find
from halfstep.plan.plan import Plan
from halfstep.report.tables import ABSENT

WORDS: Mapping[Action | None, str] = {
    "low": "low",
    "full": "fp32",
    "promote": "widest input",
    "norm": "fp32 where formats mix",
    "gather": "as stored; on cpu gradients of low weights add up in fp32",
    "refuse": "refused on low",
    "logits": "fp32, from what a sigmoid was given",
    "pass": "as stored",
    "infer": "as its inputs",
    "probability": "as stored; fp32 where it leaves the model",
    "carry": "as stored",
    None: "as written",
}
CHANGED = "changed by the plan"


@dataclass(frozen=True)
class OpLine:
    """A row of the op table, as text.

    `why` is the reason for the category, `source` says whose list the op is from (torch's, halfstep's or the plan's),
    `action` is what the plan does with the op, and `cpu` and `cuda` say who does it there, torch or halfstep.
    """

    op: str
    category: str
    why: str
    source: str
    action: str
    cpu: str
    cuda: str


# what a plan does to ops without a row
_WITHOUT_ROW: Mapping[Action, OpLine] = {
    "gather": OpLine("", ABSENT, "sums of gradients", "halfstep", WORDS["gather"], "halfstep", ABSENT),
    "probability": OpLine("", ABSENT, "logarithms outside", "halfstep", WORDS["probability"], "halfstep", "halfstep"),
    "refuse": OpLine("", "refuse", "infinite logarithm", "torch", WORDS["refuse"], "halfstep", "torch"),
}


def op_lines(plan: Plan) -> list[OpLine]:
    """Returns the op table under a plan: a line for each of its rows, then other ops that the plan treats specially."""
    actions = effective(plan)
    changed = _changed(plan)
    rows = {row.op: row for row in ROWS}
    known = {overload for row in (*ROWS, *changed.values()) for overload in row.overloads}
    lines = [_line(changed.get(op, row), actions, row.source) for op, row in rows.items()]
    lines += [_line(row, actions, "plan") for op, row in changed.items() if op not in rows]
    others = ((_op(overload), action) for overload, action in actions.items() if overload not in known)
    return lines + [replace(_WITHOUT_ROW[action], op=op) for op, action in others if action in _WITHOUT_ROW]


def op_table(lines: Iterable[OpLine], *, plan: str) -> Table:
    """Returns a table with a row for each op; `plan` is the name of the plan."""
    table = Table("op", "category", "why", "list of", f"at {plan}", "on cpu by", "on cuda by", box=None, padding=(0, 1))
    for line in lines:
        table.add_row(*(escape(getattr(line, field.name)) for field in fields(line)))
    return table


def _line(row: ListedOp, actions: Mapping[str, Action], source: str) -> OpLine:
    did = dict.fromkeys(WORDS[actions.get(overload)] for overload in row.overloads)
    return OpLine(
        row.op, row.category, row.why, source, ", ".join(did), device_note(row, "cpu"), device_note(row, "cuda")
    )


def _changed(plan: Plan) -> dict[str, ListedOp]:
    """Returns, as a dict by op, the rows of the ops that the plan changes, with the changes applied."""
    if plan.ops == "none":
        return {}
    rows = {row.op: row for row in ROWS}
    changed: dict[str, ListedOp] = {}
    for category, name in plan.op_changes.listed():
        for overload in (name,) if ":" in name else find(name):
            op = _op(overload)
            earlier = changed.get(op) or rows.get(op) or ListedOp(op, (), category, CHANGED, "halfstep")
            overloads = tuple(dict.fromkeys((*earlier.overloads, overload)))
            changed[op] = replace(earlier, overloads=overloads, category=category, why=CHANGED)
    return changed


def _op(overload: str) -> str:
    return overload if ":" in overload else overload.partition(".")[0]
