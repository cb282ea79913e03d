"""Levels, ops and assignments as tables."""

from rich.console import Console
from torch import nn

from halfstep.formats import BF16, FP16
from halfstep.plan.levels import LEVELS, level
from halfstep.plan.optable import Row, effective
from halfstep.plan.policy import FULL
from halfstep.plan.resolve import resolve
from halfstep.plan.rules import Rule
from halfstep.report.assignment import assignment_table
from halfstep.report.levels import level_table
from halfstep.report.ops import op_table


def lines(table):
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in capture.get().splitlines()]


def test_levels_are_the_table_of_the_design():
    _, _, *rows = lines(level_table(LEVELS.values()))
    stored = "allow and promote rows; the rest as stored"
    assert rows == [
        ["O0", "fp32", "as written", "-", "-", "none", "as written", "the baseline"],
        ["O1", "fp32", "the table", "by the table", "weights are fp32", "none / dynamic", "fp32", "safe default"],
        ["O2", "low", stored, "fp32", "split / copy", "none / dynamic", "fp32", "fastest that keeps accuracy"],
        ["O3", "low", stored, "low", "none", "none / 1", "fp32", "speed of light"],
    ]


def test_an_op_says_what_the_plan_does_to_each_of_its_overloads():
    rows = [
        Row("linear", ("linear",), "allow", "matrix product", "torch"),
        Row("softmax", ("softmax.int", "_softmax"), "deny", "exponential", "torch"),
        Row("two", ("a", "b"), "promote", "mixes inputs", "halfstep"),
    ]
    actions = {"linear": "low", "softmax.int": "full", "_softmax": "full", "a": "promote"}
    table = op_table(rows, plan="O1", actions=actions, note=lambda row, device: f"{row.op}-{device}")
    assert lines(table) == [
        ["op", "category", "why", "list of", "at O1", "on cpu by", "on cuda by"],
        ["linear", "allow", "matrix product", "torch", "low", "linear-cpu", "linear-cuda"],
        ["softmax", "deny", "exponential", "torch", "fp32", "softmax-cpu", "softmax-cuda"],
        ["two", "promote", "mixes inputs", "halfstep", "widest input, as written", "two-cpu", "two-cuda"],
    ]


def test_every_action_of_every_level_has_its_words():
    row = Row("x", tuple(effective(level("O1", BF16))), "allow", "all", "torch")
    for name in ("O0", "O1", "O2", "O3"):
        op_table([row], plan=name, actions=effective(level(name, FP16)), note=lambda row, device: "")


def test_an_assignment_has_a_row_a_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU())
    assignment = resolve(level("O2", BF16).edit(Rule("0", FULL)), model)
    title, header, *rows = lines(assignment_table(assignment))
    assert title == ["plan O2 in bf16"]
    assert header == ["module", "type", "param", "compute", "output", "buffers", "why"]
    assert [row[:3] for row in rows] == [
        ["(model)", "Sequential", "-"],
        ["0", "Linear", "fp32"],
        ["1", "LayerNorm", "fp32"],
        ["2", "ReLU", "-"],
    ]
    assert rows[1][4] == "as its input"
    assert all(row[5] == "kept" for row in rows)


def test_modules_of_several_models_say_which():
    model = nn.Linear(1, 1)
    rows = lines(assignment_table(resolve(level("O1", BF16), [model, nn.Linear(1, 1)])))
    assert [row[0] for row in rows[2:]] == ["0: (model)", "1: (model)"]
