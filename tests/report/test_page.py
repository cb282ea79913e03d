"""The data of the page of a run."""

import base64
import math
import os
import sys
from dataclasses import replace

import numpy as np
import pytest

import halfstep
from halfstep.errors import FormatError, LogError
from halfstep.formats import E4M3
from halfstep.records import Finding, Verdict
from halfstep.report.page import POINTS, page_of, thin
from halfstep.report.run import read_log
from tests.report.logs import START, seen, step, write


def page(tmp_path, *records, low=None):
    return page_of(read_log(write(tmp_path / "run.jsonl", records)), low)


def numbers(text, kind="<f8"):
    return np.frombuffer(base64.b64decode(text), kind).tolist()


def line(found, name):
    each = found.charts["timeline"]["lines"][name]
    return list(zip(numbers(each["x"]), numbers(each["y"]), strict=True))


def test_thinning_keeps_ends_spikes_and_order():
    values = np.sin(np.arange(50_000) / 100)
    values[12_345], values[40_000] = 9.0, -9.0
    places = thin(values)
    assert len(places) <= POINTS
    assert {0, 12_345, 40_000, 49_999} <= set(places.tolist())
    assert (np.diff(places) > 0).all()


@pytest.mark.parametrize("count", [0, 1, POINTS])
def test_few_values_are_all_drawn(count):
    assert thin(np.zeros(count)).tolist() == list(range(count))


def test_thinning_values_that_are_not_finite():
    values = np.ones(POINTS * 10)
    values[1000:2000] = np.nan
    values[3000] = np.inf
    places = thin(values)
    assert len(places) <= POINTS
    assert np.isnan(values[places]).any()
    assert len(thin(np.full(POINTS + 1, np.nan))) <= POINTS


def test_the_timeline_has_loss_norm_and_the_changes_of_the_scale(tmp_path):
    steps = [
        step(1, loss=4, norm=1, scale=8),
        step(2, loss=math.nan, norm=math.inf, scale=8, skipped=True),
        step(3, loss=2, scale=4),
        step(4, loss=1, norm=2, scale=4),
        step(5, norm=3, scale=4),
    ]
    found = page(tmp_path, *steps)
    timeline = found.charts["timeline"]
    assert (timeline["steps"], timeline["skipped"], timeline["skips"]) == (5, 1, [2])
    loss = line(found, "loss")
    assert [x for x, _ in loss] == [1, 2, 3, 4]
    assert [y for _, y in loss if not math.isnan(y)] == [4, 2, 1]
    assert timeline["lines"]["loss"]["nonfinite"] == [2]
    assert [x for x, _ in line(found, "grad_norm")] == [1, 2, 4, 5]
    assert line(found, "scale") == [(1, 8), (3, 4), (5, 4)]
    assert found.charts["shift"] == 2


def test_a_long_run_is_thinned(tmp_path):
    found = page(tmp_path, *(step(number, loss=number, skipped=number % 2 == 0) for number in range(1, 10_001)))
    assert len(line(found, "loss")) <= POINTS
    assert len(line(found, "scale")) == 2
    assert len(found.charts["timeline"]["skips"]) == POINTS // 2
    assert found.charts["timeline"]["skipped"] == 5000


def test_histogram_and_maps_of_a_kind(tmp_path):
    found = page(
        tmp_path, START, step(1), step(2),
        seen(1, "a", {-30: 1, -20: 1}, zeros=2), seen(2, "a", {-20: 4}), seen(2, "b", {0: 3}, infinities=1),
    )  # fmt: skip
    kind = found.charts["kinds"]["weight_grad"]
    assert kind["modules"] == ["(the whole network)", "a", "b"]
    assert (kind["first"], kind["bins"]) == (-30, 31)
    histogram = np.reshape(numbers(kind["histogram"]), (3, 31))
    assert (histogram[1, 0], histogram[1, 10], histogram[2, 30], histogram[0].sum()) == (1, 5, 3, 9)
    maps = {name: np.reshape(numbers(text, "<f4"), (2, 2)).tolist() for name, text in kind["maps"].items()}
    assert maps["lost"][0] == [0.5, 0.0]
    assert maps["small"][0] == [1.0, 1.0]
    assert maps["zero"][0] == [0.5, 0.0]
    assert maps["saturated"][1][1] == 0.25
    assert math.isnan(maps["lost"][1][0])
    assert [numbers(kind["totals"][name])[0] for name in ("nonzero", "lost", "count", "zeros", "saturated")] == [
        9,
        1,
        12,
        2,
        1,
    ]
    assert found.charts["columns"] == [[1, 1], [2, 2]]


