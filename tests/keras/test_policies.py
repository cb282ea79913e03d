"""Plans as policies of Keras: what every layer of ten models stores, computes in and returns; and what is refused."""

import runpy
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import apply_plan, backend, describe, policy_map, set_plan
from halfstep.adapters.keras.policies import layers_of
from halfstep.edits import FULL, LOW, OpChange, Policy, Rule
from halfstep.errors import PlanError
from halfstep.plan.levels import customize, level
from tests.keras.common import BACKEND, everywhere, keras, seed
from tests.keras.zoo import ZOO, convnext, recurrent, transformer, vgg

pytestmark = pytest.mark.filterwarnings("ignore")
NORMS = ("BatchNormalization", "LayerNormalization")
RULED = level("O1", "bf16").edit(Rule("head", FULL), Rule("type:*Normalization", FULL), Rule("first", FULL))
PLANS = {
    "O0": level("O0", "bf16"),
    "O1 fp16": level("O1", "fp16"),
    "O2 bf16": level("O2", "bf16"),
    "O3 bf16": level("O3", "bf16"),
    "O3 fp16, norms full": customize(level("O3", "fp16"), norms="full"),
    "rules": RULED,
}


def expected(name, path, layer):
    """What a layer computes in and stores, told from the words of the plan."""
    norm = type(layer).__name__ in NORMS
    return {
        "O0": ("float32", "float32"),
        "O1 fp16": ("float16", "float32"),
        "O2 bf16": ("bfloat16", "float32"),
        "O3 bf16": ("bfloat16", "bfloat16"),
        "O3 fp16, norms full": ("float16", "float32" if norm else "float16"),
        "rules": ("float32" if norm or path.split(".")[0] in ("head", "first") else "bfloat16", "float32"),
    }[name]


def ruled(plan, model):
    """The plan without rules that match nothing in this model, which are an error."""
    found = {path for path, _ in layers_of(model)}
    types = {type(layer).__name__ for _, layer in layers_of(model)}
    kept = [r for r in plan.rules if r.pattern in found or (r.pattern.startswith("type:") and types & set(NORMS))]
    return customize(level(plan.name, plan.low), rules=kept) if plan.rules else plan


@contextmanager
def seen_outputs(model):
    """Notes the dtypes that each layer is given and returns."""
    seen, watched = {}, [each for each in layers_of(model) if each[0]]

    def watch(path, call):
        def watching(*args, **kwargs):
            out = call(*args, **kwargs)
            seen[path] = {keras.backend.standardize_dtype(t.dtype) for t in keras.tree.flatten(out)}
            return out

        return watching

    for path, layer in watched:
        vars(layer)["call"] = watch(path, layer.call)
    yield seen
    for _, layer in watched:
        del vars(layer)["call"]


def batch(model):
    shape = (2, *model.input_shape[1:])
    return np.ones(shape, "int32" if len(shape) == 2 else "float32")


def run(model, x):
    """Calls a model, on JAX without computing, for which every operation would be compiled."""
    if BACKEND == "jax":
        import jax

        jax.eval_shape(model, x)
    else:
        model(x)


CASES = [(build, name) for build in ZOO for name in ("O1 fp16", "rules")]
CASES += [(build, name) for build in (convnext, recurrent) for name in PLANS if (build, name) not in CASES]


@everywhere("convnext-O3 fp16", "recurrent-O1 fp16", "transformer-rules", "resnet-rules")
@pytest.mark.parametrize(("build", "name"), CASES, ids=lambda given: getattr(given, "__name__", given))
def test_every_layer_stores_computes_and_returns_what_the_plan_says(build, name):
    plan = ruled(PLANS[name], build())
    seed()
    if not plan.rules:  # a rule on a block is not seen while it is built: its layers would differ from its own code
        set_plan(plan)
    model = build()
    assignment = apply_plan(model, plan)
    with seen_outputs(model) as seen:
        run(model, batch(model))
    for path, layer in layers_of(model):
        compute, stored = expected(name, path, layer)
        assert (layer.compute_dtype, layer.variable_dtype) == (compute, stored), path
        assert {v.dtype for v in layer.weights if layer.built} <= {"float32", stored}, path
        assert seen.get(path, {compute}) == {compute}, path
        assert assignment.of(path).compute.dtype == getattr(__import__("torch"), compute)
    assert len(seen) > 3


@pytest.mark.parametrize("name", ["O1 fp16", "O2 bf16"])
def test_a_model_that_was_built_before_takes_a_plan_that_stores_fp32(name):
    model = transformer()
    apply_plan(model, PLANS[name])
    assert {layer.compute_dtype for path, layer in layers_of(model)} == {expected(name, "", model)[0]}


