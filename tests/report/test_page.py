"""The data of the page of a run."""

import math
import os
import sys
from dataclasses import replace

import numpy as np
import pytest

import halfstep
from halfstep.errors import FormatError, LogError
from halfstep.explain.report.html import POINTS, page_of, thin
from halfstep.explain.report.run import read_log
from halfstep.formats import E4M3
from halfstep.records import Finding, Verdict
from tests.report.logs import START, seen, stats, step, write


def page(tmp_path, *records, low=None):
    return page_of(read_log(write(tmp_path / "run.jsonl", records)), low)


def line(found, name):
    each = found.charts["timeline"]["lines"][name]
    return list(zip(each["x"], each["y"], strict=True))


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
        step(3, loss=2, scale=4, bad=True),  # of another process
        step(4, loss=1, norm=2, scale=4),
        step(5, norm=3, scale=4),
    ]
    found = page(tmp_path, *steps)
    timeline = found.charts["timeline"]
    assert (timeline["steps"], timeline["skipped"], timeline["skips"]) == (5, 1, [2])
    loss = line(found, "loss")
    assert [x for x, _ in loss] == [1, 2, 3, 4]
    assert [y for _, y in loss if not math.isnan(y)] == [4, 2, 1]
    assert timeline["broken"] == [2, 3]
    assert [x for x, _ in line(found, "grad_norm")] == [1, 2, 4, 5]
    assert line(found, "scale") == [(1, 8), (3, 4), (5, 4)]
    assert found.charts["shift"] == 2


@pytest.mark.slow
def test_a_long_run_is_thinned(tmp_path):
    found = page(tmp_path, *(step(number, loss=number, skipped=number % 2 == 0) for number in range(1, 4_201)))
    assert len(line(found, "loss")) <= POINTS
    assert len(line(found, "scale")) == 2
    assert len(found.charts["timeline"]["skips"]) == POINTS // 2
    assert found.charts["timeline"]["skipped"] == 2100


def test_histogram_and_maps_of_a_kind(tmp_path):
    found = page(
        tmp_path, START, step(1), step(2),
        seen(1, "a", {-30: 1, -20: 1}, zeros=2), seen(2, "a", {-20: 4}), seen(2, "b", {0: 3}, infinities=1),
    )  # fmt: skip
    kind = found.charts["kinds"]["weight_grad"]
    assert kind["modules"] == ["(the whole network)", "a", "b"]
    assert (kind["first"], kind["bins"]) == (-30, 31)
    share = np.reshape(kind["share"], (3, 31))
    assert (share[1, 0], share[1, 10], share[2, 30]) == pytest.approx((1 / 6, 5 / 6, 1), rel=1e-4)
    assert share.sum(1) == pytest.approx([1, 1, 1], rel=1e-4)
    maps = {name: np.reshape(shares, (2, 2)).tolist() for name, shares in kind["maps"].items()}
    assert maps["lost"][0] == [0.5, 0.0]
    assert maps["small"][0] == [1.0, 1.0]
    assert maps["zero"][0] == [0.5, 0.0]
    assert maps["saturated"][1][1] == 0.25
    assert math.isnan(maps["lost"][1][0])
    assert (kind["nonzero"], kind["count"]) == ([9, 6, 3], [12, 8, 4])
    run = {name: values[0] for name, values in kind["run"].items()}
    # 2^-30 is lost in fp16, 2^-20 keeps fewer digits; of 12 values two are zero and one is infinite
    expected = {"lost": 1 / 9, "subnormal": 5 / 9, "small": 6 / 9, "zero": 2 / 12, "saturated": 1 / 12}
    assert run == pytest.approx(expected)
    assert found.charts["columns"] == [[1, 1], [2, 2]]


