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
    draw("precision", curves, "position", "first feature")


def take_masters() -> None:
    """Draws the losses of a GPT that was loaded in bf16, as `benchmarks/loaded_low.py` measured them."""
    (result,) = (HERE.parent / "benchmarks" / "results").glob("loaded_low-*.json")
    draw("masters", json.loads(result.read_text(encoding="utf-8"))["curves"], "step", "loss")


def draw(name: str, curves: dict[str, list[tuple[float, float]]], across: str, up: str) -> None:
    """Draws curves of (x, y) into the picture `name`."""
    import plotly.graph_objects as go

    figure = go.Figure(
        layout={"template": "plotly_white", "width": 900, "height": 380, "margin": dict.fromkeys("ltrb", 40)}
    )
    for (label, points), dash in zip(curves.items(), ("solid", "dot", "dash"), strict=True):
        x, y = zip(*points, strict=True)
        figure.add_scatter(x=x, y=y, name=label, line={"dash": dash})
    figure.update_xaxes(title=across)
    figure.update_yaxes(title=up)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / f"{name}.html"
        figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        browser.open(page)
        browser.picture(HERE / f"{name}.png", selector=".plotly-graph-div")


def main() -> None:
    """Trains, makes the page, takes the pictures."""
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
