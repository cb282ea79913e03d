from dataclasses import replace

import numpy
import pytest
import torch

from halfstep.edits import FULL, LOW, OpChanges, Rule, Scaling
from halfstep.errors import PlanError
from halfstep.formats import BF16, E5M2, FP16, FP32
from halfstep.plan.levels import LEVELS, as_scaling, customize, level
from halfstep.plan.plan import Plan

NONE, DYNAMIC, ONE = Scaling("none"), Scaling("dynamic"), Scaling("static", init=1.0)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("O0", BF16, "full", "none", "full", "none", NONE, "keep"),
        Plan("O0", FP16, "full", "none", "full", "none", NONE, "keep"),
        Plan("O1", BF16, "full", "table", "full", "none", NONE),
        Plan("O1", FP16, "full", "table", "full", "none", DYNAMIC),
        Plan("O2", BF16, "low", "table", "full", "split", NONE),
        Plan("O2", FP16, "low", "table", "full", "copy", DYNAMIC),
        Plan("O3", BF16, "low", "table", "low", "none", NONE, rounding="stochastic"),
        Plan("O3", FP16, "low", "table", "low", "none", ONE),
    ],
    ids=lambda plan: f"{plan.name}-{plan.low}",
)
def test_a_level_is_the_row_of_the_design(plan):
    assert level(plan.name, plan.low) == plan


def test_the_table_has_four_levels_that_know_their_names_and_purpose():
    assert list(LEVELS) == ["O0", "O1", "O2", "O3"]
    assert all({plan.name for plan in row.plans.values()} == {name} and row.purpose for name, row in LEVELS.items())


@pytest.mark.parametrize("low", ["bf16", torch.bfloat16, BF16])
def test_low_is_taken_as_a_format_a_dtype_or_a_name(low):
    assert level("O1", low).low is BF16


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("00", r"did you mean 'O0' \(the letter O, not the digit 0\)"),
        ("01", r"did you mean 'O1' \(the letter O, not the digit 0\)"),
        ("02", r"did you mean 'O2' \(the letter O, not the digit 0\)"),
        ("o1", r"did you mean 'O1' \(the capital letter O and a digit\)"),
        (" O2 ", r"did you mean 'O2' \(the capital letter O and a digit\)"),
        ("own.yaml", r"a plan file ends in \.toml or \.json"),
    ],
)
def test_the_usual_misspellings_of_a_level_get_a_hint(name, hint):
    with pytest.raises(PlanError, match=f"unknown level '{name}'; expected one of O0, O1, O2, O3; {hint}"):
        level(name, BF16)


@pytest.mark.parametrize("name", ["mixed", "", "O", None, 1, ["O1"]])
def test_an_unknown_level_is_refused_with_those_that_are_known(name):
    with pytest.raises(PlanError, match=r"unknown level .*; expected one of O0, O1, O2, O3(?!;)"):
        level(name, BF16)


@pytest.mark.parametrize("low", [FP32, E5M2])
def test_a_level_in_a_format_to_compute_in_only_is_refused(low):
    with pytest.raises(PlanError, match=f"level O1 cannot train in {low}; use bf16 or fp16"):
        level("O1", low)


# customize


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(("before", "after"), [(BF16, FP16), (FP16, BF16), (BF16, BF16)])
def test_another_low_brings_the_levels_master_and_scale_for_it(name, before, after):
    assert customize(level(name, before), low=after) == level(name, after)


def test_another_low_keeps_what_the_plan_had_changed():
    plan = replace(level("O2", BF16), master="none", scale=Scaling("static", init=4))
    assert customize(plan, low="fp16") == replace(level("O2", FP16), master="none", scale=Scaling("static", init=4))


def test_another_low_of_a_plan_with_its_own_name_changes_low_alone():
    plan = replace(level("O3", FP16), name="mine")
    assert customize(plan, low="bf16") == replace(plan, low=BF16)


