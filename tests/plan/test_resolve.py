import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from halfstep.edits import FULL, LOW, OpChange, Policy, Rule
from halfstep.errors import PlanError, SetupError
from halfstep.formats import BF16, FP16, FP32
from halfstep.plan.levels import level
from halfstep.plan.resolve import resolve

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


def tied():
    model = net(emb=nn.Embedding(2, 2))
    model.head.weight = model.emb.weight
    return model


def shared():
    part = linear()
    return Called(x=Called(inner=part), y=Called(inner=part))


def parametrised_norm():
    norm = nn.LayerNorm(2)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Identity())
    return net(norm=norm)


def norms():
    return net(norm=nn.LayerNorm(2), own=OwnNorm())


def batch_norm():
    return net(norm=nn.BatchNorm1d(2))


def attention():
    return Called(attn=nn.MultiheadAttention(2, 1))


def wide_tied():
    return tied().double()


def with_wide_and_low():
    return net(wide=linear().double(), low=linear().bfloat16(), drop=nn.Dropout())


def weight_normed():
    return net(last=parametrizations.weight_norm(linear()))


def blocks():
    return Called(blocks=nn.ModuleList([Called(a=linear()), Called(a=linear())]))


def two_models():
    return nn.ModuleDict({"g": net(), "d": linear()})


def part_of_norms():
    return net(part=Called(norm=nn.LayerNorm(2), own=OwnNorm(), a=linear()))


def part_of_buffers():
    return net(part=Called(norm=nn.BatchNorm1d(2), table=Table()))


def entered(input, output, **more):
    return {"boundary": True, "input": input, "output": output, **more}


def params(**expected):
    return {name: {"param": param} for name, param in expected.items()}


NOTHING = {"compute": None, "output": None, "input": None, "buffers": None, "boundary": False}
FULL_PART = entered(FP32, "input")
LOW_HEAD = Rule("head", Policy("full", "low", "low"))
BODY_AND_B = O2.edit(Rule("body", FULL), Rule("body.b", LOW))


