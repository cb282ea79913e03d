import json
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.edits import FULL, LOW, OpChanges, Policy, Rule, Scaling
from halfstep.errors import PlanError
from halfstep.formats import BF16, FP16
from halfstep.plan.io import from_dict, load_plan, save_plan, to_dict
from halfstep.plan.levels import LEVELS, level
from halfstep.plan.plan import Plan
from tests.plan.strategies import plans


def told(entries, **kwargs):
    with pytest.raises(PlanError) as caught:
        from_dict(entries, **kwargs)
    return str(caught.value)


def told_of(path):
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    return str(caught.value)


def plain(value):
    """Whether a value is made of what every file format has."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    return all(map(plain, value)) if isinstance(value, list) else type(value) in (str, int, float)


# there and back


@given(plans())
def test_a_dict_of_plain_values_gives_the_plan_back(plan):
    assert plain(to_dict(plan))
    assert from_dict(to_dict(plan)) == plan


@settings(max_examples=50)
@given(plan=plans(), suffix=st.sampled_from([".toml", ".json", ".TOML"]))
def test_a_file_gives_the_plan_back(plan, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / f"plan{suffix}"
    save_plan(plan, path)
    assert load_plan(path) == plan


@pytest.mark.parametrize("name", list(LEVELS))
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_level_comes_back_by_its_name_alone(name, low):
    assert from_dict({"schema": 1, "base": name, "low": low}) == level(name, low)


def test_every_field_of_a_plan_is_in_its_dict():
    entries = to_dict(level("O2", BF16))
    assert set(entries) == {"schema"} | {field.name for field in fields(Plan)}
    assert set(entries["scale"]) == {field.name for field in fields(Scaling)}
    assert set(entries["op_changes"]) == {field.name for field in fields(OpChanges)}


def test_a_rule_is_written_with_all_its_fields():
    plan = level("O2", BF16).edit(
        Rule("a", FULL), Rule("b", LOW, buffers="low", input="low"), Rule("c", Policy("full", "low", "input"))
    )
    assert to_dict(plan)["rules"] == [
        {"pattern": "a", "policy": "full", "buffers": "keep", "input": "policy"},
        {"pattern": "b", "policy": "low", "buffers": "low", "input": "low"},
        {
            "pattern": "c",
            "policy": {"param": "full", "compute": "low", "output": "input"},
            "buffers": "keep",
            "input": "policy",
        },
    ]


# what a user writes

WRITTEN = """
schema = 1
base = "O2"
low = "fp16"
norms = "low"

[scale]
growth_interval = 500

[op_changes]
deny = ["softmax", "my_ops:swish"]

[[rules]]
pattern = "head"
policy = "full"

