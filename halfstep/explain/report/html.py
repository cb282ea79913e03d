"""Pages of runs and of measurements: one HTML file with charts, data and plotly.js that opens without a network."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec
import torch

from halfstep.explain.report.page import page_of
from halfstep.explain.report.run import PROCESSES, ProcessRow, Run
from halfstep.explain.report.sweep import Sheet
from halfstep.explain.report.tables import cells
from halfstep.formats import Format

_HERE = Path(__file__).parent
_PLOTLY = _HERE / "plotly-cartesian.min.js.gz"  # the part of plotly.js with lines, bars and maps, as npm has it


def page_html(run: Run, low: Format | torch.dtype | str | None = None, *, processes: Sequence[ProcessRow] = ()) -> str:
    """Returns the page of a run as HTML."""
    page, script = page_of(run, low), (_HERE / "page.js").read_text(encoding="utf-8")
    table = {"headers": PROCESSES, "processes": cells(processes, PROCESSES)}
    return _render("page.html", page.charts, page=page, script=script, **table)


def sheet_html(sheet: Sheet) -> str:
    """Returns the page of a measurement as HTML."""
    return _render("charts.html", sheet.charts, sheet=sheet)


def _render(template: str, data: object, **values: object) -> str:
    pages = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined)
    return pages.get_template(template).render(
        packed=[
            base64.b85encode(each).decode().replace("<", "/")  # so that no name ends the script
            for each in (gzip.compress(msgspec.json.encode(data), mtime=0), _PLOTLY.read_bytes())
        ],
        drawing=(_HERE / "drawing.js").read_text(encoding="utf-8"),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        **values,
    )
