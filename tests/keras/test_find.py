"""Planted faults, each in a layer that is known: the layer, and the kind of fault, are named."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import apply_plan, find_broken, set_plan
from halfstep.adapters.keras.find import find_cause
from halfstep.edits import FULL, Rule
from halfstep.errors import SetupError
from halfstep.kinds import Kind
from halfstep.plan.levels import level
from tests.keras.common import everywhere, keras, numbers, on
from tests.keras.zoo import INITIAL, Block

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


class Square(layers.Layer):
    """That squares what a layer inside gives."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return ops.square(self.inner(x))


class RootBefore(Before):
    """That takes a root before it calls a layer."""

    def call(self, x):
        return self.inner(ops.sqrt(x))


class Penalty(layers.Layer):
    """That adds a loss."""

    def call(self, x):
        self.add_loss(ops.cast(ops.mean(ops.exp(x)), "float32"))
        return x


class Mask(layers.Layer):
    """That gives minus infinity for the first column, to be left out of a softmax."""

    def call(self, x):
        return ops.where(ops.arange(4) == 0, ops.full_like(x, -np.inf), ops.zeros_like(x))


class OnlyLow(layers.Layer):
    """Whose code does not run in fp32."""

    def call(self, x):
        if "float16" not in str(x.dtype):
            raise TypeError(f"made for fp16, not {x.dtype}")
        return x * 60000


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


def series(cell):
    def build():
        inputs = keras.Input((6,))
        x = cell(4, activation="relu", name="loop", **INITIAL)(layers.Reshape((2, 3), name="split")(inputs))
        return keras.Model(inputs, layers.Dense(2, name="head")(x))

    return build, PLAN


