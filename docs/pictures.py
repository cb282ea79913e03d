"""Makes the pictures of the pages: trains char_lm at O2 in fp16 with a log and a probe, and takes them of its page.

    python docs/pictures.py        # one to two minutes; needs Chromium and the extra [report]
    python docs/pictures.py curves         # only what is drawn without training

fp16 is emulated where the device has no units for it. The first step that is skipped is explained by `halfstep.blame`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import halfstep
from docs.browser import Browser
from halfstep.explain.report.html import page_html, sheet_html
from halfstep.explain.report.sweep import ACROSS, Chart, Sheet, bars
from halfstep.lab.workloads.load import load_workload
from halfstep.records import TENSOR_KINDS, UPDATE

HERE = Path(__file__).resolve().parent
STEPS, EVERY = 300, 10
SETTINGS = {"d": "128", "layers": "4", "batch": "8"}
PICTURES = {"report-timeline": "#timeline", "report-histogram": "#histogram-section", "report-map": "#small-figure"}


def train(path: Path) -> None:
    """Trains with a log at `path`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = load_workload("char_lm", SETTINGS)
    model = job.build(0)
    optimizer = job.optimizer(model, fused=True)
    with halfstep.RunLog(path) as log:
        session = halfstep.initialize(model, optimizer, "O2", low="fp16", sinks=[log])
        session.observe(every=EVERY, tensors=(*TENSOR_KINDS, UPDATE))
        explained = False
        for _, (inputs, targets) in zip(range(STEPS), job.batches(0), strict=False):
            optimizer.zero_grad()
            session.backward(job.loss(model(inputs), targets))
            record = session.step(max_norm=job.max_norm)
            if not explained and bool(record.skipped):
                explained = True
                halfstep.blame(session, lambda inputs=inputs, targets=targets: job.loss(model(inputs), targets))
        session.close()


def take(page: Path) -> None:
    """Takes the pictures of a page."""
    with Browser() as browser:
        browser.open(page)
        for name, scheme in (("report-dark", "dark"), ("report", "light")):
            browser.prefer(scheme)
            browser.picture(HERE / f"{name}.png", height=1120)  # above the next heading
        for name, selector in PICTURES.items():
            browser.picture(HERE / f"{name}.png", selector=selector, height=1150)
        if browser.errors:
            raise SystemExit(f"the page logged {browser.errors}")


class Rotary(torch.nn.Module):
    """Turns pairs of features by an angle that grows with the position, counted from 3,000 in the format of `x`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns features of the shape of `x` (positions, 2)."""
        angle = torch.arange(3000, 3000 + len(x), dtype=x.dtype) * 0.1
        u, v = x.unbind(-1)
        return torch.stack([u * angle.cos() - v * angle.sin(), u * angle.sin() + v * angle.cos()], -1)


def take_precision() -> None:
    """Draws what `Rotary` returns in fp32, at O2 in bf16, and with the edit that the check proposes."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), Rotary()), torch.ones(128, 2)
    curves = {}
    for name, plan in (
        ("fp32", "O0"),
        ("O2 bf16", "O2"),
        ("with Rule('1', FULL)", halfstep.level("O2", "bf16").edit(halfstep.Rule("1", halfstep.FULL))),
    ):
        with halfstep.initialize(model, None, plan, low="bf16"), torch.no_grad():
            curves[name] = list(enumerate(model(x)[:, 0].float().tolist(), 3000))
    draw(curves_of("precision", curves, "position", "first feature"), "light")


def take_masters() -> None:
    """Draws the losses of a GPT that was loaded in bf16, as `benchmarks/loaded_low.py` measured them."""
    (result,) = (HERE.parent / "benchmarks" / "results").glob("loaded_low-*.json")
    curves = json.loads(result.read_text(encoding="utf-8"))["curves"]
    draw(curves_of("masters", curves, "step", "loss"), "light")


def take_gains() -> None:
    """Draws what `halfstep bench char_lm` measured, as the mean of its runs, for a light and a dark page."""
    files = sorted((HERE.parent / "benchmarks" / "results").glob("char_lm-bf16-*-xeon-amx-2-cores-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8"))["runs"] for file in files]
    held, values = (lambda run: sum(run["bytes_per_parameter"].values())), {}
    for name, *runs in zip((run["name"] for run in results[0]), *results, strict=True):
        each = [
            (run["vs_o0"], run["peak_bytes"] / full["peak_bytes"], held(run) / held(full))
            for run, (full, *_) in zip(runs, results, strict=True)
        ]
        values[name] = [mean(column) for column in zip(*each, strict=True)]
    places = ["speed", "peak memory", "weights, gradients<br>and optimizer state"]
    draw(bars("gains", "", places, values, "times O0", [ACROSS]), "light", "dark")


def curves_of(name: str, curves: dict[str, list[tuple[float, float]]], across: str, up: str) -> Chart:
    """Returns a chart of curves of (x, y)."""
    traces = [
        {
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "name": label,
            "mode": "lines",
            "line": {"dash": dash},
        }
        for (label, points), dash in zip(curves.items(), ("solid", "dot", "dash"), strict=True)
    ]
    return Chart(name, "", traces, {"xaxis": {"title": {"text": across}}, "yaxis": {"title": {"text": up}}})


def draw(chart: Chart, *schemes: str) -> None:
    """Draws a chart into the picture of its name, as the page of a sweep draws it, one for each color scheme."""
    for trace in chart.traces:
        if trace.get("type") == "bar":
            trace |= {"texttemplate": "%{y:.2f}", "textposition": "outside", "cliponaxis": False}
    sheet = Sheet(title="", headline="", header=(), rows=(), notes=(), charts=[chart], facts={})
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / f"{chart.name}.html"
        page.write_text(sheet_html(sheet), encoding="utf-8")
        browser.open(page)
        browser.run("document.head.insertAdjacentHTML('beforeend', '<style>.modebar {display: none}</style>')")
        for scheme in schemes:
            browser.prefer(scheme)
            ending = "-dark" if scheme == "dark" else ""
            browser.picture(HERE / f"{chart.name}{ending}.png", selector=f"#{chart.name}", width=900)


def main() -> None:
    """Trains, makes the page, takes the pictures."""
    take_gains()
    take_masters()
    take_precision()
    if sys.argv[1:] == ["curves"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "runs" / "char_lm.jsonl", Path(folder) / "char_lm.html"
        train(log)
        page.write_text(page_html(halfstep.read_log(log)), encoding="utf-8")
        take(page)


if __name__ == "__main__":
    main()
