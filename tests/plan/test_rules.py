import pytest

from halfstep.edits import FULL, LOW, Rule
from halfstep.errors import PlanError


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("head", "head", True),
        ("head", "heads", False),
        ("head", "body.head", False),
        ("head.*", "head.0", True),
        ("head.*", "head", False),
        ("*.attn", "blocks.3.attn", True),
        ("*.attn", "attn", False),
        ("blocks.?", "blocks.3", True),
        ("blocks.?", "blocks.12", False),
        ("blocks.[01]", "blocks.1", True),
        ("blocks.[01]", "blocks.2", False),
        ("Head", "head", False),
        ("", "", True),
        ("", "head", False),
    ],
)
def test_a_pattern_is_a_glob_over_the_whole_dotted_name(pattern, name, expected):
    assert Rule(pattern, FULL).matches((name,), ("Linear", "Module")) is expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("type:LayerNorm", True),
        ("type:Module", True),
        ("type:*Norm", True),
        ("type:Norm", False),
        ("type:layernorm", False),
    ],
)
def test_a_type_pattern_is_a_glob_over_the_class_and_its_bases(pattern, expected):
    assert Rule(pattern, FULL).matches(("type:x", "norm"), ("FastLayerNorm", "LayerNorm", "Module")) is expected


def test_any_name_of_a_shared_module_matches():
    assert Rule("decoder.emb", FULL).matches(("encoder.emb", "decoder.emb"), ())


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ((None, 3, b"head", ("head",)), r"rule pattern is .*; give a string"),
        ((" head", "head ", "type: LayerNorm", "type:LayerNorm "), r"rule pattern .*blanks"),
        (("type:",), "names no class"),
        (("Type:LayerNorm", "type=LayerNorm", "TYPE: LayerNorm"), "did you mean 'type:LayerNorm'"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(patterns, said):
    for pattern in patterns:
        with pytest.raises(PlanError, match=said):
            Rule(pattern, FULL)


def test_a_module_that_happens_to_be_called_type_can_be_matched():
    assert Rule("type.0", FULL).matches(("type.0",), ())


@pytest.mark.parametrize("policy", ["full", None, {"param": "full"}])
def test_a_policy_that_is_none_is_refused(policy):
    with pytest.raises(PlanError, match=r"rule 'head' has policy .*; give a Policy"):
        Rule("head", policy)


def test_an_unknown_buffer_width_is_refused():
    with pytest.raises(PlanError, match=r"rule 'head': buffers is 'ful'; allowed are 'keep', 'low', 'full'"):
        Rule("head", LOW, buffers="ful")


def test_an_unknown_input_is_refused_and_one_beside_full_computation():
    with pytest.raises(PlanError, match=r"rule 'head': input is 'full'; allowed are 'policy', 'keep', 'low'"):
        Rule("head", LOW, input="full")
    for word in ("keep", "low"):
        with pytest.raises(PlanError, match=r"computes full: its ops would get low inputs with fp32 weights"):
            Rule("head", FULL, input=word)