# which formats a plan gives to which modules of a model
FORMATS = {
    "O0 casts nothing": (O0, lambda: net(norm=OwnNorm()), {
        "head": NOTHING | {"param": FP32, "reason": "O0: as written"}, "norm": NOTHING | {"param": FP32},
        "": NOTHING | {"param": None},
    }),
    "O1: weights stay and ops run low, inputs as they come": (O1, net, {
        "head": {"param": FP32, "compute": BF16, "boundary": False, "output": None}, "": entered(None, FP32),
    }),
    **{f"{name} {low}: low weights, inputs as they come": (level(name, low), net, {
        "head": {"param": low, "compute": low}, "": entered(None, FP32, param=None),
    }) for name in ("O2", "O3") for low in (BF16, FP16)},
    **{f"{name} with low inputs": (replace(level(name, FP16), input="low"), net, {"": entered(FP16, FP32)})
       for name in ("O1", "O2", "O3")},
    "a rule asks for low inputs": (O2.edit(Rule("body", LOW, input="low")), net, {
        "body": entered(BF16, BF16), "": {"input": None},
    }),
    "inside a full module a low one takes activations low": (BODY_AND_B, net, {
        "body.a": {"param": FP32}, "body.b": entered(BF16, FP32, param=BF16),  # what calls it casts nothing
    }),
    "unless its rule keeps them": (BODY_AND_B.edit(Rule("body.b", LOW, input="keep")), net, {
        "body.b": {"input": None},
    }),
    "a rule on the root asks for low inputs": (O2.edit(Rule("", LOW, input="low")), net, {"": {"input": BF16}}),
    **{f"the model returns {output}": (replace(O2, output=output), net, {"": {"output": expected}})
       for output, expected in (("full", FP32), ("low", BF16), ("keep", None))},
    "only fp32 parameters": (O2, with_wide_and_low, params(wide=None, low=None, drop=None, head=BF16)),
    **{f"O2: {type(norm).__name__} keeps fp32 weights": (O2, lambda norm=norm: net(norm=norm), {
        "norm": {"param": FP32, "compute": BF16, "boundary": False, "reason": "norms full"},
    }) for norm in (nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2), nn.BatchNorm1d(2), nn.SyncBatchNorm(2))},
    "O2: a norm of the model's own is computed full": (O2, norms, {
        "own": entered(FP32, "input", param=FP32, compute=FP32),
    }),
    "O3: norms are low": (O3, norms, params(norm=BF16, own=BF16)),
    "O3: statistics are fp32, and so are their weights": (O3, batch_norm, {
        "norm": {"param": FP32, "reason": "running statistics are full"},
    }),
    "O1: norms are the op table's": (O1, norms, {
        name: {"reason": "O1", "boundary": False} for name in ("norm", "own")
    }),
    "a rule on the norm itself wins": (O2.edit(Rule("type:LayerNorm", LOW), Rule("own", LOW)), norms,
                                       params(norm=BF16, own=BF16)),
    "a rule on what holds a norm does not": (O2.edit(Rule("part", LOW)), part_of_norms,
                                             params(**{"part.norm": FP32, "part.own": FP32, "part.a": BF16})),
    "a parametrised norm": (O2, parametrised_norm, {"norm.parametrizations.weight": {"param": FP32}}),
    "a weight norm is computed full from low weights": (O2, weight_normed, {
        "last.parametrizations.weight.0": FULL_PART, "last.parametrizations.weight": {"param": BF16},
    }),
    "a rule covers all below": (O2.edit(Rule("body", FULL)), net, {
        "body": FULL_PART | {"compute": FP32}, "body.b": {"param": FP32},
        "body.a": {"param": FP32, "compute": FP32, "reason": "rule 'body'"}, "head": {"param": BF16, "compute": BF16},
    }),
    **{f"a policy gives {output}": (O2.edit(Rule("body", Policy("full", "low", output))), net,
                                    {"body": {"output": expected}})
       for output, expected in (("full", FP32), ("low", BF16), ("input", "input"))},
    **{f"a policy gives {output} at O1": (O1.edit(Rule("head", Policy("full", "low", output))), net,
                                          {"head": {"output": expected, "boundary": True}})
       for output, expected in (("full", FP32), ("low", BF16), ("input", "input"))},
    "fp32 weights that compute low": (O2.edit(LOW_HEAD), net, {
        "head": {"param": FP32, "compute": BF16, "input": None, "boundary": True},
    }),
    "O1: a module kept full": (O1.edit(Rule("head", FULL)), net, {"head": FULL_PART | {"compute": FP32}}),
    "a rule on the root decides all but what it returns": (O2.edit(Rule("", FULL)), net, {
        "": {"param": None, "input": FP32, "output": FP32, "compute": FP32}, "head": {"param": FP32},
        "body.a": {"param": FP32},
    }),
    "a list of modules": (O2.edit(Rule("blocks", FULL)), blocks, {"blocks.1": {"output": "input"}}),
    "a dict of models": (O2, two_models, {"d": {"input": None, "output": FP32}}),
    "a rule on attention covers its projection": (O2.edit(Rule("attn", FULL)), attention,
                                                  params(**{"attn": FP32, "attn.out_proj": FP32})),
    "tied weights of one format": (O2.edit(Rule("head", FULL), Rule("emb", FULL)), tied, params(emb=FP32)),
    "tied weights that are not cast": (O2.edit(Rule("head", FULL)), wide_tied, params(emb=None)),
    "tied weights of two ways of computing": (O1.edit(Rule("head", FULL)), tied, {"head": {"compute": FP32}}),
    "one name of a shared module": (O2.edit(Rule("*.inner", FULL)), shared, {"y.inner": {"param": FP32}}),
    **{f"buffers of a rule, {buffers} in {pattern}": (
        O2.edit(Rule(pattern, LOW, buffers=buffers)), lambda: net(table=Table(), part=Called(table=Table())),
        {name: {"buffers": expected}},
    ) for buffers, expected in (("keep", None), ("low", BF16), ("full", FP32))
      for pattern, name in (("table", "table"), ("part", "part.table"))},
    "low statistics and weights": (O2.edit(Rule("norm", LOW, buffers="low")), batch_norm,
                                   {"norm": {"param": BF16, "buffers": BF16}}),
    "full statistics and weights": (O2.edit(Rule("norm", FULL, buffers="keep")), batch_norm,
                                    {"norm": {"param": FP32, "buffers": None}}),
    **{f"{plan.name}: low buffers of what holds a batch norm": (plan, part_of_buffers, {
        "part.norm": {"param": FP32, "buffers": None}, "part.table": {"buffers": BF16},
    }) for plan in (O2.edit(Rule("part", LOW, buffers="low")), O1.edit(Rule("part", FULL, buffers="low")))},
    "O3: low buffers of what holds a batch norm": (O3.edit(Rule("part", LOW, buffers="low")), part_of_buffers,
                                                   {"part.norm": {"param": BF16, "buffers": BF16}}),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "model", "expected"), FORMATS.values(), ids=FORMATS)