def test_a_map_alone_gives_layers_with_weights_what_rules_of_names_and_types_say():
    rules = [Rule("head", FULL), Rule("encoder", FULL), Rule("encoder.b", LOW_OF_O1), Rule("type:LayerNorm*", FULL)]
    keras.config.set_dtype_policy(policy_map(level("O1", "bf16").edit(*rules)))
    layers = keras.layers
    x = inputs = keras.Input((4,))
    x = layers.LayerNormalization()(layers.Dense(4, name="a")(x))
    x = keras.Sequential([layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="encoder")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    got = {path: layer.compute_dtype for path, layer in layers_of(model) if layer.weights and path}
    assert {path for path, dtype in got.items() if dtype == "float32"} == {
        "layer_normalization",
        "encoder",
        "encoder.a",
        "head",
    }
    assert {path for path, dtype in got.items() if dtype == "bfloat16"} >= {"a", "encoder.b"}


LOW_OF_O1 = Policy("full", "low", "low")


def test_the_rule_nearest_to_a_layer_decides():
    layers = keras.layers
    encoder = [keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(4, name="b")]
    model = keras.Sequential([keras.Input((4,)), keras.Sequential(encoder, name="encoder")])
    apply_plan(model, level("O1", "bf16").edit(Rule("encoder", FULL), Rule("encoder.b", LOW_OF_O1)))
    got = {path: layer.compute_dtype for path, layer in layers_of(model)}
    assert got == {"": "bfloat16", "encoder": "float32", "encoder.a": "float32", "encoder.b": "bfloat16"}


def test_a_layer_with_a_dtype_of_its_own_keeps_it_unless_a_rule_names_it():
    def build():
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, name="a"), layers.Activation("softmax", dtype="float32", name="b")]
        )

    set_plan(level("O1", "bf16"))
    model = build()
    assignment = apply_plan(model, level("O1", "bf16"))
    assert (assignment.of("b").compute.name, assignment.of("b").reason) == ("fp32", "its own dtype")
    assert describe(model, level("O1", "bf16")) == assignment
    ruled = level("O1", "bf16").edit(Rule("b", LOW_OF_O1))
    assert apply_plan(model, ruled).of("b").compute.name == "bf16"


def test_what_each_layer_got_prints_in_the_words_of_halfstep():
    plan = level("O1", "bf16").edit(Rule("head", FULL))
    set_plan(plan)
    text = str(apply_plan(vgg(), plan))
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert lines["plan"] == ["O1", "in", "bf16"]
    assert lines["stem"] == ["Conv2D", "fp32", "bf16", "bf16", "O1"]
    assert lines["head"] == ["Dense", "fp32", "fp32", "fp32", "rule", "'head'"]


def test_a_model_keeps_its_policies_where_it_is_saved(tmp_path):
    plan = level("O1", "bf16").edit(Rule("head", FULL))
    set_plan(plan)
    model = vgg()
    apply_plan(model, plan)
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    dtypes = [[layer.compute_dtype for _, layer in layers_of(each)][1:] for each in (model, loaded)]
    assert dtypes[0] == dtypes[1]
    assert "bfloat16" in dtypes[0]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (level("O1", "bf16").edit(OpChange("deny", "softmax")), "Rule\\('type:Softmax', FULL\\)"),
        (level("O2", "bf16").edit(Rule("head", LOW, buffers="low")), "leave buffers and input out"),
        (customize(level("O2", "bf16"), moments="8bit"), 'use moments="full"'),
        (
            level("O1", "bf16").edit(Rule("head", Policy("full", "full", "low"))),
            "use Policy\\('full', 'full', 'input'\\)",
        ),
    ],
)
def test_what_keras_has_no_means_for_is_refused(plan, words):
    with pytest.raises(PlanError, match=words):
        policy_map(plan)


def test_a_policy_is_not_set_twice():
    set_plan(level("O1", "bf16"))
    with pytest.raises(PlanError, match=r"keras.config.set_dtype_policy\('float32'\)"):
        set_plan(level("O1", "fp16"))


def test_a_rule_that_matches_no_layer_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match="'haed' matches no module; did you mean 'head'"):
        apply_plan(vgg(), level("O1", "bf16").edit(Rule("haed", FULL)))


def test_a_model_built_in_fp32_is_refused_where_the_plan_stores_low():
    with pytest.raises(PlanError, match=r"call set_plan\(plan\) before"):
        apply_plan(vgg(), level("O3", "bf16"))


def test_a_model_without_layers_yet_and_one_that_was_trained_are_refused():
    with pytest.raises(PlanError, match=r"call model.build\(shape\)"):
        apply_plan(keras.Sequential([keras.layers.Dense(1)]), level("O1", "bf16"))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    x, y = np.ones((2, 4), "float32"), np.ones((2, 1), "float32")
    for run in ("fit", "evaluate", "predict"):
        model.compile("sgd", "mse")
        getattr(model, run)(*((x,) if run == "predict" else (x, y)), verbose=0)
        with pytest.raises(PlanError, match=rf"model\.{run}.*model\.compile"):
            apply_plan(model, level("O1", "bf16"))
    model.compile("sgd", "mse")
    apply_plan(model, level("O1", "bf16"))
    assert model.predict(x, verbose=0).dtype == "bfloat16" if BACKEND != "torch" else True


@pytest.mark.parametrize("call", [set_plan, policy_map, lambda plan: apply_plan(vgg(), plan)])
def test_what_is_no_plan_is_refused(call):
    with pytest.raises(PlanError, match=r"'O1' is not a Plan; pass one, such as level\('O1', 'fp16'\)"):
        call("O1")


def test_the_cell_of_a_recurrent_layer_goes_with_it():
    plan = level("O1", "bf16").edit(Rule("gru", FULL))
    model = recurrent()
    apply_plan(model, plan)
    got = {path: layer.compute_dtype for path, layer in layers_of(model)}
    cells = {path: dtype for path, dtype in got.items() if path.endswith("cell")}
    assert len(cells) == 3
    assert [path for path, dtype in cells.items() if dtype == "float32"] == ["gru.gru_cell"]


def test_a_backend_that_does_not_train_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(ImportError, match=r"not numpy; choose one .*\['KERAS_BACKEND'\] = 'jax'"):
        runpy.run_path(backend.__file__)
