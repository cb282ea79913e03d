"""Shows a sweep over models and batch sizes: its table for the terminal, its recommendation, and its charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from halfstep.measurements import BenchRun, Point, Sweep
from halfstep.report.charts import Chart, bars, lines
from halfstep.report.recommend import memory_share, recommendation
from halfstep.report.tables import ABSENT, MIB, plain_table

Seen = tuple[Point, BenchRun]

COLUMNS: tuple[tuple[str, Callable[[Point, BenchRun], float | None], str], ...] = (
    ("step\nms", lambda _, run: None if run.step_ms is None else run.step_ms.median, ",.1f"),
    ("speed\nx O0", lambda _, run: run.vs_o0, ".2f"),
    ("examples\nper s", lambda point, run: throughput(point, run), ",.1f"),
    ("minutes\nan epoch", lambda point, run: epoch_minutes(point, run), ",.1f"),
    ("peak\nMiB", lambda _, run: None if run.peak_bytes is None else run.peak_bytes / MIB, ",.1f"),
    ("memory\nx O0", lambda point, run: memory_share(point.result, run), ".2f"),
    ("last\nloss", lambda _, run: run.losses[-1] if run.losses else None, ".4f"),
)


def throughput(point: Point, run: BenchRun) -> float | None:
    """Returns the number of examples that a run trains per second; None if its steps were not timed."""
    return None if run.step_ms is None else 1e3 * point.batch / run.step_ms.median


def epoch_minutes(point: Point, run: BenchRun) -> float | None:
    """Returns the minutes that an epoch takes; None if the workload has no epochs or the steps were not timed."""
    rate = throughput(point, run)
    return None if rate is None or point.examples is None else point.examples / rate / 60


def sweep_table(sweep: Sweep) -> Group:
    """Returns a table with a row for each configuration, with notes on its figures and the recommendation below."""
    table = plain_table(*sweep_rows(sweep), words=("model", ""))
    return Group(Text(title(sweep)), Text(), table, Text(), *map(Text, words(sweep)), Text(sweep_headline(sweep)))


def sweep_rows(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and cells; a column without any figure is left out."""
    seen = list(_seen(sweep))
    columns = [each for each in COLUMNS if any(each[1](*one) is not None for one in seen)]
    rows = [
        [point.model, str(point.batch), run.name, *(_cell(figure(point, run), form) for _, figure, form in columns)]
        for point, run in seen
    ]
    return ["model", "batch", "", *(name for name, _, _ in columns)], rows


def _seen(sweep: Sweep) -> Iterator[Seen]:
    return ((point, run) for point in sweep.points for run in point.result.runs)


def _cell(value: float | None, form: str) -> str:
    return ABSENT if value is None else format(value, form)


def title(sweep: Sweep) -> str:
    """Returns a title that says what was measured and on which machine."""
    asked = sweep.asked
    part = "" if len(sweep.points) == sweep.total else f", {len(sweep.points)} of {sweep.total} points so far"
    return (
        f"{asked['models']}; batch {asked['batch sizes']}; {asked['steps']} timed steps{part}; "
        f"{asked['device']}, {asked['processor']}, {asked['threads']} threads"
    )


def words(sweep: Sweep) -> Iterator[str]:
    """Yields the notes on the table: why some runs have no figures, and what the figures mean."""
    for point, run in _seen(sweep):
        if run.error is not None:
            yield f"{point.model}, batch {point.batch}, {run.name}: {run.error}"
    if sweep.points:
        result = sweep.points[0].result
        yield (
            "Speed: how many times as fast, as the median over rounds in which every configuration of a model and batch"
            f" size makes one step in turn, each in its own process (the first {result.warmup} steps are not timed)."
        )
        yield f"Peak memory: {result.peak_method} in the second step, weights included."
        yield from result.notes


def sweep_headline(sweep: Sweep) -> str:
    """Returns one sentence that recommends what to train with, with the figures behind it."""
    return recommendation([point.result for point in sweep.points])


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Returns charts of speed, throughput and memory by model and batch, and a chart of each model's losses."""
    names = list(dict.fromkeys(run.name for _, run in _seen(sweep)))
    places = [[point.model for point in sweep.points], [f"batch {point.batch}" for point in sweep.points]]

    def by_name(figure: Callable[[Point, BenchRun], float | None]) -> dict[str, list[float | None]]:
        found = {(id(point), run.name): figure(point, run) for point, run in _seen(sweep)}
        return {name: [found.get((id(point), name)) for point in sweep.points] for name in names}

    charts = [
        bars("speed", "Speed, times that of O0", places, by_name(lambda _, run: run.vs_o0), axis="x O0", line=1.0),
        bars("throughput", "Examples trained per second", places, by_name(throughput), axis="examples / s"),
        bars(
            "memory", "Peak memory of a training step", places,
            by_name(lambda _, run: None if run.peak_bytes is None else run.peak_bytes / MIB), axis="MiB",
        ),
    ]  # fmt: skip
    for model in dict.fromkeys(point.model for point in sweep.points):
        charts.append(lines(f"loss-{model}", f"Training loss of {model}, step by step", list(_losses(sweep, model))))
    return charts


def _losses(sweep: Sweep, model: str) -> Iterator[tuple[str, str, Sequence[float]]]:
    """Yields (name, batch size as text, loss of each step) for each run of a model."""
    for point, run in _seen(sweep):
        if point.model == model and run.losses:
            yield run.name, f"batch {point.batch}", run.losses


def sweep_facts(sweep: Sweep) -> list[tuple[str, Any]]:
    """Returns the sweep's options and the machine that it ran on."""
    return [*sweep.asked.items(), ("commands", "; ".join(dict.fromkeys(p.result.command for p in sweep.points)))]
