"""What formats cost by themselves, and the commands that show it."""

import json
from statistics import median

import pytest
import torch

from docs.browser import Browser, find_browser
from halfstep.bench import compute
from halfstep.bench.compute import matrix_products, memory_by_format
from halfstep.measurements import Footprint, Rate
from halfstep.report.compute import memory_charts, memory_headline, memory_rows, products_charts, products_headline
from halfstep.workloads.cifar_resnet import CifarResNet

CPU = torch.device("cpu")
RATES = tuple(
    Rate(size, name, "native", None, rate, "GFLOP/s", None if name == "fp32" else rate / full)
    for size, full in (("64", 10.0), ("128", 20.0))
    for name, rate in (("fp32", full), ("bf16", 1.5 * full))
)


def test_the_rate_is_two_operations_for_each_multiply_add(monkeypatch):
    taken = {"fp64": [0.5], "fp32": [0.25, 0.5, 1.0], "bf16": [0.125], "fp16": [2.0]}
    monkeypatch.setattr(compute, "take_turns", lambda calls, **rest: {name: taken[name] for name in calls})
    found = {rate.format: rate for rate in matrix_products(CPU, (100,))}
    assert found["fp32"].rate == 2 * 100**3 / median(taken["fp32"]) / 1e9
    # Of so few turns it is the ratio of the medians: that of fp32 is 0.5 s.
    assert {name: rate.vs_fp32 for name, rate in found.items()} == {
        "fp64": 1.0,
        "fp32": None,
        "bf16": 4.0,
        "fp16": 0.25,
    }


def test_each_format_multiplies_in_that_format(monkeypatch):
    seen = {}

    def run(calls, **rest):
        seen.update({name: call().dtype for name, call in calls.items()})
        return {name: [1.0] for name in calls}

    monkeypatch.setattr(compute, "take_turns", run)
    matrix_products(CPU, (8,))
    assert seen == compute.DTYPES


def test_memory_is_in_proportion_to_the_width_of_the_format(monkeypatch):
    monkeypatch.setattr(compute, "WIDTH", 8)
    parameters = sum(p.numel() for p in CifarResNet(width=8).build(0).parameters())
    found = {each.format: each for each in memory_by_format(CPU)}
    width = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
    assert {name: each.matrix for name, each in found.items()} == {name: 10**6 * size for name, size in width.items()}
    assert {name: each.weights for name, each in found.items()} == {
        name: parameters * size for name, size in width.items()
    }
    # 8 images, 8 channels of 32 x 32 in and out of the first layer, at least, beside the weights
    assert all(each.forward >= each.weights + 2 * 8 * 8 * 1024 * width[name] for name, each in found.items())
    assert found["fp64"].forward >= 2 * found["fp32"].forward  # a convolution in fp64 takes a matrix of patches too


def test_the_sentences_and_charts_hold_the_figures():
    assert products_headline(RATES) == "bf16 multiplies 128 x 128 matrices 1.50 times as fast as fp32."
    slow = [rate for rate in RATES if rate.format == "fp32"]
    assert products_headline(slow) == "fp32 is the fastest format for products of 128 x 128 matrices here: 20 GFLOP/s."
    speed, ratio = products_charts(RATES)
    assert [(trace["name"], trace["x"], trace["y"]) for trace in speed.traces] == [
        ("fp32", [64, 128], [10.0, 20.0]), ("bf16", [64, 128], [15.0, 30.0]),
    ]  # fmt: skip
    assert [(trace["name"], trace["y"]) for trace in ratio.traces] == [("bf16", [1.5, 1.5])]
    found = (Footprint("fp32", 4 * 2**20, 8 * 2**20, 16 * 2**20), Footprint("bf16", 2**21, 2**22, 12 * 2**20))
    assert memory_headline(found) == "A forward pass of ResNet-18 takes 25% less memory in bf16 than in fp32."
    larger = (found[0], Footprint("bf16", 2**21, 2**22, 20 * 2**20))
    assert memory_headline(larger) == "A forward pass of ResNet-18 takes 25% more memory in bf16 than in fp32."
    assert memory_rows(found)[1][1] == ["bf16", "2.00", "4.00", "12.00", "0.75"]
    assert [trace["y"] for trace in memory_charts(found)[0].traces] == [[4, 8, 16], [2, 4, 12]]


@pytest.mark.parametrize(("name", "charts"), [("matmul", 2), ("memory", 1)])
def test_each_is_a_command_with_its_page(name, charts, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from halfstep.__main__ import app

    monkeypatch.setitem(compute.SIZES, "cpu", (8, 16))
    monkeypatch.setattr(compute, "WIDTH", 4)
    path, page = tmp_path / "x.json", tmp_path / "x.html"
    done = CliRunner().invoke(app, ["bench", name, "--json", str(path), "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert "bf16" in done.output
    assert {row["format"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} == set(compute.DTYPES)
    if find_browser() is not None:
        with Browser() as browser:
            browser.open(page)
            assert browser.errors == []
            assert browser.run("document.querySelectorAll('.chart .main-svg').length") >= charts
    refused = CliRunner().invoke(app, ["bench", name, "--steps", "3"])
    assert str(refused.exception) == f"{name} does not use --steps; leave it out"
