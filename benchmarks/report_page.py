"""How long the page of a large run takes to open in headless Chromium, and to make.

    python benchmarks/report_page.py                # 500 modules, 10,000 steps, all kinds of tensors every 50 steps
    python benchmarks/report_page.py --every 5      # ten times as many observations

The log is written by the real writer from records with random numbers. Opened: from the start of the navigation until
the page was loaded, all four charts drawn, and two frames painted. Each opening is a new browser with a new profile, so
nothing is in any cache of its own. Needs Chromium and the extra [report].
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.browser import Browser
from halfstep.explain.report.html import page_html
from halfstep.explain.report.log import RunLog
from halfstep.explain.report.run import read_log
from halfstep.formats import FP16
from halfstep.machine import read_machine
from halfstep.plan.io import to_dict
from halfstep.plan.levels import level
from halfstep.records import TENSOR_KINDS, Observation, SessionStart, StepRecord, TensorStats

VALUES = 10_000  # of each tensor


def write_run(path: Path, *, modules: int, steps: int, every: int) -> int:
    """Writes a log of a run in fp16 and returns how many tensors were observed."""
    chance = np.random.default_rng(0)
    scale, observed = 65536.0, 0
    with RunLog(path) as log:
        log.record(SessionStart(to_dict(level("O2", FP16)), "cpu", emulated=True))
        for step in range(1, steps + 1):
            skipped = bool(chance.random() < 0.002)
            norm = np.inf if skipped else 0.5 + chance.random()
            loss = 1.5 + 3 * np.exp(-step / 2000) + 0.1 * chance.random()
            numbers = (torch.tensor(float(value)) for value in (scale, norm, loss))
            log(_record(step, skipped, *numbers))
            if step % every == 0:
                for seen in _observe(chance, step, modules, scale):
                    log.record(seen)
                    observed += 1
            scale = scale / 2 if skipped else scale * 2 if step % 1000 == 0 else scale
    return observed


def _record(step: int, skipped: bool, scale: torch.Tensor, norm: torch.Tensor, loss: torch.Tensor) -> StepRecord:
    return StepRecord(step, torch.tensor(skipped), scale, norm, loss=loss)


def _observe(chance: np.random.Generator, step: int, modules: int, scale: float) -> Iterator[Observation]:
    for number in range(modules):
        for kind in TENSOR_KINDS:
            carried = scale if kind.endswith("grad") else 1.0
            center = -28 - 8 * number / modules if kind.endswith("grad") else -4
            exponents = np.clip(chance.normal(center + np.log2(carried), 4, 300), -126, 127).astype(int)
            largest = 2.0 ** float(exponents.max())
            counts = np.bincount(exponents + 127, minlength=256) * (VALUES // 300)
            stats = TensorStats(VALUES, VALUES - int(counts.sum()), 0, 0, 0, tuple(counts.tolist()), 0.0, 1.0, largest)
            yield Observation(step, f"blocks.{number // 10}.layer{number % 10}", kind, "weight", "fp32", carried, stats)


def open_page(page: Path) -> tuple[float, int]:
    """Returns the milliseconds until a page was painted, and how many charts it has."""
    with Browser() as browser:
        took = browser.open(page)
        drawn = browser.run("[...document.querySelectorAll('.chart')].filter(chart => chart.data).length")
        asked = [url for url in browser.requests if not url.startswith(("file:", "data:"))]
        if browser.errors or asked:
            raise SystemExit(f"the page logged {browser.errors} and asked for {asked}")
    return took, drawn


def main() -> None:
    """Writes a log, makes its page, opens it, and prints what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--openings", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "run.jsonl", Path(folder) / "run.html"
        start = time.perf_counter()
        observed = write_run(log, modules=given.modules, steps=given.steps, every=given.every)
        written = time.perf_counter()
        page.write_text(page_html(read_log(log)), encoding="utf-8")
        made = time.perf_counter()
        opened, charts = zip(*(open_page(page) for _ in range(given.openings)), strict=True)
        figures = {
            "modules": given.modules,
            "steps": given.steps,
            "observations": observed,
            "log_mib": round(log.stat().st_size / 2**20, 1),
            "page_mib": round(page.stat().st_size / 2**20, 1),
            "log_written_s": round(written - start, 1),
            "page_made_s": round(made - written, 1),
            "charts": min(charts),
            "opened_ms": [round(took) for took in opened],
            "opened_ms_median": round(median(opened)),
        }
    print(json.dumps(figures, indent=2))
    if given.json is not None:
        machine = read_machine(torch.device("cpu"))
        figures["machine"] = {
            name: getattr(machine, name) for name in ("processor", "cores", "system", "halfstep", "commit")
        }
        given.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
