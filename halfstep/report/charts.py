"""Charts of measurements as plain data, drawn by `charts.html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

COLOURS = ("#7d8b99", "#4f7cac", "#5b8f5b", "#e08600", "#8e5ea2", "#c62828", "#2a9d8f", "#6d4c41")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Chart:
    """A chart: its name, its title, and plotly's traces and layout."""

    name: str
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def bars(
    name: str,
    title: str,
    places: Sequence[Sequence[str]],
    values: Mapping[str, Sequence[float | None]],
    *,
    axis: str,
    line: float | None = None,
) -> Chart:
    """Returns a chart of grouped bars: at each place on the x axis, one bar for each name in `values`."""
    traces = [
        {
            "type": "bar",
            "name": key,
            "x": list(places) if len(places) > 1 else list(places[0]),
            "y": _drawn(row),
            "marker": {"color": _colour(at)},
        }
        for at, (key, row) in enumerate(values.items())
    ]
    layout: dict[str, Any] = {"barmode": "group", "yaxis": {"title": {"text": axis}, "rangemode": "tozero"}}
    if line is not None:
        across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": line, "y1": line, "line": {"dash": "dot"}}
        layout["shapes"] = [across]
    return Chart(name, title, traces, layout)


def lines(name: str, title: str, given: Sequence[tuple[str, str, Sequence[float]]]) -> Chart:
    """Returns a chart of losses by step, with a line for each (name, kind, losses) in `given`.

    Lines with the same name have the same colour. Lines with the same kind, such as a batch size, have the same dashes.
    """
    names, kinds = (list(dict.fromkeys(each[at] for each in given)) for at in (0, 1))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{key}, {kind}",
            "x": list(range(1, len(values) + 1)),
            "y": _drawn(values),
            "line": {"color": _colour(names.index(key)), "dash": DASHES[kinds.index(kind) % len(DASHES)]},
        }
        for key, kind, values in given
    ]
    return Chart(name, title, traces, {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "loss"}}})


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _drawn(values: Sequence[float | None]) -> list[float | None]:
    return [value if value is not None and isfinite(value) else None for value in values]
