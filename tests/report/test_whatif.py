"""The table and the JSON of a prediction."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from halfstep.explain.report.lines import to_json
from halfstep.explain.report.step import whatif_report
from halfstep.records import Finding, Rounded, ScaleRange, WhatIf
from tests.report.logs import counted


def stats(nonzero, zeros=0):
    counts = [0] * 256
    counts[127] = nonzero
    return counted(counts, count=nonzero + zeros, zeros=zeros, amax=1.0)


def row(module, kind="weight", **fields):
    plain = Rounded(module, kind, "fp16", low=True, scale=1.0, lost=0.0, saturated=0.0, snr_db=60.0, stats=stats(100))
    return replace(plain, **fields)


SCALE = ScaleRange("fp16", 2.0, 65504.0, 8192.0, (32768.0, 65536.0), 1.0, "head", None)
FOUND = WhatIf(
    plan="O2",
    steps=3,
    formats=("fp16",),
    rows=(
        row("a", lost=0.5, snr_db=30.0),
        row("b", stats=stats(300)),
        row("c", lost=1.0, low=False),
        row("", "activation", saturated=0.00001, snr_db=math.inf),
    ),
    scales=(SCALE,),
    stay_full={"fp16": tuple(Finding("warning", "stay full", f"m{i}", "bad", "do") for i in range(10))},
)


def printed(found, width=200, **options):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(whatif_report(found, **options))
    return console.export_text()


def line_of(text, start):
    return next(line.split() for line in text.splitlines() if line.split()[: len(start.split())] == start.split())


@pytest.mark.parametrize("width", [60, 80])
def test_no_figure_is_cut_where_there_is_little_room(width):
    scale = replace(SCALE, largest=1.677e5, recommended=16777216.0, place="encoder.blocks.0.attention.proj")
    rows = (*(replace(each, scale=16777216.0) for each in FOUND.rows), row("encoder.blocks.0.attention.norm_1"))
    text = printed(replace(FOUND, scales=(scale,), rows=rows), width=width, modules=True)
    assert "…" not in text
    assert {"1.677e+05", "16777216", "32768", "65536", "50.00%", "100.00%", "<0.01%"} <= set(text.split())


def test_shares_of_a_kind_are_weighted_by_elements_and_leave_out_what_stays_full():
    text = printed(FOUND)
    assert line_of(text, "fp16 weight") == ["fp16", "weight", "1", "12.50%", "0", "30", "a"]
    assert line_of(text, "fp16 activation") == ["fp16", "activation", "1", "0", "<0.01%", "exact", "(model)"]


def test_scales_are_shown_with_the_gradient_that_sets_them():
    settled = ["32768", "to", "65536"]
    assert line_of(printed(FOUND), "fp16 2")[2:] == ["6.55e+04", "8192", *settled, "head,", "gradient", "1"]
    unneeded = replace(FOUND, scales=(replace(SCALE, recommended=1.0, smallest=2.0**-100),))
    assert line_of(printed(unneeded), "fp16 1 or less")[4:8] == ["6.55e+04", "none", "needed", "-"]
    assert line_of(printed(replace(FOUND, scales=(replace(SCALE, smallest=None),))), "fp16 -")


def test_modules_that_should_stay_full_are_named_up_to_eight():
    text = printed(FOUND)
    assert "fp16: 10 modules should stay full" in text
    assert "  m7: bad" in text
    assert "m8" not in text
    assert "and 2 more" in text
    assert "no modules should stay full" in printed(replace(FOUND, stay_full={"fp16": ()}))


def test_every_module_is_shown_where_it_is_asked_for():
    text = printed(FOUND, modules=True)
    assert line_of(text, "c weight fp16")[3:] == ["full", "1", "100.00%", "0", "60"]


def test_json_has_every_figure_and_no_bare_infinity():
    read = json.loads(to_json(FOUND))
    assert read["rows"][0]["lost"] == 0.5
    assert read["rows"][3]["snr_db"] == "inf"
    assert read["rows"][1]["stats"]["exponents"][127] == 300
    assert len(read["stay_full"]["fp16"]) == 10
