"""Twenty planted faults, each in a layer that is known: the layer, and the kind of fault, are named."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import apply_plan, find_broken, set_plan
from halfstep.adapters.keras.find import find_cause
from halfstep.edits import FULL, Rule
from halfstep.plan.levels import level
from halfstep.records import Kind
from tests.keras.common import keras, numbers, on
from tests.keras.zoo import Block

pytestmark = pytest.mark.filterwarnings("ignore")
layers, ops = keras.layers, keras.ops
PLAN = level("O1", "fp16")


class Ratio(layers.Layer):
    """Divides by how far each element is from the mean: by zero where all are equal."""

    def call(self, x):
        return x / (x - ops.mean(x, axis=-1, keepdims=True))


class Root(layers.Layer):
    """Whose derivative at zero is infinite."""

    def call(self, x):
        return ops.sqrt(x)


class Logarithm(layers.Layer):
    """With a layer inside whose output is never positive."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name="inner", activation=lambda x: -ops.relu(x))

    def call(self, x):
        return ops.log(self.inner(x))


class Before(layers.Layer):
    """That divides by zero itself before it calls a layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name="inner")

    def call(self, x):
        return self.inner(x / ops.zeros_like(x))


def dense(*between, head="head", plan=PLAN, rules=(), width=4):
    """a, whatever is between, b, head."""

    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(width, name="a")(inputs)
        for layer in between:
            x = layer()(x)
        outputs = layers.Dense(2, name=head)(layers.Dense(4, name="b")(x))
        return keras.Model(inputs, outputs)

    return build, plan.edit(*rules)


def images():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, name="conv")(inputs)
    x = layers.ReLU(name="relu")(layers.BatchNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling2D(name="pool")(x)))


def words():
    inputs = keras.Input((6,))
    x = layers.Dense(8, name="embed")(layers.Reshape((6, 1), name="split")(inputs))
    x = layers.GlobalAveragePooling1D(name="pool")(Block(8, name="block")(x))
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def nested():
    inner_inputs = keras.Input((4,))
    inner = keras.Model(inner_inputs, layers.Dense(4, name="deep")(inner_inputs), name="encoder")
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="head")(inner(layers.Dense(4, name="a")(inputs))))


def at(model, path):
    layer = model
    for name in path.split("."):
        layer = layer.get_layer(name) if hasattr(layer, "get_layer") else getattr(layer, name)
    return layer


def enlarge(path, factor):
    """Makes the kernel of a layer so large that what it gives is beyond fp16, and finite in fp32."""

    def plant(model, x, y):
        kernel = at(model, path).weights[0]
        kernel.assign(np.ones(kernel.shape) * factor)
        return x, y

    return plant


def beyond(path):
    """Gives a layer a bias that is beyond fp16."""

    def plant(model, x, y):
        bias = at(model, path).weights[1]
        bias.assign(np.ones(bias.shape) * 1e5)
        return x, y

    return plant


def spoil(value, place=0):
    def plant(model, x, y):
        x[place].flat[0] = value
        return x, y

    return plant


def as_it_is(model, x, y):
    return x, y


def equal(model, x, y):
    """Has `a` give equal numbers."""
    kernel, bias = at(model, "a").weights
    kernel.assign(np.zeros(kernel.shape))
    bias.assign(np.ones(bias.shape))
    return x, y


def zeros(model, x, y):
    """Has `a` give zeros."""
    kernel, bias = at(model, "a").weights
    kernel.assign(np.zeros(kernel.shape))
    bias.assign(np.zeros(bias.shape))
    return x, y


IMAGES, WORDS, NESTED = (images, PLAN), (words, PLAN), (nested, PLAN)
OVERFLOW, INPUT, INVALID, SCALE = Kind.OVERFLOW, Kind.INPUT_DATA, Kind.INVALID, Kind.SCALE_TOO_HIGH
FULL_HEAD = dense(rules=[Rule("head", FULL)])
FAULTS = {
    "overflow of the first layer": (dense(), enlarge("a", 6e4), 1.0, "a", OVERFLOW),
    "overflow of the last layer": (dense(), beyond("head"), 1.0, "head", OVERFLOW),
    "overflow of a convolution": (IMAGES, enlarge("conv", 6e4), 1.0, "conv", OVERFLOW),
    "overflow in a block": (WORDS, beyond("block.wide"), 1.0, "block.wide", OVERFLOW),
    "overflow in a nested model": (NESTED, beyond("encoder.deep"), 1.0, "encoder.deep", OVERFLOW),
    "NaN in a row": (dense(), spoil(np.nan), 1.0, "a", INPUT),
    "minus infinity in a row": (dense(), spoil(-np.inf, 1), 1.0, "a", INPUT),
    "an infinite pixel": (IMAGES, spoil(np.inf), 1.0, "conv", INPUT),
    "NaN in the last row": (dense(), spoil(np.nan, 3), 1.0, "a", INPUT),
    "NaN before a nested model": (NESTED, spoil(np.nan), 1.0, "a", INPUT),
    "0/0 in a layer of one's own": (dense(lambda: Ratio(name="ratio")), equal, 1.0, "ratio", INVALID),
    "log of what is never positive": (dense(lambda: Logarithm(name="log")), as_it_is, 1.0, "log", INVALID),
    "1/0 before a layer inside": (dense(lambda: Before(name="before")), as_it_is, 1.0, "before", INVALID),
    "0/0 in fp32": (dense(lambda: Ratio(name="ratio"), rules=[Rule("ratio", FULL)]), equal, 1.0, "ratio", INVALID),
    "a root's derivative at 0": (dense(lambda: Root(name="root")), zeros, 1.0, "root", INVALID),
    "scale too high": (dense(), as_it_is, 2.0**20, "head", SCALE),
    "scale too high below a full head": (FULL_HEAD, as_it_is, 2.0**20, "b", SCALE),
    "scale too high for images": (IMAGES, as_it_is, 2.0**20, "head", SCALE),
    "scale too high for sequences": (WORDS, as_it_is, 2.0**20, "head", SCALE),
    "scale too high in a nested model": (NESTED, as_it_is, 2.0**20, "head", SCALE),
}


def batch(model):
    made = np.random.default_rng(0)
    shape = (4, *model.input_shape[1:])
    return made.uniform(0.5, 1.0, shape).astype("float32"), made.uniform(size=(4, 2)).astype("float32")


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    (build, plan), plant, scale, layer, kind = FAULTS[name]
    set_plan(plan)
    model = build()
    apply_plan(model, plan)
    model.compile("sgd", "mse")
    x, y = plant(model, *batch(model))
    before = [numbers(v).copy() for v in model.variables]
    verdict = find_broken(model, x, y, scale=scale)
    assert (verdict.module, verdict.kind) == (layer, kind), verdict
    assert all(np.array_equal(a, numbers(v)) for a, v in zip(before, model.variables, strict=True))
    assert [path for path, value in vars(model).items() if path == "call"] == []


def test_there_are_twenty():
    assert len(FAULTS) == 20


@pytest.mark.parametrize("build", [images, nested])
def test_nothing_is_named_where_all_is_finite(build):
    set_plan(PLAN)
    model = build()
    apply_plan(model, PLAN)
    model.compile("sgd", "mse")
    assert find_broken(model, *batch(model), scale=64.0) is None


def test_the_cure_of_an_overflow_cures_it():
    set_plan(PLAN)
    model = images()
    apply_plan(model, PLAN)
    x, y = enlarge("conv", 6e4)(model, *batch(model))
    verdict = find_broken(model, x, y, loss=lambda y, p: ops.mean(ops.square(ops.subtract(p, y))))
    assert verdict.cure == (Rule("conv", FULL),)
    apply_plan(model, PLAN.edit(*verdict.cure, Rule("norm", FULL)))
    assert find_broken(model, x, y, loss=lambda y, p: ops.mean(ops.square(ops.subtract(p, y)))) is None


def test_weights_and_targets_that_are_not_finite_are_named():
    model = nested()
    model.compile("sgd", "mse")
    x, y = batch(model)
    y[1, 1] = np.nan
    verdict = find_broken(model, x, y)
    assert (verdict.place, verdict.kind) == ("code outside the model", INPUT)
    bias = at(model, "encoder.deep").weights[1]
    bias.assign(np.full(bias.shape, np.nan))
    verdict = find_broken(model, x, y)
    assert (verdict.module, verdict.kind) == ("encoder.deep", Kind.WEIGHTS)


@on("torch")
@pytest.mark.parametrize("name", FAULTS)
def test_in_fit_the_operation_of_a_planted_fault_is_named_with_its_layer(name):
    (build, plan), plant, scale, layer, kind = FAULTS[name]
    set_plan(plan)
    model = build()
    apply_plan(model, plan)
    model.compile("sgd", "mse")
    x, y = plant(model, *batch(model))
    before, keys = [numbers(v).copy() for v in model.variables], list(model.state_dict())
    verdict = find_cause(model, x, y, None, scale=scale)
    assert (verdict.module, verdict.kind) == (layer, kind), verdict
    assert verdict.call is not None or kind == INPUT
    assert all(np.array_equal(a, numbers(v)) for a, v in zip(before, model.variables, strict=True))
    assert list(model.state_dict()) == keys
