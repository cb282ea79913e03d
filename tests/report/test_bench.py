"""A benchmark as a table and as JSON."""

import json
import math
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from halfstep.explain.report.bench import bench_table, cheapest, over_seeds
from halfstep.explain.report.lines import to_json
from halfstep.machine import Machine
from halfstep.measurements import BenchResult, BenchRun, Point, Spread, Sweep

MACHINE = Machine("cpu", "Some Chip", 2, 2, ("fp32", "bf16"), "Linux", "3.11.7", "2.13.0", "0.1.0", "abc")
O0 = BenchRun(
    "O0", "O0", "fp32", False, False, (100.0, 104.0), Spread(102.0, 101.0, 103.0, 2), 1.0, None, 3 * 2**20,
    {"weights": 4.0, "gradients": 4.0, "optimizer": 8.0}, (1.5, 1.7), {"loss": (2.0, 2.5), "accuracy": (0.5, 0.5)},
    (0, 0), (1.0, 1.0),
)  # fmt: skip
O1 = replace(
    O0, name="O1 fp16 (emulated)", level="O1", low="fp16", emulated=True, vs_o0=0.871, vs_amp=0.974,
    validation={"loss": (math.inf, 2.5), "accuracy": (0.25, 0.25)}, skipped=(1, 3), scale=(32768.0, 65536.0),
)  # fmt: skip
LOST = BenchRun("torch.amp fp16", "torch.amp", "fp16", True, False, error="no [fp16] units")
RESULT = BenchResult(
    "char_lm", {"d": "256"}, 1234567, 40, 5, (0, 1), (O0, O1, LOST), "bytes of live tensors", ("a note",), True,
    MACHINE, "halfstep bench", "2026-01-01T00:00:00Z",
)  # fmt: skip


def show(result, width=200):
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(bench_table(result, width=width))
    return capture.get()


def row(result, name):
    (line,) = [line for line in show(result).splitlines() if line.strip().startswith(name + "  ")]
    return [cell for cell in line.removeprefix(f" {name}").split("  ") if cell.strip()]


def test_a_row_has_every_figure_of_its_run():
    assert [cell.strip() for cell in row(RESULT, "O0")] == [
        "102.0 (101.0-103.0)", "1.00", "-", "3.0", "16.00", "1.6000 ± 0.1414", "2.2500 ± 0.3536", "0.5000 ± 0.0000",
        "0", "1",
    ]  # fmt: skip


def test_skips_and_scales_that_differ_by_seed_are_a_range():
    cells = [cell.strip() for cell in row(RESULT, "O1 fp16 (emulated)")]
    assert cells[1:3] == ["0.87", "0.97"]
    assert cells[-2:] == ["1-3", "32768-65536"]


def test_times_that_only_other_work_explains_are_called_that():
    assert "Other work ran" not in show(RESULT)
    busy = replace(O1, step_ms=Spread(90.0, 80.0, 130.0, 9))
    assert "Other work ran on this machine: the quartiles of O1 fp16 (emulated) lie" in show(
        replace(RESULT, runs=(O0, busy))
    )


def test_what_was_not_run_says_why_below_the_table():
    text = show(RESULT)
    assert "torch.amp fp16: left out; no [fp16] units" in text
    assert "a note" in text
    assert "Peak memory: bytes of live tensors" in text


def test_a_result_prints_a_line_for_each_run_also_in_notebooks():
    assert str(RESULT).splitlines() == [
        "char_lm, 40 steps on cpu",
        "O0: 102.0 ms a step, 1.00 x O0, peak 3.0 MiB, train loss 1.6000",
        "O1 fp16 (emulated): 102.0 ms a step, 0.87 x O0, 0.97 x torch.amp, peak 3.0 MiB, train loss 1.6000",
        "torch.amp fp16: no [fp16] units",
        "a note",
    ]
    page = RESULT._repr_html_()
    assert page.startswith('<pre style="white-space: pre-wrap">char_lm, 40 steps on cpu</pre><table><tr><td>O0</td>')
    assert "<tr><td>torch.amp fp16</td><td>no [fp16] units</td></tr></table>" in page
    assert (
        "<td>0.87 x O0</td><td>0.97 x torch.amp</td><td>peak 3.0 MiB</td><td></td><td>train loss 1.6000</td></tr>"
        in page
    )
    sweep = Sweep(1, {}, 1, (Point("resnet18", 8, None, RESULT),))
    assert sweep._repr_html_().count("resnet18, batch 8: ") == 3


