"""Tables for the terminal: of plans (levels and operations), and of a machine, as `halfstep doctor` prints it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter, itemgetter
from typing import Any

from rich.console import Group
from rich.jupyter import JupyterMixin
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from halfstep.formats import BF16, FP16
from halfstep.measurements import Examination, disturbed
from halfstep.plan.levels import Level
from halfstep.plan.optable import ROWS, Action, ListedOp, device_note, effective, find
from halfstep.plan.plan import Plan

ABSENT = "-"
MIB = 2**20
WORD = 11  # characters of the longest word that is not broken to make room; a longer one is a name


class Shown(JupyterMixin, Group):
    """What the terminal prints, which Jupyter shows too."""


Columns = Mapping[str, Callable[[Any], object]]  # what stands in a row's cell, by the column's header; None is "-"


def cells(rows: Iterable[Any], columns: Columns) -> list[list[str]]:
    """Returns the cells of each row, as text."""
    return [[ABSENT if (cell := fill(row)) is None else str(cell) for fill in columns.values()] for row in rows]


def numbered(headers: Iterable[str]) -> Columns:
    """Returns the columns of rows that are sequences of cells."""
    return {header: itemgetter(at) for at, header in enumerate(headers)}


def table(rows: Iterable[Any], columns: Columns, *, words: Collection[str] = ()) -> Table:
    """Returns a table; columns in `words` are left-aligned and wrap where room is short, others are figures."""
    made, filled = Table(box=None, padding=(0, 1)), cells(rows, columns)
    for at, header in enumerate(columns):
        split = [row[at].split() for row in filled]
        longest = max((len(word) for cell in split for word in cell), default=0)
        if header not in words:
            made.add_column(header, overflow="fold", justify="right", min_width=longest)
        elif longest > WORD:
            made.add_column(header, overflow="fold")
        else:
            made.add_column(header, overflow="fold", min_width=longest, no_wrap=all(len(cell) < 2 for cell in split))
    for row in filled:
        made.add_row(*map(escape, row))
    return made


OPS = {"none": "as written", "table": "the table"}
FULL_OR_LOW = {"full": "fp32", "low": "low"}
LEVELS: Columns = {
    "level": lambda plan: plan.name,
    "weights": lambda plan: FULL_OR_LOW[plan.param],
    "ops": lambda plan: (
        "allow and promote rows, losses full; the rest as stored" if plan.param == "low" else OPS[plan.ops]
    ),
    "norms": lambda plan: _if_low(plan, FULL_OR_LOW[plan.norms], "by the table"),
    "master (bf16 / fp16)": lambda plan: _if_low(plan, plan.master, "weights are fp32"),
    "scale (bf16 / fp16)": lambda plan: f"{plan.scale.init:g}" if plan.scale.kind == "static" else plan.scale.kind,
    "inputs": lambda plan: "as given" if plan.input == "keep" else FULL_OR_LOW[plan.input],
    "outputs": lambda plan: "as written" if plan.output == "keep" else FULL_OR_LOW[plan.output],
}


def level_table(levels: Iterable[Level]) -> Shown:
    """Returns a table with a row for each level: what it stores low, what it casts, and how it scales the loss."""
    columns: Columns = {
        header: lambda row, fill=fill: " / ".join(dict.fromkeys(str(fill(row.plans[low])) for low in (BF16, FP16)))
        for header, fill in LEVELS.items()
    } | {"for": lambda row: row.purpose}
    return Shown(Text("low is bf16 or fp16"), table(levels, columns, words=columns))


def _if_low(plan: Plan, stored: str, cast: str) -> str:
    return stored if plan.param == "low" else cast if plan.ops == "table" else ABSENT


WORDS: Mapping[Action | None, str] = {
    "low": "low",
    "full": "fp32",
    "product": "low where it sums products",
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
    """A row of the op table, as text."""

    op: str
    category: str
    why: str  # of the category
    source: str  # whose list it is: torch's, halfstep's or the plan's
    action: str  # what the plan does with it
    cpu: str  # who does it there, torch or halfstep
    cuda: str  # the same


# What a plan does to ops without a row.
_WITHOUT_ROW: Mapping[Action, OpLine] = {
    "gather": OpLine("", ABSENT, "sums of gradients", "halfstep", WORDS["gather"], "halfstep", ABSENT),
    "probability": OpLine("", ABSENT, "logarithms outside", "halfstep", WORDS["probability"], "halfstep", "halfstep"),
    "refuse": OpLine("", "refuse", "infinite logarithm", "torch", WORDS["refuse"], "halfstep", "torch"),
}


def op_table(plan: Plan, wanted: Callable[[OpLine], bool] = lambda line: True) -> Table | None:
    """Returns a table of the ops that are `wanted`, and what a plan does with each; None if there are none."""
    actions, changed, rows = effective(plan), _changed(plan), {row.op: row for row in ROWS}
    known = {overload for row in (*ROWS, *changed.values()) for overload in row.overloads}
    lines = [_line(changed.get(op, row), actions, row.source) for op, row in rows.items()]
    lines += [_line(row, actions, "plan") for op, row in changed.items() if op not in rows]
    others = ((_op(overload), action) for overload, action in actions.items() if overload not in known)
    lines += [replace(_WITHOUT_ROW[action], op=op) for op, action in others if action in _WITHOUT_ROW]
    headers = ("op", "category", "why", "list of", f"at {plan.name}", "on cpu by", "on cuda by")
    columns = {header: attrgetter(each.name) for header, each in zip(headers, fields(OpLine), strict=True)}
    found = list(filter(wanted, lines))
    return table(found, columns, words=headers) if found else None


def _line(row: ListedOp, actions: Mapping[str, Action], source: str) -> OpLine:
    does = ", ".join(dict.fromkeys(WORDS[actions.get(overload)] for overload in row.overloads))
    return OpLine(row.op, row.category, row.why, source, does, device_note(row, "cpu"), device_note(row, "cuda"))


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


# ---- a machine

RATES: Columns = {
    "work": lambda rate: rate.work,
    "format": lambda rate: rate.format if rate.how == "native" else f"{rate.format} {rate.how}",
    "rate": lambda rate: f"none: {rate.error}"[:60] if rate.rate is None else f"{rate.rate:,.4g} {rate.unit}",
    "quartiles ms": lambda rate: f"{1e3 * took.low:.3g} to {1e3 * took.high:.3g}" if (took := rate.seconds) else "",
    "speed x fp32": lambda rate: "" if rate.vs_fp32 is None else f"{rate.vs_fp32:.3g}",
}


def doctor_report(found: Examination) -> Group:
    """Returns the report: speed in each format, memory at each level, settings, and what to train in."""
    machine = found.machine
    device = found.device if machine.device in found.device else f"{machine.device} ({found.device})"
    head = (
        f"{machine.processor}, {machine.cores} cores, {machine.threads} thread{'s' * (machine.threads != 1)}; "
        f"{device}; torch {machine.torch}, Python {machine.python}"
    )
    works = [rate.work for rate in found.rates]
    rates = [
        replace(rate, work="") if rate.work == before else rate
        for rate, before in zip(found.rates, ["", *works], strict=False)
    ]
    uses = found.memory[0].bytes if found.memory else ()
    memory = [
        (each.level, each.low, *(f"{size:.3g}" for size in (*each.bytes.values(), sum(each.bytes.values()))))
        for each in found.memory
    ]
    columns = numbered(("AdamW, bytes a parameter", "format", *uses, "sum"))
    shown = (table(rates, RATES, words=("work", "format")), table(memory, columns, words=("format",)))
    return Group(Text(head), *(part for each in shown for part in (Text(), each)), Text(), *map(Text, _lines(found)))


def _lines(found: Examination) -> Iterator[str]:
    yield f"known to be fast on this device: {', '.join(found.machine.fast)}"
    for setting in found.settings:
        yield f"{setting.name}: {setting.value}" + (f"; costs {setting.costs}" if setting.costs else "")
        if setting.advice:
            yield f"  do: {setting.advice}"
    yield from disturbed((rate.work, rate.seconds) for rate in found.rates)
    for tool, value in found.tools.items():
        yield f"{tool}: {value}"
    if found.choices:
        yield ""
        yield f"Sessions on {found.processor} assume the following ({found.source}):"
    for choice in found.choices:
        by_table = "" if choice.table == choice.used else f" (by the table: {choice.table})"
        here = "" if choice.agrees else f"; measured here: {choice.measured}"
        yield f"  {choice.what}: {choice.used}{by_table}{here}"
    if found.saved is not None:
        yield f"The measurements are saved in {found.saved}; sessions on this machine use them until it is deleted."
    elif not all(choice.agrees for choice in found.choices):
        yield "  `halfstep doctor --save` makes sessions on this machine use the measured values."
    yield ""
    yield f"Train at {found.level}" + (f" in {found.low}" if found.level != "O0" else "") + f": {found.reason}."
