"""What a plan gives each module of a model, for the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from halfstep.formats import Format
from halfstep.plan.resolve import Assignment

HEADERS = ("module", "type", "param", "compute", "output", "buffers", "why")


def assignment_table(assignment: Assignment) -> Table:
    """Returns a row a module: the formats of its parameters, its ops, its output and its buffers, and what decided."""
    table = Table(
        *HEADERS,
        box=None,
        padding=(0, 1),
        title_justify="left",
        title=f"plan {assignment.plan.name} in {assignment.plan.low}",
    )
    several = any(module.model for module in assignment.modules)
    for module in assignment.modules:
        name = module.name or "(model)"
        table.add_row(
            escape(f"{module.model}: {name}" if several else name),
            module.type_name,
            _name(module.param),
            _name(module.compute),
            "as its input" if module.output == "input" else _name(module.output),
            "kept" if module.buffers is None else module.buffers.name,
            escape(module.reason),
        )
    return table


def _name(fmt: Format | str | None) -> str:
    return "-" if fmt is None else str(fmt)
