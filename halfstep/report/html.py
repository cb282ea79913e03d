"""Pages of runs and of measurements: one HTML file with charts, data and plotly.js that opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec
import torch
from plotly.offline import get_plotlyjs

from halfstep.formats import Format
from halfstep.report.charts import Chart
from halfstep.report.page import page_of
from halfstep.report.run import Run
from halfstep.report.several import HEADERS, ProcessRow

_HERE = Path(__file__).parent


def page_html(run: Run, low: Format | torch.dtype | str | None = None, *, processes: Sequence[ProcessRow] = ()) -> str:
    """Returns the page of a run as HTML."""
    page = page_of(run, low, processes=processes)
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return _render("page.html", page.charts, page=page, script=script, headers=HEADERS)


def charts_html(
    title: str,
    headline: str,
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    charts: Sequence[Chart],
    *,
    notes: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """Returns the page of a measurement as HTML."""
    header, rows = table
    return _render(
        "charts.html", charts, title=title, headline=headline, header=header, rows=rows, notes=notes, charts=charts,
        facts=facts,
    )  # fmt: skip


def _render(template: str, data: object, **values: object) -> str:
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined)
    return pages.get_template(template).render(
        data=msgspec.json.encode(data).decode().replace("<", "\\u003c"),  # so that no name can end the script
        plotly=get_plotlyjs(),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        **values,
    )