def judged(found, kind, fmt, row, scale):
    """Lost, subnormal and saturated share of a row at a loss scale of 2^scale, as the page looks them up."""
    low, high = found.charts["shifts"]
    given = found.charts["kinds"][kind]
    moves = high - low + 1 if kind in found.charts["gradients"] else 1
    table = np.reshape(given["judged"][fmt], (len(given["modules"]), moves, 3))
    return table[row, scale - low if moves > 1 else 0].tolist()


def test_shares_at_every_loss_scale_are_those_of_the_statistics(tmp_path):
    powers = {-30: 1, -25: 2, -20: 4, -3: 8, 10: 1}
    found = page(tmp_path, START, step(1, scale=8), seen(1, "a", powers), seen(1, "a", {-1: 3}, kind="activation"))
    true = stats(powers)
    assert found.charts["shifts"] == [0, 24]
    for fmt in ("fp16", "bf16", "e4m3", "e5m2"):
        for scale in (0, 5, 6, 24):
            factor = 2.0**scale
            expected = [true.lost(fmt, factor), true.subnormal(fmt, factor), true.saturated(fmt, factor)]
            for row in (0, 1):
                assert judged(found, "weight_grad", fmt, row, scale) == pytest.approx(expected, rel=1e-5)  # five digits
    assert judged(found, "weight_grad", "fp16", 1, 0) == pytest.approx([1 / 16, 6 / 16, 0])  # 2^-25 among larger ones
    assert judged(found, "weight_grad", "fp16", 1, 6) == pytest.approx([0, 3 / 16, 1 / 16])
    assert judged(found, "activation", "fp16", 1, 0) == [0, 0, 0]


def test_subnormals_of_fp32_are_judged_as_the_statistics_do(tmp_path):
    tiny = replace(stats({-126: 1}), exponents=(23, 1, *(0,) * 254), count=24)
    record = replace(seen(1, "a", {}), stats=tiny)
    found = page(tmp_path, START, step(1), record, low="bf16")
    # bf16 rounds to zero below 2^-134: 15 of the 23 octaves from 2^-149 on
    assert tiny.lost("bf16") == 15 / 24
    assert judged(found, "weight_grad", "bf16", 1, 0) == pytest.approx([15 / 24, 8 / 24, 0], rel=1e-4)


@pytest.mark.parametrize(
    ("scales", "skipped", "shift"),
    [
        ([65536] * 3 + [2, 1, 1, 1, 1], {4, 5, 6, 7, 8}, 16),  # it stopped: what it tried last is not what it used
        ([8, 8, 16, 16], set(), 4),  # of as many steps the later
        ([8, 8, 8, 16], set(), 3),
        ([8, 4, 2], {1, 2, 3}, 1),  # no step was made
        ([math.inf, 4], set(), 2),
    ],
)
def test_the_histogram_opens_at_the_scale_of_most_steps_that_were_made(tmp_path, scales, skipped, shift):
    steps = [step(number, scale=scale, skipped=number in skipped) for number, scale in enumerate(scales, start=1)]
    assert page(tmp_path, START, *steps).charts["shift"] == shift


def verdict(module, kind="overflow", phase="forward"):
    return Verdict(module, "mul", phase, kind, "a.py:3", (), "seen", "do")


def focus(tmp_path, given, *records):
    return page(tmp_path, START, step(1, skipped=True), *records, given).charts["focus"]


def test_the_map_opens_on_what_the_verdict_is_about(tmp_path):
    some = [seen(1, name, {0: 1}, kind=kind) for kind in ("weight", "activation", "weight_grad") for name in ("a", "b")]
    opened = {"kind": "activation", "module": "b", "saturated": False}
    assert focus(tmp_path / "1", verdict("b"), *some) == opened
    assert focus(tmp_path / "2", verdict("b", phase="backward"), *some) == opened | {"kind": "weight_grad"}
    assert focus(tmp_path / "3", verdict("b", "weights"), *some) == opened | {"kind": "weight"}
    assert focus(tmp_path / "4", verdict("b.c.d"), *some) == opened
    assert focus(tmp_path / "5", verdict("x"), *some) == opened | {"module": None}


