"""The report on one training step that `halfstep inspect` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from halfstep.measurements import Inspection, OpRow
from halfstep.report.tables import ABSENT, MIB, plain_table

ROWS, NAMED = 20, 3
GIGA = 1e9


def inspection_report(found: Inspection, *, what: str) -> Group:
    """Returns the slowest operations, the casts, and what would save time; `what` names what was inspected."""
    head = f"{what}: {1e3 * found.seconds:,.1f} ms in operations, each timed alone"
    if found.emulated:
        head += f"; {found.low} is emulated here, so times are not those of a device with units for it"
    parts: list[Text | Table] = [Text(head), Text(), _operations(found)]
    if len(found.rows) > ROWS:
        rest = found.rows[ROWS:]
        parts.append(Text(f"and {len(rest)} more rows, {sum(row.share for row in rest):.1%} of the time"))
    return Group(*parts, Text(), *(Text(line) for line in _lines(found)))


def _operations(found: Inspection) -> Table:
    words = ("operation", "pass", "formats")
    return plain_table((*words, "calls", "GFLOP", "MiB", "ms", "share"), map(_cells, found.rows[:ROWS]), words=words)


def _cells(row: OpRow) -> tuple[str, ...]:
    return (
        row.operator,
        row.phase,
        _short(row.formats),
        f"{row.calls:,}",
        f"{row.flops / GIGA:,.3f}" if row.flops else ABSENT,
        f"{row.bytes / MIB:,.1f}",
        f"{1e3 * row.seconds:,.2f}",
        f"{row.share:.1%}",
    )


def _short(formats: str) -> str:
    """Returns the formats of inputs and outputs with repeats as counts: "bf16, bf16 -> bf16" as "2 bf16 -> bf16"."""
    return " -> ".join(_counted(side.split(", ")) for side in formats.split(" -> "))


def _counted(names: Sequence[str]) -> str:
    found = []
    for name in dict.fromkeys(names):
        count = names.count(name)
        found.append(name if count == 1 else f"{count} {name}")
    return ", ".join(found)


def _modules(found: Inspection) -> Iterator[str]:
    """Yields a line for each group of modules that have the same type, formats and reason for these formats."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in found.modules:
        groups.setdefault((each.type, each.param, each.compute, each.output, each.reason), []).append(each.name)
    for (kind, param, compute, output, reason), names in groups.items():
        named = ", ".join(name or "(model)" for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        yield f"{len(names)} {kind} ({named}): param {param}, compute {compute}, output {output}; why: {reason}"


def _kernels(found: Inspection) -> Iterator[str]:
    """Yields a line for each kind of work that CUDA kernels do, such as "convolution"."""
    for work in dict.fromkeys(row.work for row in found.kernels):
        rows = [row for row in found.kernels if row.work == work]
        rest = [row for row in rows if not row.tensor_cores]
        took, slow = sum(row.seconds for row in rows), sum(row.seconds for row in rest)
        named = f"; not: {', '.join(row.name for row in rest[:NAMED])}" if rest else ""
        yield f"{work}: {1e3 * took:,.2f} ms in kernels, {1 - slow / took:.0%} of it on tensor cores{named}"


def _lines(found: Inspection) -> Iterator[str]:
    for cast in found.casts:
        yield (
            f"casts {cast.source} to {cast.target}: {cast.calls:,} ({cast.of_parameters:,} of parameters), "
            f"{cast.bytes / MIB:,.1f} MiB, {1e3 * cast.seconds:,.2f} ms"
        )
    yield from _kernels(found)
    yield ""
    yield from _modules(found)
    yield ""
    if not found.savings:
        yield "Nothing was found that would save 1% of the step or more."
    for saving in found.savings:
        saved = "no gain measured"
        if saving.seconds is not None:
            saved = f"would save {1e3 * saving.seconds:,.2f} ms, {saving.seconds / found.seconds:.0%} of the step"
        yield f"{saving.code} at {saving.place}: {saved}"
        yield f"  seen: {saving.evidence}"
        yield f"  do:   {saving.advice}"
        for edit in saving.cure:
            yield f"  edit: {edit!r}"
