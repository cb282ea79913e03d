"""`halfstep whatif`: what it prints and writes."""

import json
from contextlib import nullcontext

from halfstep.cli import step

SMALL = ["--set", "d_in=8", "--set", "d_out=8", "--set", "batch=4", "--steps", 1]


def test_it_prints_scales_and_shares_and_writes_every_figure(halfstep, tmp_path):
    code, out, err = halfstep("whatif", "regression", *SMALL, "--json", tmp_path / "x.json")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["fp16", "bf16", "e4m3", "e5m2"]
    assert "fp16: no modules should stay full" in out
    read = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert {row["kind"] for row in read["rows"]} == {"weight", "activation", "activation_grad", "weight_grad"}


def test_formats_plan_scale_and_modules_are_taken(halfstep):
    _, out, _ = halfstep(
        "whatif", "regression", *SMALL, "--formats", "fp16", "--plan", "O1", "--loss-scale", 4, "--modules"
    )
    assert "plan O1" in out
    assert "bf16" not in out
    rows = [line.split() for line in out.splitlines() if " weight_grad " in line]
    assert rows[0][:3] == ["fp16", "weight_grad", "4"]
    assert [row[0] for row in rows[1:]] == ["0", "2"]


def test_products_have_rows_of_their_own(halfstep, tmp_path):
    wide = ["--set", "d_in=16", "--set", "d_out=16", "--set", "batch=4", "--steps", 1, "--products", "fp8,nvfp4"]
    code, out, err = halfstep("whatif", "regression", *wide, "--modules", "--json", tmp_path / "x.json")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["fp8"], ["nvfp4"])]
    assert [row[1:3] for row in rows[:2]] == [["output", "input"], ["output", "weight"]]
    assert rows[0][-1] == "0"
    assert "products nvfp4: 1 layer would lose much" in out
    read = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert {row["recipe"] for row in read["products"]} == {"fp8", "nvfp4"}


def test_passes_are_counted_also_those_that_come_beside(halfstep, monkeypatch):
    seen = []
    counted = nullcontext(lambda what, done, total: seen.append((done, total)))
    monkeypatch.setattr(step, "progress_bar", lambda unit, quiet: counted)
    halfstep("whatif", "regression", *SMALL[:-1], 2)
    assert seen == [(0, 3), (1, 3), (2, 3), (2, 3)]  # the last under fp16