def test_a_plan_gives_formats(plan, model, expected):
    assignment = resolve(plan, model())
    for module, fields in expected.items():
        assert {field: getattr(assignment.of(module), field) for field in fields} == fields


@pytest.mark.parametrize("plan", [O1, O2, O3])
def test_buffers_are_kept_unless_a_rule_says_otherwise(plan):
    assert {formats.buffers for formats in resolve(plan, net(table=Table())).modules} == {None}


# modules that are entered by their own forward, with casts
ENTERED = {
    **{f"{plan.name} without rules": (plan, lambda: net(norm=nn.LayerNorm(2), bn=nn.BatchNorm1d(2)), [""])
       for plan in (O1, O2, O3)},
    "rule with the level's own policy": (O2.edit(Rule("body", LOW)), net, [""]),
    "rule with the policy around it": (O2.edit(Rule("body", FULL), Rule("body.a", FULL)), net, ["", "body"]),
    "rule that asks for low inputs": (O2.edit(Rule("body", LOW, input="low")), net, ["", "body"]),
    "rule on the root": (O2.edit(Rule("", LOW, input="low")), net, [""]),
    "rule that differs in its output alone": (O2.edit(Rule("head", Policy("low", "low", "full"))), net, ["", "head"]),
    "what is below the root of a rule": (O2.edit(Rule("body", FULL)), net, ["", "body"]),
    "norm inside a module kept full": (O2.edit(Rule("part", FULL)), part_of_norms, ["", "part"]),
    "list by its items": (O2.edit(Rule("blocks", FULL)), blocks, ["", "blocks.0", "blocks.1"]),
    "item under the policy of its list": (O2.edit(Rule("blocks", FULL), Rule("blocks.0", FULL)), blocks,
                                          ["", "blocks.0", "blocks.1"]),
    "item between two lists": (O2.edit(Rule("outer", FULL), Rule("outer.0.x", LOW)),
                               lambda: Called(outer=nn.ModuleList([nn.ModuleDict({"x": Called()})])), [""]),
    "norms at O3": (O3, norms, [""]),
    "dict of models": (O2, two_models, ["g", "d"]),
    "sequence": (O2.edit(Rule("0", FULL)), lambda: nn.Sequential(nn.Sequential(linear())), ["", "0"]),
    "compiled submodule": (O2.edit(Rule("head", FULL)), lambda: Called(head=torch.compile(linear(), backend="eager")),
                           ["", "head._orig_mod"]),
    "all linears, and attention": (O2.edit(Rule("type:Linear", FULL), Rule("type:MultiheadAttention", FULL)), attention,
                                   ["", "attn"]),
    "shared module called from two policies": (O2.edit(Rule("y", FULL), Rule("*.inner", LOW)), shared,
                                               ["", "x.inner", "y"]),
    "each of several models": (O2, lambda: [linear(), linear()], ["", ""]),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "model", "expected"), ENTERED.values(), ids=ENTERED)
def test_modules_are_entered(plan, model, expected):
    assert [formats.name for formats in resolve(plan, model()).modules if formats.boundary] == expected


def tied_across():
    first, second = net(), Called(emb=nn.Embedding(2, 2))
    second.emb.weight = first.head.weight
    return [first, second]


def shared_by_two():
    part = linear()
    return [Called(x=Called(a=part)), Called(b=part)]


def beside_its_part():
    model = net()
    return [model, model.head]


