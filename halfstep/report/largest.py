"""Shows the largest batch that fits at each level: a table for the terminal, and a chart."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from halfstep.measurements import Largest
from halfstep.report.charts import Chart, bars
from halfstep.report.tables import ABSENT, MIB, plain_table

HEADER = ["model", "", "largest batch", "x O0"]


def largest_rows(found: Sequence[Largest]) -> list[list[str]]:
    """Returns the table's cells, with a row for each model and configuration."""
    full = _baselines(found)
    return [
        [
            each.model,
            each.name,
            ABSENT if each.batch is None else f"{each.batch:,}",
            _times(each.batch, full[each.model].batch if each.model in full else None),
        ]
        for each in found
    ]


def _baselines(found: Sequence[Largest]) -> dict[str, Largest]:
    """Returns the baseline of each model, by model: its first O0 row, with which the other rows are compared."""
    return {each.model: each for each in reversed(found) if each.name.split()[0] == "O0"}


def _times(batch: int | None, full: int | None) -> str:
    return ABSENT if batch is None or not full else f"{batch / full:.2f}"


def largest_words(found: Sequence[Largest]) -> list[str]:
    """Returns the notes on the table: which memory limit a batch has to fit into, and why some rows have no figure."""
    limit = found[0].limit / MIB
    words = [f"Largest batch whose first steps fit into {limit:,.0f} MiB, weights included, in a separate process."]
    return words + [f"{each.model}, {each.name}: {each.error}" for each in found if each.error is not None]


def largest_headline(found: Sequence[Largest]) -> str:
    """Returns one sentence that names the configuration whose batch is largest relative to O0."""
    full = _baselines(found)
    shares = [
        (each.batch / taken, each, full[each.model].name)
        for each in found
        if each.batch and each.model in full and (taken := full[each.model].batch)
    ]
    if not shares:
        return _without_o0(found)
    share, each, baseline = max(shares, key=lambda found: found[0])
    if share <= 1:
        return f"No level takes a larger batch than {baseline}."
    return f"{each.model} at {each.name} takes {each.batch} examples per batch, {share:.2f} times those of {baseline}."


def _without_o0(found: Sequence[Largest]) -> str:
    """Returns the headline for results in which no model has a batch at O0 to compare with."""
    best = max((each for each in found if each.batch), key=lambda each: each.batch or 0, default=None)
    if best is None:
        return "No batch fits at any level."
    short = next((each.name for each in _baselines(found).values() if each.batch == 0), None)
    why = "" if short is None else f"; {short} does not fit"
    return f"{best.model} at {best.name} takes {best.batch} examples per batch{why}."


def largest_table(found: Sequence[Largest]) -> Group:
    """Returns the largest batches as a table, with notes and a headline below."""
    table = plain_table(HEADER, largest_rows(found), words=HEADER[:2])
    return Group(table, Text(), *map(Text, largest_words(found)), Text(largest_headline(found)))


def largest_charts(found: Sequence[Largest]) -> list[Chart]:
    """Returns a chart of the largest batch of each configuration, by model."""
    models, names = (
        list(dict.fromkeys(values)) for values in zip(*((each.model, each.name) for each in found), strict=True)
    )
    batches = {(each.model, each.name): each.batch for each in found}
    rows = {name: [batches.get((model, name)) for model in models] for name in names}
    title = f"Largest batch that fits into {found[0].limit / MIB:,.0f} MiB"
    return [bars("largest", title, [models], rows, axis="examples per batch")]
