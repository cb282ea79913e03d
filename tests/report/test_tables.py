"""Levels and ops as tables."""

from dataclasses import replace

import pytest
from rich.console import Console

from halfstep.edits import OpChanges
from halfstep.explain.report.tables import WORDS, level_table, numbered, op_table, table
from halfstep.formats import BF16, FP16
from halfstep.plan.levels import LEVELS, level
from halfstep.plan.optable import effective


def lines(shown):
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(shown)
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in capture.get().splitlines()]


def test_levels_are_the_table_of_the_design():
    _, _, *rows = lines(level_table(LEVELS.values()))
    stored = "allow and promote rows, losses full; the rest as stored"
    assert rows == [
        ["O0", "fp32", "as written", "-", "-", "none", "as given", "as written", "the baseline"],
        [
            "O1",
            "fp32",
            "the table",
            "by the table",
            "weights are fp32",
            "none / dynamic",
            "as given",
            "fp32",
            "safe default",
        ],
        [
            "O2",
            "low",
            stored,
            "fp32",
            "split / copy",
            "none / dynamic",
            "as given",
            "fp32",
            "fastest that keeps accuracy",
        ],
        ["O3", "low", stored, "low", "none", "none / 1", "as given", "fp32", "upper bound on speed"],
    ]


def test_jupyter_shows_the_table_of_the_terminal():
    shown = level_table(LEVELS.values())._repr_mimebundle_((), ())
    assert "<pre" in shown["text/html"]
    assert " O3 " in shown["text/html"]


def ops(plan):
    header, *rows = lines(op_table(plan))
    assert header == ["op", "category", "why", "list of", f"at {plan.name}", "on cpu by", "on cuda by"]
    return {row[0]: row[1:] for row in rows}


def test_an_op_has_its_row_of_the_table_and_what_the_plan_does_to_it():
    rows = ops(level("O1", BF16))
    assert rows["linear"] == ["allow", "matrix product", "torch", "low", "torch", "torch"]
    assert rows["softmax"] == ["deny", "exponential", "torch", "fp32", "halfstep", "torch"]
    assert rows["addcmul"][3] == "widest input"
    assert rows["binary_cross_entropy"] == [
        "refuse", "infinite logarithm", "torch", "refused on low", "halfstep", "torch"
    ]  # fmt: skip


@pytest.mark.slow_but("O2", "O3")
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_every_op_that_a_level_does_not_run_as_written_is_listed_with_what_it_does(name):
    plan = level(name, FP16)
    rows = ops(plan)
    for overload, action in effective(plan).items():
        if action not in ("pass", "carry"):
            assert WORDS[action] in rows[overload.partition(".")[0]][3].split(", ")
    assert "" not in {cell for row in rows.values() for cell in row}


def test_where_weights_are_low_losses_are_full_and_gathers_sum_in_fp32():
    rows = ops(level("O2", BF16))
    assert rows["mse_loss"][3] == "fp32"
    summed = "as stored; on cpu gradients of low weights add up in fp32"
    assert [rows[op][3] for op in ("embedding", "embedding_bag", "index")] == [summed] * 3
    assert rows["embedding"] == ["-", "sums of gradients", "halfstep", summed, "halfstep", "-"]
    assert "embedding" not in ops(level("O1", BF16))


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_what_a_plan_changes_is_listed_whether_or_not_the_table_has_it(name):
    changes = OpChanges(allow=("softmax",), deny=("gelu", "torch.nn.functional:normalize"), infer=("linear",))
    rows = ops(replace(level(name, BF16), op_changes=changes))
    assert rows["gelu"] == ["deny", "changed by the plan", "plan", "fp32", "halfstep", "halfstep"]
    assert rows["torch.nn.functional:normalize"] == rows["gelu"]
    assert rows["softmax"] == ["allow", "changed by the plan", "torch", "low", "halfstep", "halfstep"]
    assert rows["linear"][:4] == ["infer", "changed by the plan", "torch", "as its inputs"]
    assert rows["log_softmax"][:2] == ["deny", "exponential"]


def test_a_change_of_an_op_that_levels_treat_shows_the_change():
    rows = ops(replace(level("O2", BF16), op_changes=OpChanges(deny=("embedding", "binary_cross_entropy"))))
    assert rows["embedding"][:4] == ["deny", "changed by the plan", "plan", "fp32"]
    assert rows["binary_cross_entropy"][:3] == ["deny", "changed by the plan", "plan"]
    assert rows["binary_cross_entropy"][3] == "fp32, from what a sigmoid was given"


def test_short_words_are_not_broken_to_make_room_but_long_names_are():
    rows = [("blocks.0.attention.proj", "grad_weight", "fastest that keeps accuracy", "1234567")] * 2
    console = Console(width=44)
    with console.capture() as capture:
        console.print(table(rows, numbered(("at", "product", "for", "n")), words=("at", "product", "for")))
    assert max(map(len, capture.get().splitlines())) == 44
    whole = capture.get().split()
    assert {"grad_weight", "fastest", "accuracy", "1234567"} <= set(whole)
    assert "blocks.0.attention.proj" not in whole
