import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given

from halfstep.edits import FULL, LOW, OpChange, OpChanges, Policy, Rule, Scaling
from halfstep.errors import PlanError
from halfstep.formats import BF16, E4M3, FP16, FP32, TF32
from halfstep.plan.levels import level
from halfstep.plan.plan import CONTRADICTIONS, Plan
from tests.plan.strategies import plans

O0, O1, O2, O3 = (level(name, BF16) for name in ("O0", "O1", "O2", "O3"))


def make(**changes):
    given = {
        "name": "mine", "low": BF16, "param": "low", "ops": "table", "norms": "full", "master": "split",
        "scale": Scaling("none"),
    }  # fmt: skip
    return Plan(**{**given, **changes})


@given(plans())
def test_a_plan_survives_pickle_and_deepcopy(plan):
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert hash(copy.deepcopy(plan)) == hash(plan)


@pytest.mark.parametrize("value", [O2, OpChanges(), OpChange("deny", "exp"), Rule("head", FULL), Scaling("none")])
def test_values_are_frozen(value):
    field = fields(value)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, getattr(value, field))


@pytest.mark.parametrize("low", [FP32, TF32, E4M3])
def test_a_format_that_one_cannot_train_in_is_refused(low):
    with pytest.raises(PlanError, match=f"plan low is {low.name}, in which halfstep cannot train; use bf16 or fp16"):
        make(low=low)


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("param", "Full", "full"),
        ("ops", "tables", "table"),
        ("norms", "lo", "low"),
        ("master", "splitt", "split"),
        ("output", "keeps", "keep"),
        ("input", "lows", "low"),
        ("moments", "4bit", "8bit"),
        ("rounding", "stochastik", "stochastic"),
    ],
)
def test_an_unknown_word_is_named_with_its_field_and_the_nearest(field, value, nearest):
    with pytest.raises(PlanError, match=f"plan {field} is '{value}'; expected one of .*; did you mean '{nearest}'"):
        make(**{field: value})


@pytest.mark.parametrize("name", ["", " ", 3, None, "a\nb"])
def test_a_name_is_printable_text(name):
    with pytest.raises(PlanError, match=r"plan name is"):
        make(name=name)


@pytest.mark.parametrize(
    ("field", "value", "example"),
    [
        ("scale", "dynamic", "Scaling"),
        ("scale", None, "Scaling"),
        ("op_changes", {"deny": ["softmax"]}, "OpChanges"),
        ("op_changes", None, "OpChanges"),
        ("rules", Rule("head", FULL), "tuple of Rules"),
        ("rules", ("head",), "Rule"),
        ("rules", "head", "tuple of Rules"),
        ("full_moments", "*embed*", "tuple of patterns of parameter names"),
        ("full_moments", (3,), "string"),
    ],
)
def test_a_field_of_another_type_is_refused_with_an_example(field, value, example):
    with pytest.raises(PlanError, match=f"expected a {example}"):
        make(**{field: value})


# fields that contradict each other, and what the message says of them; the plan beside each differs in one field
CASES = [
    (O1, {"master": "copy"}, "a master keeps the fp32 value of low-precision weights"),
    (O1, {"master": "split"}, "a master keeps the fp32 value of low-precision weights"),
    (O0, {"master": "copy"}, "a master keeps the fp32 value of low-precision weights"),
    (O2, {"low": FP16}, "'split' needs bf16"),
    (O1, {"frozen": "low"}, "keeps all weights in fp32"),
    *(
        (plan, {"rounding": "stochastic"}, "bf16 weights without a master.*or use level O3 in bf16")
        for plan in (O0, O1, O2, level("O2", FP16), level("O3", FP16))
    ),
    (O0, {"products": "fp8"}, "products in 8 or 4 bits need the op table"),
    (level("O1", FP16), {"products": "fp8"}, "results in bf16, but low is fp16"),
    (level("O3", BF16), {"products": "fp8"}, "bf16 weights without masters"),
    (
        O1,
        {"rules": (Rule("head", Policy("full", "low", "low", products="low")),)},
        "products is 'plan', which has none",
    ),
    (O1, {"norms": "low"}, "the op table decides how norms compute"),
    (O2, {"ops": "none", "output": "keep"}, "weights are in low precision but ops is 'none'"),
    (O0, {"scale": Scaling("dynamic")}, "loss scale .* no gradient is in low precision"),
    (O0, {"scale": Scaling("static", init=1)}, "loss scale .* no gradient is in low precision"),
    (O0, {"rules": (Rule("head", FULL),)}, "rules say .* runs as written"),
    (O0, {"output": "full"}, "model's output stays as it is"),
    (O0, {"output": "low"}, "model's output stays as it is"),
    (O0, {"input": "low"}, "model's input stays as it is"),
    (O0, {"op_changes": OpChanges(deny=("softmax",))}, "no table is used"),
]