def test_the_title_says_what_ran_where():
    assert show(RESULT).startswith("char_lm: 1,234,567 parameters, 40 steps, 2 seeds; cpu, Some Chip, 2 threads")
    assert "Some Chip, 1 thread\n" in show(replace(RESULT, machine=replace(MACHINE, threads=1)))


@pytest.mark.parametrize(("width", "tables"), [(149, 1), (148, 2), (80, 3), (79, 3)])
def test_a_narrow_screen_gets_further_tables_and_every_figure(width, tables):
    text = show(RESULT, width)
    rows = [line for line in text.splitlines() if line.startswith(" O0 ")]
    assert len(rows) == tables
    assert "…" not in text
    for figure in ("102.0 (101.0-103.0)", "16.00", "1.6000 ± 0.1414", "0.5000 ± 0.0000", "32768-65536"):
        assert figure in text


O2 = replace(O0, name="O2 bf16", level="O2", low="bf16", vs_o0=1.9, validation={"loss": (2.2, 2.4)})
AMP = replace(O2, name="torch.amp bf16", level="torch.amp", peer=True, vs_o0=2.5)


def last_line(*runs, fast=("fp32", "bf16")):
    return show(replace(RESULT, runs=runs, machine=replace(MACHINE, fast=fast)), width=300).splitlines()[-1]


TRAIN_O0 = "Train at O0 if its memory is available: the fastest other, O2 bf16, is "


