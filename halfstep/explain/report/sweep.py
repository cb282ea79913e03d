"""Shows sweeps over models and batch sizes, and the largest batches that fit, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isfinite
from typing import Any

from rich.console import Group
from rich.text import Text

from halfstep.explain.report.bench import baseline, headlines, memory_share
from halfstep.explain.report.tables import MIB, Columns, cells, numbered, table
from halfstep.measurements import BenchRun, Largest, Point, Sweep, disturbed

COLOURS = ("#7d8b99", "#4f7cac", "#5b8f5b", "#e08600", "#8e5ea2", "#c62828", "#2a9d8f", "#6d4c41")
DASHES = ("solid", "dash", "dot", "dashdot")
ACROSS = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1.0, "y1": 1.0, "line": {"dash": "dot"}}


@dataclass(frozen=True)
class Chart:
    """A chart: its name, its title, and plotly's traces and layout; drawn by `charts.html`."""

    name: str
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """A measurement as it is shown."""

    title: str
    headline: str  # recommends
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]  # what the figures mean
    charts: Sequence[Chart]  # for pages alone
    facts: Mapping[str, str]  # for pages alone: how it was measured


def sheet_text(sheet: Sheet) -> Group:
    """Returns a measurement for the terminal, with the headline last."""
    shown = table(sheet.rows, numbered(sheet.header), words=("model", ""))
    return Group(Text(sheet.title), Text(), shown, Text(), *map(Text, (*sheet.notes, sheet.headline)))


# ---- a sweep

Seen = tuple[Point, BenchRun]
Figure = Callable[[Point, BenchRun], float | None]


def _throughput(point: Point, run: BenchRun) -> float | None:
    return None if run.step_ms is None else 1e3 * point.batch / run.step_ms.median


FIGURES: Mapping[str, tuple[Figure, str]] = {
    "step\nms": (lambda _, run: None if run.step_ms is None else run.step_ms.median, ",.1f"),
    "speed\nx O0": (lambda _, run: run.vs_o0, ".2f"),
    "examples\nper s": (_throughput, ",.1f"),
    "minutes\nan epoch": (
        lambda point, run: (rate := _throughput(point, run)) and point.examples and point.examples / rate / 60,
        ",.1f",
    ),
    "peak\nMiB": (lambda _, run: None if run.peak_bytes is None else run.peak_bytes / MIB, ",.1f"),
    "memory\nx O0": (lambda point, run: memory_share(run, baseline(point.result)), ".2f"),
    "gradient\nerror": (lambda _, run: run.gradient_error, ".1%"),
    "last\nloss": (lambda _, run: run.losses[-1] if run.losses else None, ".4f"),
}


def sweep_sheet(sweep: Sweep) -> Sheet:
    """Returns a sweep with a row for each configuration; a column without any figure is left out."""
    seen = [(point, run) for point in sweep.points for run in point.result.runs]
    columns: Columns = {
        "model": lambda one: one[0].model,
        "batch": lambda one: one[0].batch,
        "": lambda one: one[1].name,
    } | {
        header: lambda one, figure=figure, form=form: None if (value := figure(*one)) is None else format(value, form)
        for header, (figure, form) in FIGURES.items()
        if any(figure(*one) is not None for one in seen)
    }
    part = "" if len(sweep.points) == sweep.total else f", {len(sweep.points)} of {sweep.total} points so far"
    commands = {"commands": "; ".join(dict.fromkeys(point.result.command for point in sweep.points))}
    return Sheet(
        title=_title(sweep.asked, f"; batch {sweep.asked['batch sizes']}; {sweep.asked['steps']} timed steps{part}"),
        headline=" ".join(headlines([point.result for point in sweep.points])),
        header=list(columns),
        rows=cells(seen, columns),
        notes=list(_notes(sweep, seen)),
        charts=list(_sweep_charts(sweep, seen)),
        facts=sweep.asked | commands,
    )


def _title(asked: Mapping[str, str], how: str) -> str:
    threads = f"{asked['threads']} thread{'s' * (asked['threads'] != '1')}"
    return f"{asked['models']}{how}; {asked['device']}, {asked['processor']}, {threads}"


def _notes(sweep: Sweep, seen: Sequence[Seen]) -> Iterator[str]:
    for point, run in seen:
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
    yield from disturbed((f"{point.model}, batch {point.batch}, {run.name}", run.step_ms) for point, run in seen)