def rooted():
    """With a root that no layer takes."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="head")(ops.sqrt(layers.Dense(4, name="a")(inputs))))


def masked(*behind):
    """With a softmax that a mask leaves one of four columns less."""
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="a")(inputs)
    x = layers.Softmax(name="softmax")(layers.Add(name="add")([x, Mask(name="mask")(x)]))
    for layer in behind:
        x = layer()(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


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


def beyond(path, value=1e5):
    """Gives a layer a bias that is beyond fp16, or that another makes so."""

    def plant(model, x, y):
        bias = at(model, path).weights[1]
        bias.assign(np.ones(bias.shape) * value)
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
SQUARE = dense(lambda: Square(name="square"))
SQUARE_O3 = dense(lambda: Square(name="square"), plan=level("O3", "fp16"))
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
    "overflow in a GRU": (series(layers.GRU), enlarge("loop.cell", 6e4), 1.0, "loop", OVERFLOW),
    "overflow in an LSTM": (series(layers.LSTM), enlarge("loop.cell", 6e4), 1.0, "loop", OVERFLOW),
    "overflow in a block's own code": (SQUARE, beyond("square.inner", 300.0), 1.0, "square", OVERFLOW),
    "overflow in a block's own code at O3": (SQUARE_O3, beyond("square.inner", 300.0), 1.0, "square", OVERFLOW),
    "overflow in a cast between layers": (dense(rules=[Rule("a", FULL)]), beyond("a"), 1.0, "b", OVERFLOW),
    "overflow in the cast of an input": (dense(), spoil(1e5), 1.0, "a", OVERFLOW),
    "overflow in add_loss": (dense(lambda: Penalty(name="more")), beyond("a", 12.5), 1.0, "more", OVERFLOW),
    "a root's derivative before a layer": (dense(lambda: RootBefore(name="root")), zeros, 1.0, "root", INVALID),
    "a root's derivative in a model's code": ((rooted, PLAN), zeros, 1.0, "", INVALID),
}

# One of each way to fail and to be found, for tests that take some of the faults.
SOME = (
    "overflow of a convolution", "overflow in a nested model", "overflow in a GRU", "overflow in a cast between",
    "overflow in a block's own code]", "add_loss", "NaN in a row", "log of", "0/0 in fp32", "derivative before a layer",
    "below a full head", "scale too high in a nested model",
)  # fmt: skip


def planned(build, plan=PLAN):
    keras.config.set_dtype_policy("float32")
    set_plan(plan)
    model = build()
    apply_plan(model, plan)
    model.compile("sgd", "mse")
    return model


def batch(model):
    made = np.random.default_rng(0)
    shape = (4, *model.input_shape[1:])
    return made.uniform(0.5, 1.0, shape).astype("float32"), made.uniform(size=(4, 2)).astype("float32")


@everywhere(*SOME)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    (build, plan), plant, scale, layer, kind = FAULTS[name]
    model = planned(build, plan)
    x, y = plant(model, *batch(model))
    before = [numbers(v).copy() for v in model.variables]
    verdict = find_broken(model, x, y, scale=scale)
    assert (verdict.module, verdict.kind) == (layer, kind), verdict
    assert all(np.array_equal(a, numbers(v)) for a, v in zip(before, model.variables, strict=True))
    assert [path for path, value in vars(model).items() if path == "call"] == []


@pytest.mark.parametrize("build", [images, nested])
def test_nothing_is_named_where_all_is_finite(build):
    model = planned(build)
    assert find_broken(model, *batch(model), scale=64.0) is None


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_infinities_that_a_mask_means_are_no_fault(scale):
    model = planned(masked)
    assert find_broken(model, *batch(model), scale=scale) is None


def test_a_fault_is_named_in_a_model_with_a_mask():
    model = planned(masked)
    verdict = find_broken(model, *beyond("head")(model, *batch(model)))
    assert (verdict.module, verdict.kind) == ("head", OVERFLOW)
    model = planned(lambda: masked(lambda: Root(name="root")))
    verdict = find_broken(model, *batch(model))
    assert (verdict.module, verdict.phase, verdict.kind) == ("root", "backward", INVALID)


def test_what_cannot_be_run_in_fp32_is_told_without_it():
    model = planned(dense(lambda: OnlyLow(name="low"))[0])
    verdict = find_broken(model, *beyond("a", 2.0)(model, *batch(model)))
    assert (verdict.module, verdict.kind) == ("low", INVALID)
    assert "fp32" not in verdict.evidence + verdict.advice


def test_a_derivative_of_the_loss_is_the_loss_s():
    model = planned(nested)
    verdict = find_broken(model, *batch(model), loss=lambda y, p: ops.mean(ops.sqrt(ops.cast(p, "float32") * 0)))
    assert (verdict.place, verdict.operator, verdict.kind) == ("code outside the model", "the loss", INVALID)


def test_a_gradient_beyond_fp16_without_a_scale_is_an_overflow():
    model = planned(nested)
    verdict = find_broken(model, *batch(model), loss=lambda y, p: 1e6 * ops.mean(ops.cast(p, "float32")))
    assert (verdict.module, verdict.phase, verdict.kind) == ("head", "backward", OVERFLOW)


@on("jax", "torch")
def test_an_activity_regularizer_is_its_layer_s():
    """On TensorFlow Keras itself cannot sum losses of two formats."""

    def build():
        inputs = keras.Input((4,))
        x = layers.Dense(4, name="a", activity_regularizer=keras.regularizers.L2(1.0))(inputs)
        return keras.Model(inputs, layers.Dense(2, name="head")(x))

    model = planned(build)
    verdict = find_broken(model, *beyond("a", 500.0)(model, *batch(model)))
    assert (verdict.module, verdict.kind) == ("a", OVERFLOW)
    assert find_broken(model, *beyond("a", 1.0)(model, *batch(model))) is None


def test_what_layers_add_counts_beside_a_loss_that_is_given():
    model = planned(dense(lambda: Penalty(name="more"))[0])
    x, y = beyond("a", 12.5)(model, *batch(model))
    verdict = find_broken(model, x, y, loss=lambda y, p: ops.mean(ops.cast(p, "float32")))
    assert (verdict.module, verdict.kind) == ("more", OVERFLOW)


def test_a_batch_without_a_loss_is_refused():
    model = nested()
    model.compile("sgd")
    with pytest.raises(SetupError, match=r"set compile\(loss="):
        find_broken(model, *batch(model))


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
@pytest.mark.slow_but(*SOME)
@pytest.mark.parametrize("name", FAULTS)
def test_in_fit_the_operation_of_a_planted_fault_is_named_with_its_layer(name):
    (build, plan), plant, scale, layer, kind = FAULTS[name]
    model = planned(build, plan)
    x, y = plant(model, *batch(model))
    before, keys = [numbers(v).copy() for v in model.variables], list(model.state_dict())
    verdict = find_cause(model, x, y, None, scale=scale)
    assert (verdict.module, verdict.kind) == (layer, kind), verdict
    assert verdict.call is not None or kind == INPUT
    assert all(np.array_equal(a, numbers(v)) for a, v in zip(before, model.variables, strict=True))
    assert list(model.state_dict()) == keys
