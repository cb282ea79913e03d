import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from halfstep.edits import FULL, LOW, OpChange, Policy, Rule
from halfstep.errors import PlanError
from halfstep.formats import BF16, FP16, FP32
from halfstep.plan.levels import level
from halfstep.plan.resolve import Assignment, resolve

O0, O1, O2, O3 = (level(name, BF16) for name in ("O0", "O1", "O2", "O3"))


class Called(nn.Module):
    """A module that is entered by its own forward."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return x


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("angles", torch.ones(2))

    def forward(self, x):
        return x


def linear():
    return nn.Linear(2, 2)


def net(**children):
    return Called(body=Called(a=linear(), b=linear()), head=linear(), **children)


def told(plan, model):
    with pytest.raises(PlanError) as caught:
        resolve(plan, model)
    return str(caught.value)


def boundaries(plan, model):
    return [formats.name for formats in resolve(plan, model).modules if formats.boundary]


# levels


def test_at_o0_nothing_is_cast():
    for formats in resolve(O0, net(norm=OwnNorm())).modules:
        assert (formats.compute, formats.output, formats.input, formats.buffers, formats.boundary) == (None,) * 4 + (
            False,
        )
        assert formats.param in (FP32, None)


def test_at_o1_weights_stay_and_ops_run_low():
    formats = resolve(O1, net()).of("head")
    assert (formats.param, formats.compute, formats.boundary, formats.output) == (FP32, BF16, False, None)


def test_at_o1_the_model_takes_inputs_as_they_come_and_gives_fp32():
    root = resolve(O1, net()).of("")
    assert (root.boundary, root.input, root.output) == (True, None, FP32)


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("low", [BF16, FP16])
def test_with_low_weights_the_model_takes_inputs_as_they_come_and_gives_fp32(name, low):
    assignment = resolve(level(name, low), net())
    assert (assignment.of("head").param, assignment.of("head").compute) == (low, low)
    root = assignment.of("")
    assert (root.boundary, root.input, root.output, root.param) == (True, None, FP32, None)


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_the_plan_may_ask_for_low_inputs(name):
    root = resolve(replace(level(name, FP16), input="low"), net()).of("")
    assert (root.boundary, root.input, root.output) == (True, FP16, FP32)


def test_a_rule_may_ask_for_low_inputs_or_keep_them():
    assert boundaries(O2.edit(Rule("body", LOW)), net()) == [""]  # the level's own policy
    asked = resolve(O2.edit(Rule("body", LOW, input="low")), net())
    assert [formats.name for formats in asked.modules if formats.boundary] == ["", "body"]
    assert (asked.of("body").input, asked.of("").input) == (BF16, None)
    inside = O2.edit(Rule("body", FULL), Rule("body.b", LOW))
    assert resolve(inside, net()).of("body.b").input == BF16  # activations
    assert resolve(inside.edit(Rule("body.b", LOW, input="keep")), net()).of("body.b").input is None
    root = O2.edit(Rule("", LOW, input="low"))
    assert resolve(root, net()).of("").input == BF16
    assert boundaries(root, net()) == [""]


@pytest.mark.parametrize(("output", "expected"), [("full", FP32), ("low", BF16), ("keep", None)])
def test_the_plan_says_what_the_model_returns(output, expected):
    assert resolve(replace(O2, output=output), net()).of("").output == expected


@pytest.mark.parametrize("plan", [O1, O2, O3])
def test_without_rules_only_the_model_is_entered(plan):
    assert boundaries(plan, net(norm=nn.LayerNorm(2), bn=nn.BatchNorm1d(2))) == [""]


def test_modules_come_in_the_order_of_named_modules():
    model = net()
    assert [formats.name for formats in resolve(O2, model).modules] == [name for name, _ in model.named_modules()]


def test_names_are_those_of_the_model_and_of_several_models_have_their_number():
    model = Called(body=Called(a=linear()), head=linear())
    assert resolve(O2, model).names() == ("", "body", "body.a", "head")
    assert resolve(O2, [linear(), Called(a=linear())]).names() == ("0", "1", "1.a")


def test_only_fp32_parameters_are_given_a_format():
    wide, low = linear().double(), linear().bfloat16()
    assignment = resolve(O2, net(wide=wide, low=low, drop=nn.Dropout()))
    assert [assignment.of(name).param for name in ("wide", "low", "drop", "head")] == [None, None, None, BF16]


def test_the_model_is_left_as_it_is():
    model = net(norm=OwnNorm())
    before, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    resolve(O2.edit(Rule("head", FULL)), model)
    assert [type(module) for module in model.modules()] == classes
    assert all(
        torch.equal(value, before[name]) and value.dtype == before[name].dtype
        for name, value in model.state_dict().items()
    )


def test_at_o0_the_reason_says_that_nothing_is_touched():
    assert {formats.reason for formats in resolve(O0, net()).modules} == {"O0: as written"}


# norms


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2), nn.BatchNorm1d(2), nn.SyncBatchNorm(2)]
)
def test_at_o2_torchs_norms_keep_fp32_weights_and_are_not_entered(norm):
    formats = resolve(O2, net(norm=norm)).of("norm")
    assert (formats.param, formats.compute, formats.boundary, formats.reason) == (FP32, BF16, False, "norms full")


def test_at_o2_a_models_own_norm_is_computed_full_and_gives_what_it_got():
    formats = resolve(O2, net(norm=OwnNorm())).of("norm")
    assert (formats.param, formats.compute, formats.boundary) == (FP32, FP32, True)
    assert (formats.input, formats.output) == (FP32, "input")


def test_at_o3_norms_are_low_as_all_else():
    assignment = resolve(O3, net(norm=nn.LayerNorm(2), own=OwnNorm()))
    assert [(assignment.of(name).param, assignment.of(name).boundary) for name in ("norm", "own")] == [
        (BF16, False)
    ] * 2


def test_at_o3_a_batch_norm_keeps_the_fp32_weights_that_its_fp32_statistics_need():
    formats = resolve(O3, net(norm=nn.BatchNorm1d(2))).of("norm")
    assert (formats.param, formats.reason) == (FP32, "running statistics are full")


def test_at_o1_norms_are_the_op_tables():
    assignment = resolve(O1, net(norm=nn.LayerNorm(2), own=OwnNorm()))
    assert [(assignment.of(name).reason, assignment.of(name).boundary) for name in ("norm", "own")] == [
        ("O1", False)
    ] * 2


def test_a_rule_that_matches_the_norm_itself_wins_over_norms():
    assignment = resolve(
        O2.edit(Rule("type:LayerNorm", LOW), Rule("own", LOW)), net(norm=nn.LayerNorm(2), own=OwnNorm())
    )
    assert [assignment.of(name).param for name in ("norm", "own")] == [BF16, BF16]


def test_a_low_rule_on_what_holds_a_norm_leaves_the_norm_full():
    model = net(part=Called(norm=nn.LayerNorm(2), own=OwnNorm(), a=linear()))
    assignment = resolve(O2.edit(Rule("part", LOW)), model)
    assert [assignment.of(f"part.{name}").param for name in ("norm", "own", "a")] == [FP32, FP32, BF16]


def test_inside_a_module_kept_full_a_norm_is_not_entered_again():
    model = net(part=Called(own=OwnNorm()))
    assert boundaries(O2.edit(Rule("part", FULL)), model) == ["", "part"]


def test_the_weight_of_a_parametrised_norm_stays_fp32():
    norm = nn.LayerNorm(2)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    assert resolve(O2, net(norm=norm)).of("norm.parametrizations.weight").param == FP32


def test_a_weight_norm_is_computed_full_from_low_weights():
    assignment = resolve(O2, net(last=parametrizations.weight_norm(linear())))
    inner = assignment.of("last.parametrizations.weight.0")
    assert (inner.boundary, inner.input, inner.output) == (True, FP32, "input")
    assert assignment.of("last.parametrizations.weight").param == BF16


# rules


def test_a_rule_covers_what_it_matches_and_all_below():
    assignment = resolve(O2.edit(Rule("body", FULL)), net())
    assert [assignment.of(name).param for name in ("body.a", "body.b", "head")] == [FP32, FP32, BF16]
    assert [assignment.of(name).compute for name in ("body", "body.a", "head")] == [FP32, FP32, BF16]
    assert assignment.of("body.a").reason == "rule 'body'"


def test_a_kept_full_module_takes_fp32_and_gives_what_it_got():
    formats = resolve(O2.edit(Rule("body", FULL)), net()).of("body")
    assert (formats.boundary, formats.input, formats.output) == (True, FP32, "input")


def test_what_is_below_the_root_of_a_rule_is_not_entered():
    assert boundaries(O2.edit(Rule("body", FULL)), net()) == ["", "body"]


def test_the_nearest_rule_decides():
    assignment = resolve(O2.edit(Rule("body", FULL), Rule("body.b", LOW)), net())
    assert [assignment.of(name).param for name in ("body.a", "body.b")] == [FP32, BF16]
    inner = assignment.of("body.b")
    assert (inner.boundary, inner.input, inner.output) == (True, BF16, FP32)  # what calls it casts nothing


def test_the_order_of_rules_does_not_matter():
    one = resolve(O2.edit(Rule("body", FULL), Rule("body.b", LOW)), net()).modules
    assert resolve(O2.edit(Rule("body.b", LOW), Rule("body", FULL)), net()).modules == one


@pytest.mark.parametrize(("output", "expected"), [("full", FP32), ("low", BF16), ("input", "input")])
def test_a_policy_says_what_its_module_gives(output, expected):
    assert resolve(O2.edit(Rule("body", Policy("full", "low", output))), net()).of("body").output == expected


def test_fp32_weights_that_compute_low_take_inputs_as_they_come():
    formats = resolve(O2.edit(Rule("head", Policy("full", "low", "low"))), net()).of("head")
    assert (formats.param, formats.compute, formats.input, formats.boundary) == (FP32, BF16, None, True)


def test_a_rule_with_the_policy_of_the_level_needs_no_entrance():
    assert boundaries(O2.edit(Rule("head", LOW)), net()) == [""]
    assert boundaries(O2.edit(Rule("body", FULL), Rule("body.a", FULL)), net()) == ["", "body"]


def test_a_rule_that_differs_in_the_output_alone_is_entered():
    assert boundaries(O2.edit(Rule("head", Policy("low", "low", "full"))), net()) == ["", "head"]


@pytest.mark.parametrize("output", ["full", "low", "input"])
def test_at_o1_a_rule_decides_the_output_whatever_its_policy(output):
    formats = resolve(O1.edit(Rule("head", Policy("full", "low", output))), net()).of("head")
    assert formats.boundary
    assert formats.output == {"full": FP32, "low": BF16, "input": "input"}[output]


def test_at_o1_a_module_can_be_kept_full():
    formats = resolve(O1.edit(Rule("head", FULL)), net()).of("head")
    assert (formats.compute, formats.input, formats.output, formats.boundary) == (FP32, FP32, "input", True)


def test_a_rule_on_the_root_decides_all_but_what_the_model_returns():
    assignment = resolve(O2.edit(Rule("", FULL)), net())
    assert {formats.param for formats in assignment.modules} == {FP32, None}
    assert (assignment.of("").input, assignment.of("").output, assignment.of("").compute) == (FP32, FP32, FP32)


def test_a_rule_that_matches_nothing_is_refused():
    assert told(O2.edit(Rule("hed", FULL)), net()) == "rule 'hed' matches no module; did you mean 'head'?"


def test_two_rules_that_disagree_are_refused():
    assert "'head' and 'h*', which disagree" in told(O2.edit(Rule("head", FULL), Rule("h*", LOW)), net())


def test_an_op_change_that_names_no_op_is_refused():
    assert "sofmax" in told(O2.edit(OpChange("deny", "sofmax")), net())


# modules that are not called


def test_a_list_of_modules_is_entered_by_its_items():
    model = Called(blocks=nn.ModuleList([Called(a=linear()), Called(a=linear())]))
    assignment = resolve(O2.edit(Rule("blocks", FULL)), model)
    assert [formats.name for formats in assignment.modules if formats.boundary] == ["", "blocks.0", "blocks.1"]
    assert assignment.of("blocks.1").output == "input"


def test_an_item_of_a_list_under_the_policy_of_the_list_is_entered_once():
    model = Called(blocks=nn.ModuleList([Called(a=linear())]))
    assert boundaries(O2.edit(Rule("blocks", FULL), Rule("blocks.0", FULL)), model) == ["", "blocks.0"]


def test_an_item_between_two_lists_is_compared_with_what_calls_it():
    model = Called(outer=nn.ModuleList([nn.ModuleDict({"x": Called()})]))
    assert boundaries(O2.edit(Rule("outer", FULL), Rule("outer.0.x", LOW)), model) == [""]


def test_a_model_that_is_a_dict_of_models_is_entered_by_each():
    assignment = resolve(O2, nn.ModuleDict({"g": net(), "d": linear()}))
    assert [formats.name for formats in assignment.modules if formats.boundary] == ["g", "d"]
    assert (assignment.of("d").input, assignment.of("d").output) == (None, FP32)


def test_a_sequence_is_called():
    assert boundaries(O2.edit(Rule("0", FULL)), nn.Sequential(nn.Sequential(linear()))) == ["", "0"]


def test_a_compiled_submodule_is_entered_inside_the_compiler():
    model = Called(head=torch.compile(linear(), backend="eager"))
    assert boundaries(O2.edit(Rule("head", FULL)), model) == ["", "head._orig_mod"]


def test_a_compiled_model_is_read_as_the_model_inside():
    model = net()
    assert resolve(O2, torch.compile(model, backend="eager")).modules == resolve(O2, model).modules


# weights that a parent uses without calling the child


def test_a_rule_inside_attention_is_sent_to_the_attention():
    model = Called(attn=nn.MultiheadAttention(2, 1))
    message = told(O2.edit(Rule("attn.out_proj", FULL)), model)
    assert message.startswith(
        "rule 'attn.out_proj' covers 'attn.out_proj', whose weights MultiheadAttention 'attn' uses"
    )
    assert message.endswith("put the rule on 'attn'")


def test_a_rule_inside_attention_at_o1_is_refused_too():
    model = Called(attn=nn.MultiheadAttention(2, 1))
    assert "put the rule on 'attn'" in told(O1.edit(Rule("attn.out_proj", FULL)), model)


def test_a_rule_on_the_attention_covers_its_projection():
    model = Called(attn=nn.MultiheadAttention(2, 1))
    assignment = resolve(O2.edit(Rule("attn", FULL)), model)
    assert [assignment.of(name).param for name in ("attn", "attn.out_proj")] == [FP32, FP32]


def test_a_rule_on_all_linears_passes_when_attention_has_the_same():
    model = Called(attn=nn.MultiheadAttention(2, 1))
    plan = O2.edit(Rule("type:Linear", FULL), Rule("type:MultiheadAttention", FULL))
    assert boundaries(plan, model) == ["", "attn"]


# tied and shared


def tied():
    model = net(emb=nn.Embedding(2, 2))
    model.head.weight = model.emb.weight
    return model


def test_tied_weights_with_one_format_pass():
    assert resolve(O2.edit(Rule("head", FULL), Rule("emb", FULL)), tied()).of("emb").param == FP32


@pytest.mark.parametrize("pattern", ["head", "emb"])
def test_tied_weights_with_two_formats_are_refused_by_name(pattern):
    message = told(O2.edit(Rule(pattern, FULL)), tied())
    assert "'emb.weight' and 'head.weight' are one tied parameter" in message
    assert message.endswith("give both modules the same rule")


def test_tied_weights_that_are_not_cast_pass():
    model = tied().double()
    assert resolve(O2.edit(Rule("head", FULL)), model).of("emb").param is None


def test_tied_weights_with_two_ways_of_computing_pass():
    assert resolve(O1.edit(Rule("head", FULL)), tied()).of("head").compute == FP32


def test_a_shared_module_is_told_once_with_its_aliases():
    shared = linear()
    assignment = resolve(O2, Called(a=shared, b=shared))
    assert [(formats.name, formats.aliases) for formats in assignment.modules] == [("", ()), ("a", ("b",))]
    assert assignment.of("b") is assignment.of("a")


def test_a_rule_on_one_name_of_a_shared_module_covers_it():
    shared = linear()
    assert resolve(O2.edit(Rule("b", FULL)), Called(a=shared, b=shared)).of("a").param == FP32


def test_a_shared_module_below_two_policies_is_refused():
    shared = linear()
    model = Called(x=Called(inner=shared), y=Called(inner=shared))
    message = told(O2.edit(Rule("y", FULL)), model)
    assert message.startswith("Linear is shared as 'x.inner' (O2) and 'y.inner' (rule 'y')")


def test_a_shared_module_called_from_two_policies_is_entered():
    shared = linear()
    model = Called(x=Called(inner=shared), y=Called(inner=shared))
    plan = O2.edit(Rule("y", FULL), Rule("*.inner", LOW))
    assert boundaries(plan, model) == ["", "x.inner", "y"]


# buffers


def test_buffers_are_kept_unless_a_rule_says_otherwise():
    assert {formats.buffers for plan in (O1, O2, O3) for formats in resolve(plan, net(table=Table())).modules} == {None}


@pytest.mark.parametrize(("buffers", "expected"), [("keep", None), ("low", BF16), ("full", FP32)])
@pytest.mark.parametrize("pattern", ["table", "part"])
def test_a_rule_says_what_becomes_of_the_buffers_it_covers(pattern, buffers, expected):
    model = net(table=Table(), part=Called(table=Table()))
    assignment = resolve(O2.edit(Rule(pattern, LOW, buffers=buffers)), model)
    assert assignment.of("table" if pattern == "table" else "part.table").buffers == expected


@pytest.mark.parametrize(
    ("policy", "buffers"), [(LOW, "keep"), (LOW, "full"), (FULL, "low"), (Policy("full", "low", "low"), "low")]
)
def test_running_statistics_and_weights_of_two_formats_are_refused(policy, buffers):
    message = told(O2.edit(Rule("norm", policy, buffers=buffers)), net(norm=nn.BatchNorm1d(2)))
    assert message.startswith("rule 'norm' gives BatchNorm1d 'norm' ")
    assert "give param 'low' with buffers 'low', or param 'full' with 'keep'" in message


@pytest.mark.parametrize(("policy", "buffers", "expected"), [(LOW, "low", (BF16, BF16)), (FULL, "keep", (FP32, None))])
def test_running_statistics_and_weights_of_one_format_pass(policy, buffers, expected):
    formats = resolve(O2.edit(Rule("norm", policy, buffers=buffers)), net(norm=nn.BatchNorm1d(2))).of("norm")
    assert (formats.param, formats.buffers) == expected


@pytest.mark.parametrize(
    "plan", [O2.edit(Rule("part", LOW, buffers="low")), O1.edit(Rule("part", FULL, buffers="low"))]
)
def test_low_buffers_of_what_holds_a_batch_norm_leave_its_statistics_full(plan):
    assignment = resolve(plan, net(part=Called(norm=nn.BatchNorm1d(2), table=Table())))
    assert (assignment.of("part.norm").param, assignment.of("part.norm").buffers) == (FP32, None)
    assert assignment.of("part.table").buffers == BF16


def test_at_o3_low_buffers_of_what_holds_a_batch_norm_make_it_low():
    formats = resolve(O3.edit(Rule("part", LOW, buffers="low")), net(part=Called(norm=nn.BatchNorm1d(2)))).of(
        "part.norm"
    )
    assert (formats.param, formats.buffers) == (BF16, BF16)


@pytest.mark.parametrize("plan", [O1, O2, O3, O2.edit(Rule("1", LOW, buffers="low")), O1.edit(Rule("1", FULL))])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)])
def test_torchs_kernels_take_the_formats_that_a_norm_is_given(plan, norm):
    norm = copy.deepcopy(norm)
    formats = resolve(plan, nn.Sequential(nn.Conv1d(4, 4, 1), norm)).of("1")
    for parameter in norm.parameters():
        parameter.data = parameter.data.to(formats.param.dtype)
    if formats.buffers is not None:
        norm.running_mean, norm.running_var = (
            b.to(formats.buffers.dtype) for b in (norm.running_mean, norm.running_var)
        )
    assert norm(torch.randn(3, 4, 5, dtype=formats.compute.dtype)).isfinite().all()


# several models


def test_several_models_are_told_one_after_the_other():
    first, second = net(), linear()
    assignment = resolve(O2, [first, second])
    names = [(0, name) for name, _ in first.named_modules()] + [(1, "")]
    assert [(formats.model, formats.name) for formats in assignment.modules] == names
    assert (assignment.of("", model=1).type_name, assignment.of("").type_name) == ("Linear", "Called")


def test_each_of_several_models_is_entered():
    assert [formats.boundary for formats in resolve(O2, [linear(), linear()]).modules] == [True, True]


def test_a_rule_must_match_in_one_of_several_models():
    plan = O2.edit(Rule("head", FULL))
    assert resolve(plan, [linear(), net()]).of("head", model=1).param == FP32
    assert "matches no module" in told(plan, [linear(), linear()])


def test_a_part_shared_by_two_models_passes_where_they_agree():
    shared = linear()
    assert len(resolve(O2, [Called(a=shared), Called(b=shared)]).modules) == 4


def test_a_part_shared_by_two_models_is_refused_where_they_disagree():
    shared = linear()
    message = told(O2.edit(Rule("x", FULL)), [Called(x=Called(a=shared)), Called(b=shared)])
    assert message.startswith("module 'b' of model 1 is also 'x.a' of model 0, with other formats there")


def test_a_model_given_beside_its_own_part_is_refused():
    model = net()
    assert "is also 'head' of model 0" in told(O2, [model, model.head])


def test_weights_tied_across_models_are_checked():
    first, second = net(), Called(emb=nn.Embedding(2, 2))
    second.emb.weight = first.head.weight
    assert "one tied parameter" in told(O2.edit(Rule("emb", FULL)), [first, second])


# the assignment


def test_an_unknown_module_is_refused_with_the_nearest():
    with pytest.raises(PlanError, match=r"model 0 has no module 'hed'; it has 5 modules; did you mean 'head'"):
        resolve(O2, net()).of("hed")


def test_a_module_of_another_model_is_not_found():
    with pytest.raises(PlanError, match=r"model 1 has no module 'head'; it has 1 modules"):
        resolve(O2, [net(), linear()]).of("head", model=1)


def test_it_prints_as_a_table():
    printed = str(resolve(O2.edit(Rule("head", FULL)), Called(a=linear(), norm=OwnNorm(), head=linear())))
    assert printed.splitlines() == [
        "plan O2 in bf16",
        "module   type     param  compute  output  why",
        "(model)  Called   -      bf16     fp32    O2",
        "a        Linear   bf16   bf16     -       O2",
        "norm     OwnNorm  fp32   fp32     input   norms full: own class",
        "head     Linear   fp32   fp32     input   rule 'head'",
    ]


def test_several_models_print_with_their_number():
    lines = str(resolve(O1, [linear(), Called(a=linear())])).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0:(model)", "1:(model)", "1:a"]


def test_an_assignment_is_a_value():
    model = net()
    assert resolve(O2, model) == resolve(O2, model)
    assert resolve(O2, model) != resolve(O3, model)
    assert isinstance(hash(resolve(O2, model)), int)
    assert isinstance(resolve(O2, model), Assignment)


def test_a_model_on_the_meta_device_is_read_too():
    with torch.device("meta"):
        model = net()
    assert resolve(O2, model).of("head").param == BF16