def _sweep_charts(sweep: Sweep, seen: Sequence[Seen]) -> Iterator[Chart]:
    places = [[point.model for point in sweep.points], [f"batch {point.batch}" for point in sweep.points]]
    for name, header, title, axis in (
        ("speed", "speed\nx O0", "Speed, times that of O0", "x O0"),
        ("throughput", "examples\nper s", "Examples trained per second", "examples / s"),
        ("memory", "peak\nMiB", "Peak memory of a training step", "MiB"),
    ):
        figure, _ = FIGURES[header]
        found = {(id(point), run.name): figure(point, run) for point, run in seen}
        values = {
            key: [found.get((id(point), key)) for point in sweep.points]
            for key in dict.fromkeys(run.name for _, run in seen)
        }
        yield bars(name, title, places, values, axis, [ACROSS] if name == "speed" else ())
    for model in dict.fromkeys(point.model for point in sweep.points):
        given = [(run.name, f"batch {at.batch}", run.losses) for at, run in seen if at.model == model and run.losses]
        yield lines(f"loss-{model}", f"Training loss of {model}, step by step", given)


# ---- the largest batches


def largest_sheet(found: Sequence[Largest], asked: Mapping[str, str], command: str) -> Sheet:
    """Returns the largest batches with a row for each model and configuration."""
    full = {model: each.batch for model, each in _baselines(found).items()}
    columns: Columns = {
        "model": lambda each: each.model,
        "": lambda each: each.name,
        "largest batch": lambda each: None if each.batch is None else f"{each.batch:,}",
        "x O0": lambda each: (
            None if each.batch is None or not (base := full.get(each.model)) else f"{each.batch / base:.2f}"
        ),
    }
    limit = f"{found[0].limit / MIB:,.0f} MiB"
    models, names = (list(dict.fromkeys(each)) for each in zip(*((e.model, e.name) for e in found), strict=True))
    batches = {(each.model, each.name): each.batch for each in found}
    values = {name: [batches.get((model, name)) for model in models] for name in names}
    return Sheet(
        title=_title(asked, ""),
        headline=_largest_headline(found),
        header=list(columns),
        rows=cells(found, columns),
        notes=[
            f"Largest batch whose first steps fit into {limit}, weights included, in a separate process.",
            *(f"{each.model}, {each.name}: {each.error}" for each in found if each.error is not None),
        ],
        charts=[bars("largest", f"Largest batch that fits into {limit}", models, values, "examples per batch")],
        facts={**asked, "commands": command},
    )


def _baselines(found: Sequence[Largest]) -> dict[str, Largest]:
    """Returns the baseline of each model, by model: its first O0 row, with which the other rows are compared."""
    return {each.model: each for each in reversed(found) if each.name.split()[0] == "O0"}


def _largest_headline(found: Sequence[Largest]) -> str:
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
    best = max((each for each in found if each.batch), key=lambda each: each.batch or 0, default=None)
    if best is None:
        return "No batch fits at any level."
    short = next((each.name for each in _baselines(found).values() if each.batch == 0), None)
    why = "" if short is None else f"; {short} does not fit"
    return f"{best.model} at {best.name} takes {best.batch} examples per batch{why}."


# ---- charts


def bars(
    name: str, title: str, places: object, values: Mapping[str, Sequence[float | None]], axis: str, shapes: object = ()
) -> Chart:
    """Returns a chart of grouped bars: at each place on the x axis, one bar for each name in `values`."""
    traces = [
        {"type": "bar", "name": key, "x": places, "y": _drawn(row), "marker": {"color": colour}}
        for colour, (key, row) in zip(cycle(COLOURS), values.items(), strict=False)
    ]
    axes = {"yaxis": {"title": {"text": axis}, "rangemode": "tozero"}}
    return Chart(name, title, traces, {"barmode": "group", "shapes": shapes, **axes})


def lines(name: str, title: str, given: Sequence[tuple[str, str, Sequence[float]]]) -> Chart:
    """Returns a chart of losses by step from (name, kind, losses): a colour for each name, dashes for each kind."""
    colours, dashes = (
        dict(zip(dict.fromkeys(each[at] for each in given), cycle(styles), strict=False))
        for at, styles in enumerate((COLOURS, DASHES))
    )
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{key}, {kind}",
            "x": list(range(1, len(values) + 1)),
            "y": _drawn(values),
            "line": {"color": colours[key], "dash": dashes[kind]},
        }
        for key, kind, values in given
    ]
    return Chart(name, title, traces, {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "loss"}}})


def _drawn(values: Sequence[float | None]) -> list[float | None]:
    return [value if value is not None and isfinite(value) else None for value in values]