ATTENTION = "rule 'attn.out_proj' covers 'attn.out_proj', but MultiheadAttention 'attn' never calls that module"
TIED = "'emb.weight' and 'head.weight' are one tied parameter"
STATISTICS = "use param 'low' with buffers 'low', or param 'full' with buffers 'keep'"
REFUSED = {
    "matches nothing": (O2.edit(Rule("hed", FULL)), net, ["rule 'hed' matches no module; did you mean 'head'?"]),
    "rules disagree": (O2.edit(Rule("head", FULL), Rule("h*", LOW)), net, ["'head' and 'h*', which disagree"]),
    "names no op": (O2.edit(OpChange("deny", "sofmax")), net, ["sofmax"]),
    "inside attention": (O2.edit(Rule("attn.out_proj", FULL)), attention, [ATTENTION, "put the rule on 'attn'"]),
    "inside attention at O1": (O1.edit(Rule("attn.out_proj", FULL)), attention, ["put the rule on 'attn'"]),
    "tied head": (O2.edit(Rule("head", FULL)), tied, [TIED, "give both modules the same rule"]),
    "tied embedding": (O2.edit(Rule("emb", FULL)), tied, [TIED, "give both modules the same rule"]),
    "shared below two policies": (O2.edit(Rule("y", FULL)), shared,
                                  ["Linear is shared as 'x.inner' (O2) and 'y.inner' (rule 'y')"]),
    **{f"statistics and weights of two formats, {policy.param} {policy.compute} {buffers}": (
        O2.edit(Rule("norm", policy, buffers=buffers)), batch_norm,
        ["rule 'norm' gives BatchNorm1d 'norm' ", STATISTICS],
    ) for policy, buffers in ((LOW, "keep"), (LOW, "full"), (FULL, "low"), (Policy("full", "low", "low"), "low"))},
    "matches in none of several": (O2.edit(Rule("head", FULL)), lambda: [linear(), linear()], ["matches no module"]),
    "part of two models": (O2.edit(Rule("x", FULL)), shared_by_two,
                           ["'b' of model 1 and 'x.a' of model 0 are the same module, but get different formats"]),
    "model beside its part": (O2, beside_its_part, ["and 'head' of model 0 are the same module"]),
    "tied across models": (O2.edit(Rule("emb", FULL)), tied_across, ["one tied parameter"]),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "model", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_words(plan, model, words):
    with pytest.raises(PlanError) as caught:
        resolve(plan, model())
    assert [each for each in words if each not in str(caught.value)] == []


def test_plan_and_model_in_the_wrong_order_are_refused_in_words():
    with pytest.raises(PlanError, match=r"plan is Linear\(.*expected a Plan, such as halfstep\.level"):
        resolve(linear(), O2)
    with pytest.raises(SetupError, match="model is of type str; expected a torch Module, or a list of them"):
        resolve(O2, ["head"])


def test_modules_come_in_the_order_of_named_modules():
    model = net()
    assert [formats.name for formats in resolve(O2, model).modules] == [name for name, _ in model.named_modules()]


def test_names_are_those_of_the_model_and_of_several_models_have_their_number():
    model = Called(body=Called(a=linear()), head=linear())
    assert resolve(O2, model).names() == ("", "body", "body.a", "head")
    assert resolve(O2, [linear(), Called(a=linear())]).names() == ("0", "1", "1.a")


def test_the_order_of_rules_does_not_matter():
    one = resolve(O2.edit(Rule("body", FULL), Rule("body.b", LOW)), net()).modules
    assert resolve(O2.edit(Rule("body.b", LOW), Rule("body", FULL)), net()).modules == one


def test_a_compiled_model_is_read_as_the_model_inside():
    model = net()
    assert resolve(O2, torch.compile(model, backend="eager")).modules == resolve(O2, model).modules


def test_a_shared_module_is_told_once_with_its_aliases():
    shared = linear()
    assignment = resolve(O2, Called(a=shared, b=shared))
    assert [(formats.name, formats.aliases) for formats in assignment.modules] == [("", ()), ("a", ("b",))]
    assert assignment.of("b") is assignment.of("a")


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


def test_several_models_are_told_one_after_the_other():
    first, second = net(), linear()
    assignment = resolve(O2, [first, second])
    names = [(0, name) for name, _ in first.named_modules()] + [(1, "")]
    assert [(formats.model, formats.name) for formats in assignment.modules] == names
    assert (assignment.of("", model=1).type_name, assignment.of("").type_name) == ("Linear", "Called")


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


def test_a_model_on_the_meta_device_is_read_too():
    with torch.device("meta"):
        model = net()
    assert resolve(O2, model).of("head").param == BF16