@pytest.mark.parametrize(
    ("speed", "loss", "fast", "sentence"),
    [
        (1.94, 2.294, ("bf16",), "Train at O2 bf16: 1.94 times as fast as O0{the same} (2.294 against 2.250)."),
        (1.05, 2.30, ("bf16",), "Train at O2 bf16: 1.05 times as fast as O0{a higher} (2.300 against 2.250)."),
        (1.04, 2.20, ("bf16",), TRAIN_O0 + "about as fast as O0{a lower} (2.200 against 2.250)."),
        (
            0.44, 2.25, ("fp32",),
            TRAIN_O0 + "0.44 times as fast as O0 (this cpu has no fast bf16 units){the same} (2.250 against 2.250).",
        ),
        (0.44, 2.25, ("bf16",), TRAIN_O0 + "0.44 times as fast as O0{the same} (2.250 against 2.250)."),
    ],
)  # fmt: skip
def test_the_last_line_recommends_a_level_with_its_figures(speed, loss, fast, sentence):
    slower = replace(O2, name="O1 bf16", level="O1", vs_o0=speed / 2)
    best = replace(O2, vs_o0=speed, validation={"loss": (loss, loss)}, peak_bytes=O0.peak_bytes // 2)
    words = ("the same", "a higher", "a lower")
    ends = {word: f", with 0.50 of its peak memory; it ended at {word} loss" for word in words}
    assert last_line(O0, slower, best, AMP, fast=fast) == sentence.format_map(ends)


@pytest.mark.parametrize("timed", [1, 2])
def test_one_timed_step_is_said_to_tell_little(timed):
    line = last_line(O0, replace(O2, vs_o0=0.5, times_ms=(1.0,) * timed))
    assert line.endswith(" One timed step says little: give it more --seconds.") is (timed == 1)


@pytest.mark.parametrize(
    ("peak", "start"), [(3 * 2**20 - 1, "Train at O0 if its memory is available: "), (3 * 2**20, "Train at O0: ")]
)
def test_o0s_memory_is_spoken_of_where_it_takes_more(peak, start):
    assert last_line(O0, replace(O2, vs_o0=0.5, peak_bytes=peak)).startswith(start)


def test_the_training_loss_stands_in_where_the_workload_validates_nothing():
    runs = (replace(run, validation={}) for run in (O0, O2))
    assert last_line(*runs).endswith("; it ended at the same loss (1.600 against 1.600).")


@pytest.mark.parametrize("runs", [(O0,), (O2,), (O0, AMP), (O0, replace(O2, vs_o0=None)), (O0, LOST)])
def test_where_there_is_nothing_to_compare_nothing_is_recommended(runs):
    assert last_line(*runs) == "Nothing to recommend: no other level could be compared with O0 throughout."


def test_the_cheapest_run_has_a_close_gradient_at_every_point():
    def run(name, ms, off, **fields):
        spread = Spread(ms, ms, ms, 2)
        return replace(O0, name=name, step_ms=spread, gradient_error=off, **fields)

    near, far = run("near", 8.0, 0.1), run("far", 4.0, 0.25)
    rest = run("O0", 9.0, 0.0), run("broken", 1.0, 0.1, error="x"), replace(far, peer=True, gradient_error=None)
    points = [replace(RESULT, runs=(near, replace(far, gradient_error=0.2), *rest), within=0.25)]
    assert cheapest(points, 0.25) == "far"
    points.append(replace(points[0], runs=(near, far, *rest)))
    assert cheapest(points, 0.25) == "near"
    assert cheapest(points, 0.05) == "O0"
    assert cheapest(points, 0.0) is None
    assert cheapest([], 0.25) is None
    assert "under 25% of the noise of batches: near, 10.0%." in show(points[1])
    assert "10.0%" in row(points[1], "near")[5]
    assert "gradient" not in show(RESULT)


def compiled(run, speed):
    return replace(run, name=f"{run.name} compiled", compiled=True, vs_o0=speed, validation={})


@pytest.mark.parametrize(
    ("runs", "start"),
    [
        ((O0, compiled(O0, 1.24), compiled(O2, 1.16)), "Train at O0 compiled: 1.24 times as fast as O0"),
        ((O0, compiled(O0, 1.24), compiled(O2, 1.55)), "Train at O2 bf16 compiled: 1.25 times as fast as O0 compiled"),
        ((O0, compiled(O0, 0.8), compiled(O2, 1.1)), "Train at O2 bf16 compiled: 1.10 times as fast as O0"),
        ((O0, compiled(O0, 0.8), compiled(O2, 0.9)), "Train at O0: the fastest other, O2 bf16 compiled, is 0.90 times"),
        (
            (O0, compiled(O0, 1.24), replace(O2, vs_o0=1.27)),
            "Train at O0 compiled: the fastest other, O2 bf16, is abou",
        ),
        ((compiled(O0, 1.0), compiled(O2, 1.6)), "Train at O2 bf16 compiled: 1.60 times as fast as O0 compiled, with"),
    ],
)
def test_what_compile_gains_is_not_credited_to_a_level(runs, start):
    assert last_line(*runs).startswith(start)


def test_times_of_an_emulated_format_are_those_of_this_machine_and_count():
    assert last_line(O0, replace(O1, vs_o0=1.2, validation={})).startswith(f"Train at {O1.name}: 1.20 times as fast as")


@pytest.mark.parametrize("complete", [True, False])
def test_an_interrupted_benchmark_says_so(complete):
    result = replace(RESULT, complete=complete, notes=("a <note>",))
    for shown, note in (
        (show(result), "a <note>"),
        (str(result), "a <note>"),
        (result._repr_html_(), "a &lt;note&gt;"),
    ):
        assert ("Interrupted" in shown) is not complete
        assert note in shown


def test_a_benchmark_with_nothing_measured_is_a_table_of_dashes():
    empty = replace(RESULT, runs=(BenchRun("O0", "O0", "fp32", False, False),), complete=False)
    assert {cell.strip() for cell in row(empty, "O0")} == {"-"}


def test_seeds_that_diverged_are_counted():
    assert (over_seeds([math.nan]), over_seeds([math.inf, 2.0])) == ("1 of 1 diverged", "1 of 2 diverged")


def test_json_and_back_is_the_same():
    assert msgspec.convert(json.loads(to_json(RESULT)), BenchResult, strict=False) == RESULT


def test_json_is_standard_also_where_a_loss_is_not_finite():
    def refuse(constant):
        raise AssertionError(constant)

    runs = json.loads(to_json(RESULT), parse_constant=refuse)["runs"]
    assert runs[1]["validation"]["loss"] == ["inf", 2.5]


def test_lists_of_numbers_stay_on_one_line():
    assert '"times_ms": [ 100.0, 104.0 ]' in to_json(RESULT)
