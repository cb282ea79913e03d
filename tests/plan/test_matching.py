import pytest
import torch
from torch import nn

from halfstep.edits import FULL, LOW, Rule
from halfstep.errors import PlanError
from halfstep.plan.matching import find_sites, match_rules, uncompiled


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)
        self.register_buffer("mask", torch.ones(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 2)


def matched(model, *rules):
    return {site.name: rule.pattern for site, rule in match_rules(rules, find_sites(model, 0)).items()}


def message(model, *rules):
    with pytest.raises(PlanError) as caught:
        matched(model, *rules)
    return str(caught.value)


def test_sites_come_in_the_order_of_named_modules():
    model = Net()
    assert [(site.name, site.module) for site in find_sites(model, 0)] == list(model.named_modules())


def test_a_shared_module_is_one_site_with_all_its_paths():
    shared = Block()
    sites = find_sites(nn.ModuleDict({"a": shared, "b": shared}), 0)
    assert [site.paths for site in sites] == [("",), ("a", "b"), ("a.attn", "b.attn"), ("a.norm", "b.norm")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", ""), ("a.b", "a.b"), ("_orig_mod", ""), ("a._orig_mod.b", "a.b"), ("a._checkpoint_wrapped_module.b", "a.b")],
)
def test_what_wrappers_add_to_a_path_is_left_out(path, expected):
    assert uncompiled(path) == expected


def test_a_rule_matches_by_name_or_type():
    assert matched(Net(), Rule("head", FULL), Rule("type:LayerNorm", LOW)) == {
        "head": "head",
        "blocks.0.norm": "type:LayerNorm",
        "blocks.1.norm": "type:LayerNorm",
    }


def test_two_rules_that_disagree_are_both_named_with_the_module():
    told = message(Net(), Rule("head", FULL), Rule("type:Linear", LOW))
    assert told.startswith("module 'head' matches rules 'head' and 'type:Linear', which disagree; narrow")


def test_two_rules_that_disagree_on_buffers_disagree():
    assert "disagree" in message(Net(), Rule("head", FULL), Rule("h*", FULL, buffers="low"))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("hed", "; did you mean 'head'?"),
        ("attn", "; did you mean '*.attn'?"),
        ("type:LayerNrm", "; did you mean 'type:LayerNorm'?"),
        ("LayerNorm", "; did you mean 'type:LayerNorm'?"),
        ("head.weight", "; it is a tensor of module 'head': put the rule on the module"),
        ("blocks.1.mask", "; it is a tensor of module 'blocks.1': put the rule on the module"),
        ("zzz", "; the model has the modules 'blocks', 'blocks.0', 'blocks.0.attn', "),
        ("type:Zzz", "; the model has the classes 'Net', 'Module', 'ModuleList', 'Block', 'Linear', 'LayerNorm'"),
    ],
)
def test_a_rule_that_matches_nothing_is_told_what_it_may_mean(pattern, told):
    assert message(Net(), Rule("head", FULL), Rule(pattern, FULL)).startswith(
        f"rule {pattern!r} matches no module{told}"
    )


def test_a_model_without_submodules_has_none_to_name():
    said = "rule 'head' matches no module; the model has no submodules: use '' for the model itself"
    assert message(nn.Linear(2, 2), Rule("head", FULL)) == said
