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


def test_a_module_that_happens_to_be_called_type_can_be_matched():
    assert Rule("type.0", FULL).matches(("type.0",), ())


REFUSED = [
    *((pattern, FULL, {}, "rule pattern is .*; expected a string") for pattern in (None, 3, b"head", ("head",))),
    *(
        (pattern, FULL, {}, "rule pattern .* a space")
        for pattern in (" head", "head ", "type: Norm", "type:LayerNorm ")
    ),
    ("type:", FULL, {}, "names no class"),
    (dict, FULL, {}, "rule pattern is the class dict; write 'type:dict'"),
    *(
        (pattern, FULL, {}, "did you mean 'type:LayerNorm'")
        for pattern in ("Type:LayerNorm", "type=LayerNorm", "TYPE: LayerNorm")
    ),
    *(("head", policy, {}, "rule 'head' .*; expected a Policy") for policy in ("full", None, {"param": "full"})),
    ("head", LOW, {"buffers": "ful"}, "rule 'head': buffers is 'ful'; expected one of 'keep', 'low', 'full'"),
    ("head", LOW, {"input": "full"}, "rule 'head': input is 'full'; expected one of 'policy', 'keep', 'low'"),
    *(
        ("head", FULL, {"input": word}, "computes full but has input .*: its ops would mix low-precision inputs")
        for word in ("keep", "low")
    ),
]


@pytest.mark.parametrize(("pattern", "policy", "fields", "said"), REFUSED)
def test_what_is_no_rule_is_refused_in_words(pattern, policy, fields, said):
    with pytest.raises(PlanError, match=said):
        Rule(pattern, policy, **fields)
