"""The report on a machine that `halfstep doctor` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group
from rich.text import Text

from halfstep.explain.report.tables import Columns, disturbed, numbered, table
from halfstep.measurements import Examination

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
