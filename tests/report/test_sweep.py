"""A sweep as a table, a sentence and a page in a browser: what stands in each, derived by hand."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from docs.browser import find_browser
from halfstep.explain.report.bench import recommendation
from halfstep.explain.report.html import sheet_html
from halfstep.explain.report.sweep import sheet_text, sweep_sheet
from halfstep.machine import Machine
from halfstep.measurements import BenchResult, BenchRun, Point, Spread, Sweep

MACHINE = Machine("cpu", "Some Chip", 2, 2, ("fp32",), "Linux", "3.13", "2.13", "0.1", None)
MIB = 2**20


def run_of(name, ms, speed, mib, losses=(2.0, 1.0), **changes):
    level, _, low = name.partition(" ")
    made = BenchRun(name, level, low or "fp32", False, False, (ms, ms), Spread(ms, ms, ms, 2), speed)
    return replace(made, peak_bytes=mib * MIB, losses=losses, train_loss=(1.0,), **changes)


def point_of(model, batch, *runs, examples=6000):
    result = BenchResult(
        "cifar_resnet", {}, 10, 3, 3, (0,), runs, "bytes of live tensors", ("a note",), True, MACHINE, "halfstep", "now"
    )  # fmt: skip
    return Point(model, batch, examples, result)


ASKED = {
    "models": "resnet18, resnet50", "batch sizes": "4, 8", "steps": "3", "device": "cpu", "processor": "Chip",
    "threads": "2",
}  # fmt: skip
O0 = run_of("O0", 100.0, 1.0, 100)
LOST = replace(run_of("O3 bf16", 10.0, 9.0, 10), error="step 3: out of memory: no more", losses=())
SWEEP = Sweep(
    1, ASKED, 3,
    (
        point_of("resnet18", 4, O0, run_of("O1 bf16", 50.0, 2.0, 80), run_of("O2 bf16", 40.0, 2.5, 50), LOST),
        point_of("resnet50", 8, O0, run_of("O1 bf16", 62.5, 1.6, 80), run_of("O2 bf16", 25.0, 4.0, 60), LOST),
    ),
)  # fmt: skip


def text_of(sweep):
    console = Console(file=io.StringIO(), width=200)
    console.print(sheet_text(sweep_sheet(sweep)))
    return console.file.getvalue()


def test_a_row_has_speed_throughput_time_per_epoch_and_memory():
    sheet = sweep_sheet(SWEEP)
    named = dict(zip(sheet.header, sheet.rows[2], strict=True))
    assert named["speed\nx O0"] == "2.50"
    assert named["examples\nper s"] == "100.0"  # 4 examples in 40 ms
    assert named["minutes\nan epoch"] == "1.0"  # 6000 of them
    assert named["memory\nx O0"] == "0.50"


def test_the_table_says_what_failed_and_how_far_the_sweep_is():
    text = text_of(SWEEP)
    assert "2 of 3 points so far" in text
    assert "resnet50, batch 8, O3 bf16: step 3: out of memory: no more" in text
    assert "a note" in text


TRAIN_O1 = "Train at O1 bf16: 1.60 to 2.00 times as fast as O0, with 0.80 of its peak memory."
TRAIN_O2 = "Train at O2 bf16: 2.50 to 4.00 times as fast as O0, with 0.50 to 0.60 of its peak memory."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, TRAIN_O2),
        ({"vs_o0": 0.5}, TRAIN_O1),  # what is slower is not recommended, nor what ends higher or nowhere
        ({"losses": (2.0,) * 50, "train_loss": (1.11,)}, TRAIN_O1),
        ({"losses": (2.0,) * 50, "train_loss": (1.09,)}, TRAIN_O2),
        ({"losses": (2.0,) * 49, "train_loss": (1.11,)}, TRAIN_O2),  # too few steps to judge by
        ({"losses": (2.0, math.nan)}, TRAIN_O1),
    ],
)
def test_the_recommendation_is_the_fastest_that_learns_everywhere(change, said):
    changed = [
        replace(point, result=replace(point.result, runs=tuple(
            replace(run, **change) if run.level == "O2" else run for run in point.result.runs
        )))
        for point in SWEEP.points
    ]  # fmt: skip
    assert sweep_sheet(replace(SWEEP, points=tuple(changed))).headline == said
    assert text_of(replace(SWEEP, points=tuple(changed))).rstrip().endswith(said)


def test_where_low_is_slower_o0_is_recommended_with_what_it_costs():
    sweep = replace(SWEEP, points=(point_of("resnet18", 4, O0, run_of("O2 bf16", 200.0, 0.5, 60)),))
    said = "Train at O0 if its memory is available: the fastest other, O2 bf16, is 0.50 times as fast as O0 "
    said += "(this cpu has no fast bf16 units), with 0.60 of its peak memory."
    assert sweep_sheet(sweep).headline == said
    assert sweep_sheet(replace(SWEEP, points=(point_of("x", 4, O0),))).headline.startswith("Nothing to recommend")
    assert sweep_sheet(replace(SWEEP, points=())).headline.startswith("Nothing to recommend")


OUT_OF_MEMORY = {"error": "step 1: out of memory: no more", "losses": (), "vs_o0": None, "step_ms": None}


@pytest.mark.parametrize(
    ("full", "low", "said"),
    [
        ([1, 0, 0], [1, 0, 0], "{}; at 2 of 3 points both ran out of memory."),
        ([1, 0], [1, 1], "{}; at 1 of 2 points O0 alone ran out of memory."),
        ([1, 1], [1, 0], "{}; at 1 of 2 points O1 bf16 alone ran out of memory."),
        ([0], [1], "Train at O1 bf16: the fastest that fits; O0 ran out of memory."),
        ([0], [0], "Nothing to recommend: no other level could be compared with O0 throughout."),
        ([1, 1], [1, "KeyError: 'x'"], "Nothing to recommend: no other level could be compared with O0 throughout."),
    ],
)
def test_where_memory_runs_out_the_other_points_are_compared(full, low, said):
    def run(name, speed, fits):
        made = run_of(name, 100.0 / speed, speed, 100)
        return made if fits == 1 else replace(made, **OUT_OF_MEMORY | ({"error": fits} if fits else {}))

    points = [point_of("m", 4, run("O0", 1.0, a), run("O1 bf16", 3.0, b)) for a, b in zip(full, low, strict=True)]
    best = "Train at O1 bf16: 3.00 times as fast as O0, with 1.00 of its peak memory"
    assert sweep_sheet(replace(SWEEP, points=tuple(points))).headline == said.format(best)


def test_where_all_rows_are_compiled_memory_counts_in_that_of_o0_compiled():
    runs = [replace(run_of("O0 compiled", 2.0, 1.0, 100), compiled=True), run_of("O1 bf16 compiled", 1.0, 2.0, 80)]
    sheet = sweep_sheet(replace(SWEEP, points=(point_of("m", 4, *runs),)))
    assert sheet.rows[1][sheet.header.index("memory\nx O0")] == "0.80"


def test_the_charts_hold_the_figures():
    charts = {chart.name: chart for chart in sweep_sheet(SWEEP).charts}
    assert list(charts) == ["speed", "throughput", "memory", "loss-resnet18", "loss-resnet50"]
    speed = {trace["name"]: trace for trace in charts["speed"].traces}
    assert speed["O2 bf16"]["x"] == [["resnet18", "resnet50"], ["batch 4", "batch 8"]]
    assert speed["O2 bf16"]["y"] == [2.5, 4.0]
    assert [trace["y"] for trace in charts["memory"].traces][:2] == [[100, 100], [80, 80]]
    first = charts["loss-resnet18"].traces[0]
    assert (first["name"], first["x"], first["y"]) == ("O0, batch 4", [1, 2], [2.0, 1.0])


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here")
@pytest.mark.slow
def test_the_page_draws_every_chart_and_asks_the_network_for_nothing(browser, tmp_path):
    named = replace(SWEEP.points[0], model="</script><b>")
    sweep = replace(SWEEP, points=(*SWEEP.points, named))
    sheet = sweep_sheet(sweep)
    page = tmp_path / "sweep.html"
    page.write_text(sheet_html(sheet), "utf-8")
    browser.open(page)
    count = lambda selector: browser.run(f"document.querySelectorAll({selector!r}).length")  # noqa: E731
    assert browser.errors == []
    assert [asked for asked in browser.requests if not asked.startswith(("file:", "data:", "blob:"))] == []
    assert count(".chart .main-svg") >= len(sheet.charts) == 6
    assert count("#speed .bars .point path") == 4 * 3
    assert count("#loss-resnet50 .scatterlayer .trace") == 3  # what failed has no losses
    assert count(".figures tbody tr") == 12
    assert browser.run("document.querySelector('h1').textContent") == sheet.headline


def test_o3_without_masters_is_recommended_only_where_its_loss_was_seen():
    runs = (
        run_of("O0", 20.0, 1.0, 10),
        run_of("O1 bf16", 10.0, 2.0, 9),
        run_of("O3 bf16", 5.0, 4.0, 5),
    )
    short, alone = point_of("m", 1, *runs).result, point_of("m", 1, runs[0], runs[2]).result
    assert recommendation([short]).startswith("Train at O1 bf16: 2.00 times")
    assert recommendation([alone]).startswith("Train at O3 bf16: 4.00 times")
    assert recommendation([replace(short, runs=tuple(replace(run, losses=(1.0,) * 50) for run in runs))]).startswith(
        "Train at O3 bf16"
    )
