"""The report on a machine that `halfstep doctor` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from halfstep.measurements import Examination, Rate
from halfstep.report.tables import plain_table


def doctor_report(found: Examination) -> Group:
    """Returns the report: speed in each format, memory at each level, settings, and what to train in."""
    machine = found.machine
    device = found.device if machine.device in found.device else f"{machine.device} ({found.device})"
    head = (
        f"{machine.processor}, {machine.cores} cores, {machine.threads} threads; {device}; "
        f"torch {machine.torch}, Python {machine.python}"
    )
    return Group(
        Text(head), Text(), _table(found), Text(), _memory(found), Text(), *(Text(line) for line in _lines(found))
    )


def _table(found: Examination) -> Table:
    header = ("work", "format", "rate", "quartiles ms", "speed x fp32")
    before = ["", *(rate.work for rate in found.rates)]
    rows = [
        ("" if rate.work == last else rate.work, *_cells(rate)) for last, rate in zip(before, found.rates, strict=False)
    ]
    return plain_table(header, rows, words=("work", "format"))


def _memory(found: Examination) -> Table:
    rows = [
        (each.level, each.low, *(f"{size:.3g}" for size in (*each.bytes.values(), sum(each.bytes.values()))))
        for each in found.memory
    ]
    uses = found.memory[0].bytes if found.memory else ()
    return plain_table(("AdamW, bytes a parameter", "format", *uses, "sum"), rows, words=("format",))


def _cells(rate: Rate) -> tuple[str, ...]:
    name = rate.format if rate.how == "native" else f"{rate.format} {rate.how}"
    if rate.seconds is None or rate.rate is None:
        return name, f"none: {rate.error}"[:60], "", ""
    ratio = "" if rate.vs_fp32 is None else f"{rate.vs_fp32:.3g}"
    return (
        name,
        f"{rate.rate:,.4g} {rate.unit}",
        f"{1e3 * rate.seconds.low:.3g} to {1e3 * rate.seconds.high:.3g}",
        ratio,
    )


def _lines(found: Examination) -> Iterator[str]:
    yield f"known to be fast on this device: {', '.join(found.machine.fast)}"
    for setting in found.settings:
        yield f"{setting.name}: {setting.value}" + (f"; costs {setting.costs}" if setting.costs else "")
        if setting.advice:
            yield f"  do: {setting.advice}"
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