@pytest.mark.parametrize(("plan", "changes", "why"), CASES)
def test_fields_that_contradict_each_other_are_refused_with_the_reason(plan, changes, why):
    with pytest.raises(PlanError, match=f"plan '{plan.name}': .*{why}"):
        replace(plan, **changes)


def test_every_contradiction_of_the_table_has_a_case():
    told = []
    for plan, changes, _ in CASES:
        with pytest.raises(PlanError) as caught:
            replace(plan, **changes)
        told.append(str(caught.value))
    assert all(any(why in message for message in told) for _, why in CONTRADICTIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"low": FP16, "master": "copy"},
        {"low": FP16, "master": "none"},
        {"master": "none"},
        {"scale": Scaling("dynamic")},
        {"scale": Scaling("static", init=8)},
        {"norms": "low"},
        {"output": "low"},
        {"output": "keep"},
        {"input": "low"},
        {"moments": "8bit", "full_moments": ["*embed*"]},
        {"master": "none", "moments": "bf16", "rounding": "stochastic"},
        {"rules": (Rule("head", LOW),)},
    ],
)
def test_what_makes_sense_is_allowed(changes):
    assert isinstance(make(**changes), Plan)


def test_a_rule_that_stores_low_contradicts_fp32_weights():
    with pytest.raises(
        PlanError, match=r"rule 'head' stores parameters in low precision, .* Policy\('full', ...\) in the rule"
    ):
        replace(O1, rules=(Rule("head", LOW),))


@pytest.mark.parametrize(("second", "how"), [(FULL, "twice; remove"), (LOW, "twice, and the two disagree; remove")])
def test_a_pattern_stands_once(second, how):
    with pytest.raises(PlanError, match=f"has rule 'head' {how}"):
        make(rules=(Rule("head", FULL), Rule("head", second)))


# op changes


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"allow": ("softmax",), "deny": ("softmax",)}, "in allow and deny"),
        ({"infer": ("softmax",), "promote": ("softmax",)}, "in infer and promote"),
        ({"deny": ("softmax", "softmax")}, "twice in deny"),
    ],
)
def test_an_op_stands_in_one_list(changes, where):
    with pytest.raises(PlanError, match=f"op 'softmax' is listed {where}"):
        OpChanges(**changes)


@pytest.mark.parametrize("ops", ["softmax", None, 3])
def test_a_list_of_ops_is_no_string(ops):
    with pytest.raises(PlanError, match=r"op changes: deny is .*; expected a tuple of op names"):
        OpChanges(deny=ops)


@pytest.mark.parametrize("op", ["", 3, None, "soft max", "softmax()", ":f", "m:", "m:f:g", "a..b", "aten::softmax"])
def test_an_op_name_is_a_function_name(op):
    with pytest.raises(PlanError, match=r"in deny"):
        OpChanges(deny=(op,))


def test_an_op_change_names_an_unknown_list():
    with pytest.raises(PlanError, match=r"op change: list is 'denny'; .*; did you mean 'deny'"):
        OpChange("denny", "softmax")


@pytest.mark.parametrize("before", ["allow", "deny", "infer", "promote"])
@pytest.mark.parametrize("after", ["allow", "deny", "infer", "promote"])
def test_an_op_moves_between_any_lists(before, after):
    changes = OpChanges(**{before: ("exp", "softmax")}).moved(OpChange(after, "exp"))
    kept = {before: ("softmax",)} if before != after else {}
    assert changes == OpChanges(**{**kept, after: ("softmax", "exp") if before == after else ("exp",)})


# edits


def test_each_kind_of_edit_changes_its_field():
    plan = O2.edit(Rule("head", FULL), OpChange("deny", "softmax"), Scaling("dynamic"))
    assert plan == replace(
        O2, rules=(Rule("head", FULL),), op_changes=OpChanges(deny=("softmax",)), scale=Scaling("dynamic")
    )


def test_a_later_rule_takes_the_place_of_the_one_with_its_pattern():
    plan = O2.edit(Rule("head", FULL), Rule("tail", FULL), Rule("head", LOW))
    assert plan.rules == (Rule("tail", FULL), Rule("head", LOW))


@pytest.mark.parametrize("edit", ["head", None, FULL, OpChanges(deny=("softmax",)), O1])
def test_what_is_no_edit_is_refused(edit):
    with pytest.raises(PlanError, match=r"is not an edit; expected a Rule, an OpChange or a Scaling"):
        O2.edit(edit)


def test_a_cure_that_is_passed_whole_says_to_unpack_it():
    with pytest.raises(PlanError, match=r"edit \(Rule\('head', FULL\),\) is not an edit; .*: plan\.edit\(\*edits\)"):
        O2.edit((Rule("head", FULL),))


def test_an_edit_that_contradicts_the_plan_is_refused():
    with pytest.raises(PlanError, match=r"no gradient is in low precision"):
        O0.edit(Scaling("dynamic"))