def test_gradients_come_first(tmp_path):
    kinds = ("weight", "weight_grad", "activation", "activation_grad")
    found = page(tmp_path, step(1), *(seen(1, "a", {0: 1}, kind=kind) for kind in kinds))
    assert list(found.charts["kinds"]) == ["activation_grad", "weight_grad", "activation", "weight"]


def test_limits_of_the_low_format(tmp_path):
    charts = page(tmp_path, START, step(1)).charts
    assert charts["low"] == "fp16"
    assert charts["formats"]["fp16"] == {"zero": -25, "normal": -14, "top": math.log2(65504), "max": 65504.0}
    assert charts["formats"]["e4m3"]["zero"] == -10
    assert charts["formats"]["bf16"]["zero"] == -134


def test_another_format_judges_when_asked(tmp_path):
    found = page(tmp_path, START, step(1), seen(1, "a", {-20: 1}), low=E4M3)
    assert found.charts["low"] == "e4m3"
    assert numbers(found.charts["kinds"]["weight_grad"]["totals"]["lost"]) == [1, 1]
    assert dict(found.facts)["judged by"] == "what e4m3 can hold"


def test_facts_of_a_run(tmp_path):
    facts = dict(page(tmp_path, START, step(1, loss=4.0), step(2, loss=2.0, skipped=True), seen(2, "a", {0: 1})).facts)
    assert facts["plan"].startswith(
        "O2, weights low, operations by the table, norms full, masters copy, dynamic loss scale"
    )
    assert facts["low format"] == "fp16, emulated (rounded exactly, computed wider)"
    assert facts["steps"] == "1 to 2: 2, of them 1 skipped"
    assert facts["loss"] == "4 at first, 2 at last"
    assert halfstep.__version__ in facts["versions"]
    assert "cpu" in facts["machine"]
    assert "judged by" not in facts


@pytest.mark.parametrize("entries", [{"name": "O9"}, {"scale": 3}, {"rules": [3]}])
def test_a_plan_that_is_not_read_is_said_to_be(tmp_path, entries):
    plan = entries if "name" in entries else START.plan | entries
    assert dict(page(tmp_path, replace(START, plan=plan)).facts)["plan"].endswith("not a plan that this halfstep reads")


def test_facts_of_a_log_without_a_session(tmp_path):
    found = page(tmp_path)
    assert dict(found.facts)["plan"] == "not in the log"
    assert "steps" not in dict(found.facts)
    assert len(found.notes) == 3


def test_the_gravest_row_comes_first(tmp_path):
    rule = halfstep.Rule("net", halfstep.FULL)
    found = page(
        tmp_path,
        *(Finding(severity, "code", "place", "evidence", "advice") for severity in ("note", "error", "warning")),
        step(1),
        Verdict("", "mul", "backward", "overflow", "a.py:3", (rule,), "seen", "do"),
    )
    assert [row.severity for row in found.rows] == ["verdict", "error", "warning", "note"]
    first = found.rows[0]
    assert (first.step, first.what, first.place) == (1, "overflow: mul (backward)", "the model itself, a.py:3")
    assert first.cure == (repr(rule),)


@pytest.mark.parametrize("low", ["e4m3", E4M3.dtype])
def test_a_format_may_be_named(tmp_path, low):
    assert page(tmp_path, step(1), low=low).charts["low"] == "e4m3"
    with pytest.raises(FormatError, match="unknown format 'fp12'"):
        page(tmp_path, low="fp12")


@pytest.mark.parametrize("run", ["run.jsonl", None])
def test_what_is_no_run_is_refused(run):
    with pytest.raises(LogError, match=r"the Run that read_log\(path\) returns, not of"):
        page_of(run)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
def test_a_name_that_is_not_unicode_can_be_shown(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    title = page_of(read_log(write(path, [step(1)]))).title
    assert title == f"{tmp_path.name}/caf\ufffd.jsonl"