def test_the_map_opens_where_the_overflow_shows(tmp_path):
    hidden = [seen(1, "b", {0: 1}, kind="activation"), seen(1, "b.norm", {0: 1}, infinities=2)]
    assert focus(tmp_path, verdict("b"), *hidden) == {"kind": "weight_grad", "module": "b.norm", "saturated": True}


def test_a_page_of_a_run_that_went_on_stuck_opens_on_its_verdict(tmp_path):
    stuck = [step(number, skipped=True) for number in range(2, 20)]
    observed = (seen(1, name, {0: 1}) for name in ("a", "b"))
    found = page(tmp_path, START, step(1, skipped=True), *observed, verdict("b"), *stuck).charts["focus"]
    assert found == {"kind": "weight_grad", "module": "b", "saturated": False}


def test_a_page_without_a_verdict_or_without_tensors_has_no_focus(tmp_path):
    assert page(tmp_path / "1", START, step(1), seen(1, "a", {0: 1})).charts["focus"] is None
    assert focus(tmp_path / "2", verdict("a")) is None


def test_verdicts_are_marked_on_the_time_axis_and_findings_are_not(tmp_path):
    records = [Finding("note", "a", "b", "c", "d"), step(1), verdict("a"), step(2), step(3), verdict("b", "invalid")]
    timeline = page(tmp_path, START, *records).charts["timeline"]
    assert timeline["verdicts"] == [[1, "overflow"], [3, "invalid"]]
    assert (timeline["first"], timeline["last"]) == (1, 3)


@pytest.mark.parametrize(
    ("advice", "rest"),
    [
        ("plan.edit(Rule('a(b)', FULL)); tried: it trains", "tried: it trains"),
        ("plan.edit(Rule('a(b)', FULL)), with which it runs", "with which it runs"),
        ("take less", "take less"),
        ("plan.edit(cut", "plan.edit(cut"),
    ],
)
def test_an_edit_is_shown_once(tmp_path, advice, rest):
    given = Verdict("a", "mul", "forward", "overflow", None, (halfstep.Rule("a(b)", halfstep.FULL),), "seen", advice)
    (row,) = page(tmp_path, step(1), given).rows
    assert (row.edit, row.advice) == ("plan = plan.edit(Rule('a(b)', FULL))", rest)


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
    assert found.charts["kinds"]["weight_grad"]["run"]["lost"] == [1, 1]
    assert dict(found.facts)["judged by"] == "what e4m3 can hold"


def test_facts_of_a_run(tmp_path):
    start = replace(START, plan=START.plan | {"moments": "8bit"})
    facts = dict(page(tmp_path, start, step(1, loss=4.0), step(2, loss=2.0, skipped=True), seen(2, "a", {0: 1})).facts)
    assert facts["plan"].startswith(
        "O2, weights low, operations by the table, norms full, masters copy, moments 8bit, dynamic loss scale"
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
    assert dict(page(tmp_path, replace(START, plan=plan)).facts)["plan"].endswith(
        "not a plan that this halfstep version can read"
    )


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
    assert first.edit == "plan = plan.edit(Rule('net', FULL))"


@pytest.mark.parametrize("low", ["e4m3", E4M3.dtype])
def test_a_format_may_be_named(tmp_path, low):
    assert page(tmp_path, step(1), low=low).charts["low"] == "e4m3"
    with pytest.raises(FormatError, match="unknown format 'fp12'"):
        page(tmp_path, low="fp12")


@pytest.mark.parametrize("run", ["run.jsonl", None])
def test_what_is_no_run_is_refused(run):
    with pytest.raises(LogError, match=r"expected a Run, as read_log\(path\) returns it, got"):
        page_of(run)


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
def test_a_name_that_is_not_unicode_can_be_shown(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    title = page_of(read_log(write(path, [step(1)]))).title
    assert title == f"{tmp_path.name}/caf\ufffd.jsonl"
