"""The page of a run: one HTML file with its charts, its data and plotly.js in it, which opens without a network."""

from __future__ import annotations

from pathlib import Path

import jinja2
import msgspec
import torch
from plotly.offline import get_plotlyjs

from halfstep.formats import Format
from halfstep.report.page import page_of
from halfstep.report.run import Run

_HERE = Path(__file__).parent


def page_html(run: Run, low: Format | torch.dtype | str | None = None) -> str:
    """Returns the page of a run, its shares judged by `low`, or else by the low format of the run's plan.

    Raises:
        FormatError: `low` names no known format.
        LogError: `run` is no Run.
    """
    page = page_of(run, low)
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined)
    return pages.get_template("page.html").render(
        page=page,
        data=msgspec.json.encode(page.charts).decode().replace("<", "\\u003c"),  # so that no name can end the script
        plotly=get_plotlyjs(),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
    )
