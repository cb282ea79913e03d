"""The largest batch that fits at each level: a table for the terminal, and a chart."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from halfstep.measurements import Largest
from halfstep.report.charts import Chart, bars
from halfstep.report.tables import ABSENT, MIB, plain_table

HEADER = ["model", "", "largest batch", "x O0"]


def largest_rows(found: Sequence[Largest]) -> list[list[str]]:
    """Returns the cells of the table, a row for each model and configuration."""
    full = {each.model: each.batch for each in found if each.name == "O0"}
    return [
        [
            each.model,
            each.name,
            ABSENT if each.batch is None else f"{each.batch:,}",
            _times(each.batch, full.get(each.model)),
        ]
        for each in found
    ]


def _times(batch: int | None, full: int | None) -> str:
    return ABSENT if batch is None or not full else f"{batch / full:.2f}"


def largest_words(found: Sequence[Largest]) -> list[str]:
    """Returns what the limit means, and why some have no figure."""
    limit = found[0].limit / MIB
    words = [f"Largest batch whose first steps fit into {limit:,.0f} MiB, weights included, in a process of its own."]
    return words + [f"{each.model}, {each.name}: {each.error}" for each in found if each.error is not None]


def largest_headline(found: Sequence[Largest]) -> str:
    """Returns one sentence: which configuration takes the most examples beside O0."""
    full = {each.model: each.batch for each in found if each.name == "O0" and each.batch}
    shares = [(each.batch / full[each.model], each) for each in found if each.batch and each.model in full]
    best = max(shares, key=lambda share: share[0], default=None)
    if best is None:
        return _without_o0(found)
    if best[0] <= 1:
        return "No level takes a larger batch than O0."
    share, each = best
    return f"{each.model} at {each.name} takes {each.batch} examples per batch, {share:.2f} times those of O0."


def _without_o0(found: Sequence[Largest]) -> str:
    """Returns the sentence where no model has a batch at O0 to compare with."""
    best = max((each for each in found if each.batch), key=lambda each: each.batch or 0, default=None)
    if best is None:
        return "No batch fits at any level."
    why = "; O0 does not fit" if any(each.name == "O0" and each.batch == 0 for each in found) else ""
    return f"{best.model} at {best.name} takes {best.batch} examples per batch{why}."


def largest_table(found: Sequence[Largest]) -> Group:
    """Returns the largest batches as a table, and below it what they mean."""
    table = plain_table(HEADER, largest_rows(found), words=HEADER[:2])
    return Group(table, Text(), *map(Text, largest_words(found)), Text(largest_headline(found)))


def largest_charts(found: Sequence[Largest]) -> list[Chart]:
    """Returns the largest batch of each configuration, by model."""
    models, names = (
        list(dict.fromkeys(values)) for values in zip(*((each.model, each.name) for each in found), strict=True)
    )
    batches = {(each.model, each.name): each.batch for each in found}
    rows = {name: [batches.get((model, name)) for model in models] for name in names}
    title = f"Largest batch that fits into {found[0].limit / MIB:,.0f} MiB"
    return [bars("largest", title, [models], rows, axis="examples per batch")]