[[rules]]
pattern = "type:Embedding"
policy = { param = "full", compute = "low", output = "low" }
buffers = "low"
"""


def test_a_short_file_is_the_level_with_what_it_names(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(WRITTEN)
    assert load_plan(path) == replace(
        level("O2", FP16),
        norms="low",
        scale=Scaling("dynamic", growth_interval=500),
        op_changes=OpChanges(deny=("softmax", "my_ops:swish")),
        rules=(Rule("head", FULL), Rule("type:Embedding", Policy("full", "low", "low"), buffers="low")),
    )


def test_a_scale_of_another_kind_starts_from_that_kinds_defaults():
    given = {"schema": 1, "base": "O3", "low": "fp16", "scale": {"kind": "dynamic", "max": 65536.0}}
    assert from_dict(given).scale == Scaling("dynamic", max=65536.0)


def test_whole_numbers_are_taken_for_real_ones():
    given = {"schema": 1, "base": "O1", "low": "fp16", "scale": {"init": 128}}
    assert from_dict(given).scale == Scaling("dynamic", init=128.0)


def test_without_a_base_every_field_is_asked_for():
    assert told({"schema": 1, "low": "bf16"}) == (
        "at the top level: the plan lacks name, param, ops, norms, master, scale; add them, or add base = "
        "one of O0, O1, O2, O3 for the fields that are missing"
    )


@pytest.mark.parametrize("field", ["name", "param", "ops", "norms", "master", "scale"])
def test_without_a_base_a_missing_field_is_named(field):
    entries = to_dict(level("O2", BF16))
    del entries[field]
    assert told(entries).startswith(f"at the top level: the plan lacks {field}; add it")


# low


def test_a_plan_without_low_asks_for_it():
    assert told({"schema": 1, "base": "O2"}).startswith("at `$.low`: the plan names no low-precision format; add low")


@pytest.mark.parametrize("low", ["fp16", FP16, torch.float16])
def test_a_plan_without_low_takes_the_one_that_is_given(low, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('schema = 1\nbase = "O2"\n')
    assert load_plan(path, low=low) == level("O2", FP16)


def test_low_in_the_file_wins():
    assert from_dict({"schema": 1, "base": "O2", "low": "bf16"}, low="fp16") == level("O2", BF16)


# schema


@pytest.mark.parametrize("schema", [0, 3, "1", 1.0, True])
def test_another_schema_is_refused_with_what_to_do(schema):
    message = told({"schema": schema, "base": "O2", "low": "bf16"})
    assert message.startswith(
        f"at `$.schema`: the plan has schema {schema!r}, but this halfstep reads schemas up to 2; update halfstep"
    )


def test_another_schema_is_told_before_its_unknown_keys():
    assert "`$.schema`" in told({"schema": 3, "levels": ["O7"]})


def test_a_missing_schema_is_asked_for():
    assert told({"base": "O2"}) == "at `$.schema`: the plan has no schema version; add schema = 2"


@pytest.mark.parametrize("entries", [[], "O2", None, 3])
def test_what_is_no_table_is_refused(entries):
    assert told(entries).startswith("at the top level: expected a table of fields, got ")


# errors with their path

BASE = {"schema": 1, "base": "O2", "low": "fp16"}
RULE = {"pattern": "head", "policy": "full"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scal": {}}, "at the top level: unknown key 'scal'; expected one of schema, base, *; did you mean 'scale'?"),
        ({"level": "O2"}, "at the top level: unknown key 'level'; expected one of *; did you mean 'base'?"),
        ({"scale": {"inti": 1}}, "at `$.scale`: unknown key 'inti'; expected one of kind, *; did you mean 'init'?"),
        ({"op_changes": {"denny": []}}, "at `$.op_changes`: unknown key 'denny'; *; did you mean 'deny'?"),
        (
            {"rules": [RULE, {**RULE, "buffer": "low"}]},
            "at `$.rules[1]`: unknown key 'buffer'; *; did you mean 'buffers'?",
        ),
        (
            {"rules": [{"pattern": "a", "policy": {"params": "low", "compute": "low", "output": "low"}}]},
            "at `$.rules[0].policy`: unknown key 'params'; expected one of param, compute, *; did you mean 'param'?",
        ),
        ({"a - at b": {}}, "at the top level: unknown key 'a - at b'; *"),
        ({3: 4}, "at the top level: a key is not text; *"),
        ({"scale": {3: 4}}, "at `$.scale`: a key is not text; *"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest(changes, message):
    start, _, end = message.partition("*")
    found = told({**BASE, **changes})
    assert found.startswith(start)
    assert found.endswith(end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": {"init": "big"}}, "at `$.scale`: scale init is 'big' of type str; expected a number"),
        ({"scale": {"init": True}}, "at `$.scale`: scale init is True of type bool; expected a number"),
        ({"scale": {"growth_interval": 2.5}}, "at `$.scale`: scale growth_interval is 2.5; expected a whole number"),
        ({"scale": "dynamic"}, "at `$.scale`: expected a table of fields, got str: 'dynamic'"),
        ({"op_changes": {"deny": "softmax"}}, "at `$.op_changes.deny`: expected a list, got str: 'softmax'"),
        ({"op_changes": {"deny": ["exp", 3]}}, "at `$.op_changes`: an op in deny is 3 of type int; expected a string"),
        ({"rules": RULE}, "at `$.rules`: expected a list, got dict: "),
        (
            {"rules": [RULE, {**RULE, "pattern": 3}]},
            "at `$.rules[1]`: rule pattern is 3 of type int; expected a string",
        ),
        ({"rules": [{**RULE, "policy": 3}]}, "at `$.rules[0].policy`: expected a table of fields, got int: 3"),
        ({"name": ["O2"]}, "at the top level: plan name is ['O2'] of type list; expected a string"),
        ({"base": 2}, "at `$.base`: unknown level 2; expected one of O0, O1, O2, O3"),
    ],
)
def test_a_wrong_type_is_named_with_its_path(changes, message):
    assert told({**BASE, **changes}).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param": "half"}, "at the top level: plan param is 'half'; expected one of 'full', 'low'"),
        (
            {"master": "splitt"},
            "at the top level: plan master is 'splitt'; expected one of 'none', 'copy', 'split'; did you mean 'split'?",
        ),
        ({"low": "fp61"}, "at the top level: plan low is 'fp61'; expected one of 'bf16', 'fp16'; did you mean 'fp16'?"),
        (
            {"scale": {"kind": "static2"}},
            "at `$.scale`: scale kind is 'static2'; expected one of 'none', 'static', 'dynamic'; did ",
        ),
        (
            {"rules": [{**RULE, "policy": "ful"}]},
            "at `$.rules[0].policy`: policy is 'ful'; expected one of 'full', 'low'; did",
        ),
        (
            {"rules": [{**RULE, "buffers": "x"}]},
            "at `$.rules[0]`: rule 'head': buffers is 'x'; expected one of 'keep',",
        ),
        (
            {"rules": [{**RULE, "policy": {"param": "low", "compute": "low", "output": "same"}}]},
            "at `$.rules[0].policy`: policy output is 'same'; expected one of 'full', 'low', 'input'",
        ),
    ],
)
def test_an_unknown_word_is_named_with_its_path_and_what_is_allowed(changes, message):
    assert told({**BASE, **changes}).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "02"}, "at `$.base`: unknown level '02'; expected one of O0, O1, O2, O3; did you mean 'O2'"),
        ({"scale": {"init": -1.0}}, "at `$.scale`: scale init is -1; expected a number from"),
        ({"scale": {"init": float("nan")}}, "at `$.scale`: scale init is nan"),
        ({"scale": {"min": 2.0**17}}, "at `$.scale`: scale init 65536 is outside"),
        (
            {"scale": {"kind": "static", "growth": 3.0}},
            "at `$.scale`: scale growth is 3.0, but a scale of kind 'static'",
        ),
        ({"op_changes": {"deny": ["sofmax"]}}, "at `$.op_changes`: "),
        (
            {"op_changes": {"deny": ["exp"], "allow": ["exp"]}},
            "at `$.op_changes`: op 'exp' is listed in allow and deny",
        ),
        ({"rules": [RULE, {**RULE, "pattern": "type:"}]}, "at `$.rules[1]`: rule pattern 'type:' names no class"),
        (
            {"rules": [{**RULE, "policy": {"param": "low", "compute": "full", "output": "low"}}]},
            "at `$.rules[0].policy`: policy has param 'low' and compute 'full'",
        ),
        ({"rules": [RULE, RULE]}, "at the top level: plan 'O2' has rule 'head' twice"),
        ({"master": "split"}, "at the top level: plan 'O2': master 'split' needs bf16"),
        ({"name": ""}, "at the top level: plan name is ''"),
    ],
)
def test_a_value_out_of_place_is_named_with_its_path(changes, message):
    assert told({**BASE, **changes}).startswith(message)


def test_a_scale_without_a_kind_needs_a_base():
    entries = {**to_dict(level("O1", FP16)), "scale": {"init": 8.0}}
    assert told(entries).startswith("at `$.scale`: the table lacks the field `kind`")


@pytest.mark.parametrize("field", ["pattern", "policy"])
def test_a_rule_lacks_nothing(field):
    entries = {**BASE, "rules": [{key: value for key, value in RULE.items() if key != field}]}
    assert told(entries) == f"at `$.rules[0]`: the table lacks the field `{field}`"


# files


@pytest.mark.parametrize("name", ["plan.toml", "plan.json"])
def test_an_error_names_the_file(tmp_path, name):
    path = tmp_path / name
    save_plan(level("O2", BF16), path)
    path.write_text(path.read_text().replace("split", "splitt"))
    assert told_of(path) == (
        f"plan file {str(path)!r} at the top level: plan master is 'splitt'; expected one of 'none', 'copy', "
        "'split'; did you mean 'split'?; "
        "more: docs/plans.md"
    )


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "plan.toml"
    assert told_of(path) == f"plan file {str(path)!r} cannot be read: No such file or directory; check the path"


@pytest.mark.parametrize("name", ["plan", "plan.yaml", "plan.toml.bak"])
def test_another_suffix_is_refused_on_both_ways(tmp_path, name):
    path = tmp_path / name
    path.write_text(WRITTEN)
    assert told_of(path).endswith("expected .toml or .json")
    with pytest.raises(PlanError, match=r"expected \.toml or \.json"):
        save_plan(level("O2", BF16), path)
    assert path.read_text() == WRITTEN


def test_a_json_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(level("O2", BF16).edit(Rule("head", FULL)), path)
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "is not valid JSON" in told_of(path)


@pytest.mark.parametrize(("name", "head", "tail"), [("plan.toml", "a=", ""), ("plan.json", '{"schema":', "}")])
def test_a_file_of_brackets_in_brackets_is_refused(tmp_path, name, head, tail):
    path = tmp_path / name
    path.write_text(head + "[" * 100_000 + "]" * 100_000 + tail)
    assert "is not valid" in told_of(path)


def test_a_toml_file_cut_within_a_line_is_refused(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('schema = 1\nbase = "O2"\nlow = "bf')
    assert "is not valid TOML" in told_of(path)
    assert told_of(path).endswith("was it cut short?")


@pytest.mark.parametrize("name", ["plan.toml", "plan.json"])
def test_a_file_that_is_no_text_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not valid" in told_of(path)


def test_saving_replaces_an_earlier_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "plan.toml"
    save_plan(level("O1", BF16), path)
    save_plan(level("O2", BF16), path)
    assert load_plan(path) == level("O2", BF16)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.parametrize("use", [load_plan, lambda path: save_plan(level("O1", BF16), path)])
@pytest.mark.parametrize("path", [3, None, level("O1", BF16)])
def test_what_is_no_path_is_refused_on_both_ways(use, path):
    with pytest.raises(PlanError, match=rf"plan file is .* of type {type(path).__name__}; expected a path"):
        use(path)


def test_what_is_no_plan_is_not_saved(tmp_path):
    with pytest.raises(PlanError, match=r"plan is 'O2' of type str; expected a Plan, such as halfstep\.level"):
        save_plan("O2", tmp_path / "plan.toml")
    assert not list(tmp_path.iterdir())


def test_saving_over_a_folder_leaves_nothing_behind(tmp_path):
    (tmp_path / "plan.toml").mkdir()
    with pytest.raises(PlanError, match=r"cannot be written"):
        save_plan(level("O1", BF16), tmp_path / "plan.toml")
    assert [each.name for each in tmp_path.iterdir()] == ["plan.toml"]


def test_json_is_written_for_people(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(level("O1", BF16), path)
    assert json.loads(path.read_text()) == to_dict(level("O1", BF16))
    assert path.read_text().count("\n") > 10
