"""Makes the pictures of the pages: trains char_lm at O2 in fp16 with a log and a probe, and takes them of its page.

    python docs/pictures.py        # one to two minutes; needs Chromium and the extra [report]
    python docs/pictures.py masters        # only the curves with and without masters, from their result file

fp16 is emulated where the device has no units for it. The first step that is skipped is explained by `halfstep.blame`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import halfstep
from docs.browser import Browser
from halfstep.explain.report.html import page_html
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
        browser.picture(HERE / "report.png", height=1150)
        for name, selector in PICTURES.items():
            browser.picture(HERE / f"{name}.png", selector=selector, height=1150)
        if browser.errors:
            raise SystemExit(f"the page logged {browser.errors}")


def take_masters() -> None:
    """Draws the losses of a GPT that was loaded in bf16, as `benchmarks/loaded_low.py` measured them."""
    import plotly.graph_objects as go

    (result,) = (HERE.parent / "benchmarks" / "results").glob("loaded_low-*.json")
    curves = json.loads(result.read_text(encoding="utf-8"))["curves"]
    figure = go.Figure(
        layout={"template": "plotly_white", "width": 900, "height": 380, "margin": dict.fromkeys("ltrb", 40)}
    )
    for (name, points), dash in zip(curves.items(), ("solid", "dot", "dash"), strict=True):
        steps, losses = zip(*points, strict=True)
        figure.add_scatter(x=steps, y=losses, name=name, line={"dash": dash})
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss")
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "masters.html"
        figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        browser.open(page)
        browser.picture(HERE / "masters.png", selector=".plotly-graph-div")


def main() -> None:
    """Trains, makes the page, takes the pictures."""
    take_masters()
    if sys.argv[1:] == ["masters"]:
        return
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "runs" / "char_lm.jsonl", Path(folder) / "char_lm.html"
        train(log)
        page.write_text(page_html(halfstep.read_log(log)), encoding="utf-8")
        take(page)


if __name__ == "__main__":
    main()