def test_a_keyword_wins_over_what_low_brings():
    plan = customize(level("O2", BF16), low="fp16", master="none", loss_scale=128)
    assert plan == replace(level("O2", FP16), master="none", scale=Scaling("static", init=128))


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        ("dynamic", DYNAMIC),
        ("none", NONE),
        (128, Scaling("static", init=128)),
        (0.5, Scaling("static", init=0.5)),
        (1, ONE),
        ("128.0", Scaling("static", init=128)),
        (numpy.float32(8), Scaling("static", init=8)),
        (Scaling("dynamic", init=8), Scaling("dynamic", init=8)),
    ],
)
def test_a_loss_scale_is_a_word_a_number_or_a_scaling(loss_scale, expected):
    assert as_scaling(loss_scale) == expected
    assert customize(level("O1", FP16), loss_scale=loss_scale).scale == expected


@pytest.mark.parametrize(("name", "norms"), [("O2", "low"), ("O3", "full"), ("O2", "full")])
def test_norms_change_the_levels_with_low_weights(name, norms):
    assert customize(level(name, BF16), norms=norms) == replace(level(name, BF16), norms=norms)


def test_rules_are_added_and_win_over_the_plans_with_their_pattern():
    plan = replace(level("O2", BF16), rules=(Rule("head", FULL), Rule("tail", FULL)))
    assert customize(plan, rules=[Rule("head", LOW)]).rules == (Rule("tail", FULL), Rule("head", LOW))


@pytest.mark.parametrize(
    "ops", [{"deny": ["softmax"], "allow": ("exp",)}, OpChanges(deny=("softmax",), allow=("exp",))]
)
def test_ops_are_op_changes_or_a_dict_of_lists(ops):
    assert customize(level("O1", BF16), ops=ops).op_changes == OpChanges(deny=("softmax",), allow=("exp",))


def test_ops_are_added_to_the_plans_own():
    plan = replace(level("O1", BF16), op_changes=OpChanges(deny=("softmax", "exp")))
    assert customize(plan, ops={"allow": ["softmax"]}).op_changes == OpChanges(deny=("exp",), allow=("softmax",))


REFUSED = [
    ("O2", {"low": "fp32"}, "plan low is fp32.*; for fp32 pass plan='O0'"),
    *(
        ("O1", {"loss_scale": value}, "loss_scale is .*; expected 'dynamic', 'none', a number or a Scaling")
        for value in ("dynamc", "", "static", True, [1], torch.tensor(1.0), b"1")
    ),
    *(
        ("O1", {"loss_scale": value}, "loss_scale is .*; expected a number from")
        for value in (0, -1, "0", "inf", float("nan"), 1e300)
    ),
    ("O1", {"loss_scale": "Dynamc"}, "did you mean 'dynamic'"),
    ("O0", {"loss_scale": "dynamic"}, "plan 'O0': a loss scale"),
    *(
        (name, {"norms": norms}, f"norms is '{norms}', but at {name} .*leave norms out")
        for name in ("O0", "O1")
        for norms in ("full", "low")
    ),
    ("O2", {"norms": "fp32"}, "plan norms is 'fp32'"),
    ("O1", {"master": "copy"}, "plan 'O1': a master keeps"),
    ("O0", {"moments": "4bit"}, "plan moments is '4bit'; expected one of 'full', 'bf16', '8bit'"),
    *(
        ("O2", {"rules": rules}, "rules is .*; expected a tuple of Rules")
        for rules in (Rule("head", FULL), "head", None, 3)
    ),
    ("O2", {"rules": ["head"]}, "is not an edit"),
    ("O1", {"ops": "softmax"}, "ops is 'softmax'; expected OpChanges or a dict of lists"),
    ("O1", {"ops": {"denny": ["exp"]}}, "ops has key 'denny'; expected one of allow, deny, .* mean 'deny'"),
    ("O1", {"ops": {"deny": "softmax"}}, "expected a tuple of op names"),
    ("O0", {"ops": {"deny": ["softmax"]}}, "no table is used"),
]


@pytest.mark.parametrize(("name", "keywords", "said"), REFUSED)
def test_a_keyword_that_says_nothing_here_is_refused_in_words(name, keywords, said):
    with pytest.raises(PlanError, match=said):
        customize(level(name, BF16), **keywords)
