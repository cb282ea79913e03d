"""Plans on models that have policies already: a second plan, another global policy, one name for several layers."""

import gc
import logging

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LossScaleOptimizer, apply_plan, find_broken, set_plan
from halfstep.adapters.keras.policies import layers_of
from halfstep.edits import FULL, Rule
from halfstep.errors import PlanError
from halfstep.plan.levels import level
from tests.keras.common import keras, numbers
from tests.keras.zoo import vgg

pytestmark = pytest.mark.filterwarnings("ignore")
O1, O1_FP16 = level("O1", "bf16"), level("O1", "fp16")


def mlp(**settings):
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="a", **settings), layers.Dense(2, dtype="mixed_bfloat16", name="b")]
    )


def dtypes(model):
    return {path: layer.compute_dtype for path, layer in layers_of(model)}


def test_a_second_plan_replaces_the_first_and_not_what_the_user_gave():
    model = mlp()
    apply_plan(model, level("O1", "bf16").edit(Rule("b", FULL)))
    assert dtypes(model) == {"": "bfloat16", "a": "bfloat16", "b": "float32"}
    assignment = apply_plan(model, O1_FP16)
    assert dtypes(model) == {"": "float16", "a": "float16", "b": "bfloat16"}
    assert (assignment.of("a").reason, assignment.of("b").reason) == ("O1", "its own dtype")
    apply_plan(model, level("O0", "fp16"))
    assert dtypes(model) == {"": "float32", "a": "float32", "b": "bfloat16"}
    model.layers[0].dtype_policy = "mixed_float16"  # by hand, after plans
    assert apply_plan(model, O1).of("a").reason == "its own dtype"


def test_a_second_plan_replaces_one_that_was_set():
    first = O1.edit(Rule("head", FULL))
    set_plan(first)
    model = vgg()
    apply_plan(model, first)
    apply_plan(model, O1_FP16)
    assert set(dtypes(model).values()) == {"float16"}


def test_a_model_made_under_another_global_policy_is_refused(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model = vgg()
    assert apply_plan(model, O1_FP16.edit(Rule("head", FULL))).of("head").compute.name == "fp32"
    words = r"under the policy 'mixed_float16'.*keras\.config\.set_dtype_policy\('float32'\)"
    with pytest.raises(PlanError, match=words):
        apply_plan(model, O1)
    assert dtypes(model)["head"] == "float32"  # nothing was changed
    model = vgg()
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    with pytest.raises(PlanError, match=words):
        apply_plan(loaded, O1)
    assert set(dtypes(loaded).values()) == {"float32", "float16"}


def test_a_model_that_was_built_before_the_plan_was_set_is_told_of(caplog):
    before = tuple(each for each in gc.get_objects() if isinstance(each, keras.Model))
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="inner")
    model = keras.Sequential([keras.Input((4,)), inner], name="outer")
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        set_plan(O1, others=(*before, model))
        assert caplog.text == ""
        keras.config.set_dtype_policy("float32")
        set_plan(O1, others=before)
    assert "models built before set_plan keep their policies: 'outer';" in caplog.text
    assert "inner" not in caplog.text
    assert "call apply_plan(model, plan)" in caplog.text


def test_a_rule_that_matches_nothing_is_told_of_in_fit(caplog):
    plan = O1.edit(Rule("haed", FULL), Rule("he*", FULL), Rule("type:Conv3D", FULL))

    def fit(model):
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
        with caplog.at_level(logging.WARNING, logger="halfstep"):
            model.fit(np.ones((2, 4)), np.ones((2, 2)), verbose=0)

    def network():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])

    set_plan(plan)
    fit(network())
    assert "rules 'haed', 'type:Conv3D' match no layer" in caplog.text
    caplog.clear()
    keras.config.set_dtype_policy("float32")
    plan = O1.edit(Rule("type:Sequential", FULL), Rule("head", FULL))
    set_plan(plan)
    model = network()
    apply_plan(model, plan)  # matches by types, which names do not tell
    fit(model)
    assert "match no layer" not in caplog.text


class Stack(keras.Model):
    """Layers of one name, which Keras allows in classes of models."""

    def __init__(self, names=("fc", "fc", "fc_1", "fc")):
        super().__init__()
        self.parts = [keras.layers.Dense(4, name=name) for name in names]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_layers_of_one_name_get_their_formats_and_are_told_apart():
    model = Stack()
    model(np.ones((2, 4), "float32"))
    assert [path for path, _ in layers_of(model)] == ["", "fc", "fc_2", "fc_1", "fc_3"]
    text = str(apply_plan(model, O1))
    assert [part.compute_dtype for part in model.parts] == ["bfloat16"] * 4
    assert all(f"\n{name}" in text for name in ("fc ", "fc_1", "fc_2", "fc_3"))
    apply_plan(model, O1.edit(Rule("fc_2", FULL)))
    assert [part.compute_dtype for part in model.parts] == ["bfloat16", "float32", "bfloat16", "bfloat16"]
    apply_plan(model, O1.edit(Rule("fc", FULL)))  # all of the name, as Keras's map has it
    assert [part.compute_dtype for part in model.parts] == ["float32", "float32", "bfloat16", "float32"]


def test_a_verdict_tells_layers_of_one_name_apart():
    model = Stack()
    x = np.ones((2, 4), "float32")
    model(x)
    model.parts[3].kernel.assign(np.full((4, 4), np.nan))
    model.compile("sgd", "mse")
    assert find_broken(model, x, x).module == "fc_3"


@pytest.mark.parametrize("given", [{}, {"mean": [1.0, 2.0], "variance": [4.0, 4.0]}])
def test_a_normalization_layer_returns_what_the_plan_says(given):
    layers = keras.layers
    layer = layers.Normalization(name="n", **given)
    if not given:
        layer.adapt(np.array([[-1.0, 0.0], [3.0, 4.0]], "float32"))  # means 1 and 2, variances 4
    model = keras.Sequential([keras.Input((2,)), layer, layers.Dense(2)])
    rows = np.array([[3.0, -4.0]], "float32")
    for plan, dtype in ((O1, "bfloat16"), (O1.edit(Rule("n", FULL)), "float32")):
        apply_plan(model, plan)
        out = layer(rows)
        assert keras.backend.standardize_dtype(out.dtype) == dtype
        assert numbers(keras.ops.cast(out, "float32")).tolist() == [[1.0, -3.0]]


def test_a_model_inside_of_another_that_has_run_is_refused():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="inner")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, inner(keras.layers.Dense(4)(inputs)))
    inner.predict(np.ones((2, 4), "float32"), verbose=0)
    with pytest.raises(PlanError, match=r"'inner' was compiled by model\.predict.*model\.compile"):
        apply_plan(model, O1)
    assert set(dtypes(model).values()) == {"float32"}
    inner.compile()
    apply_plan(model, O1)
    assert set(dtypes(model).values()) == {"bfloat16"}
