"""The loss scale in Keras against the rule in Python numbers: 200 steps, planted overflows, every kind of loop."""

import unittest
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LossScaleOptimizer
from halfstep.edits import Scaling
from halfstep.errors import PlanError, SetupError
from tests.keras.common import BACKEND, everywhere, keras, numbers, on

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, LR = 200, 0.5
SCALINGS = {
    "default": Scaling("dynamic"),
    "limits": Scaling("dynamic", init=2.0**10, growth_interval=3, min=2.0**6, max=2.0**12),
    "hysteresis": Scaling(
        "dynamic", init=256.0, growth=4.0, backoff=0.25, growth_interval=4, hysteresis=3, max=2.0**20
    ),
    "static": Scaling("static", init=128.0),
    "none": Scaling("none"),
}


def planted():
    """Rows whose gradients are themselves: small whole numbers, and an overflow in every sixth or so, some in a row."""
    numbers = np.random.default_rng(7)
    rows = numbers.integers(-4, 5, (STEPS, 3)).astype("float32")
    bad = numbers.random(STEPS) < 0.16
    bad[50:54] = True
    rows[bad, 1] = np.inf
    rows[60:90] = np.where(np.isfinite(rows[60:90]), rows[60:90], 1.0)  # long enough to reach a ceiling
    return rows


@dataclass
class Rule:
    """The rule in Python numbers: an `if` for each case, and the weights that gradient descent reaches."""

    scaling: Scaling
    scales: list = field(default_factory=list)
    skips: list = field(default_factory=list)

    def run(self, rows):
        given = self.scaling
        scale = 1.0 if given.kind == "none" else given.init
        clean = overflows = 0
        weights = np.zeros(3, "float32")
        for row in rows:
            overflow = not np.isfinite(row).all()
            self.skips.append(overflow)
            if not overflow:
                weights = weights - np.float32(LR) * row
            if given.kind == "dynamic":
                clean, overflows = (0, overflows + 1) if overflow else (clean + 1, overflows)
                if overflow and overflows >= given.hysteresis:
                    scale = max(scale * given.backoff, given.min)
                if clean == given.growth_interval:
                    scale, clean, overflows = min(scale * given.growth, given.max), 0, 0
            self.scales.append(scale)
        return weights


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])


def loss_of(_, outputs):
    return keras.ops.mean(outputs)


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.scales, self.skipped = [], []

    def on_train_batch_end(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        self.scales.append(float(numbers(self.model.optimizer.dynamic_scale)))
        if hasattr(self.model.optimizer, "skipped"):
            self.skipped.append(int(numbers(self.model.optimizer.skipped)))


def fitted(model, optimizer, rows, **settings):
    model.compile(optimizer, loss_of, **settings)
    watch = Watch()
    model.fit(rows, np.zeros(len(rows)), batch_size=1, shuffle=False, verbose=0, callbacks=[watch])
    return watch


def in_fit(model, optimizer, rows):
    watch = fitted(model, optimizer, rows)
    return watch.scales, watch.skipped


def in_a_loop(model, optimizer, rows, *, unscaled=False, compiled=False):
    """A step of each backend as its users write it."""
    apply = optimizer.apply_unscaled if unscaled else optimizer.apply
    changed = optimizer.unscale if unscaled else list
    optimizer.build(model.trainable_variables)
    scales, skipped = [], []
    if BACKEND == "tensorflow":
        import tensorflow as tf

        def step(row):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(loss_of(None, model(row)))
            apply(changed(tape.gradient(loss, model.trainable_variables)), model.trainable_variables)

        step = tf.function(step) if compiled else step
    elif BACKEND == "torch":

        def step(row):
            model.zero_grad()
            optimizer.scale_loss(loss_of(None, model(row))).backward()
            apply(changed([v.value.grad for v in model.trainable_variables]), model.trainable_variables)

    else:
        import jax

        def scaled(weights, row, own):
            outputs, _ = model.stateless_call(weights, [], row)
            return optimizer.stateless_scale_loss(own, loss_of(None, outputs))

        def step(row):
            weights = [v.value for v in model.trainable_variables]
            own = [v.value for v in optimizer.variables]
            apply(changed(jax.grad(scaled)(weights, row, own)), model.trainable_variables)

    for row in rows:
        step(keras.ops.convert_to_tensor(row[None]))
        scales.append(float(numbers(optimizer.dynamic_scale)))
        skipped.append(int(numbers(optimizer.skipped)))
    return scales, skipped


def stateless(model, optimizer, rows):
    """A train step of JAX, compiled, with all state outside of the model."""
    import jax

    optimizer.build(model.trainable_variables)

    def loss(weights, own, row):
        outputs, _ = model.stateless_call(weights, [], row)
        return optimizer.stateless_scale_loss(own, loss_of(None, outputs))

    @jax.jit
    def step(weights, own, row):
        return optimizer.stateless_apply(own, jax.grad(loss)(weights, own, row), weights)

    weights, own = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    order = [id(v) for v in optimizer.variables]
    places = [order.index(id(v)) for v in (optimizer.dynamic_scale, optimizer.skipped)]
    seen = []
    for row in rows:
        weights, own = step(weights, own, row[None])
        seen.append([float(own[place]) for place in places])
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        variable.assign(value)
    return [scale for scale, _ in seen], [int(count) for _, count in seen]


LOOPS = {
    "fit": in_fit,
    "loop": in_a_loop,
    "unscaled": lambda *given: in_a_loop(*given, unscaled=True),
    "graph": lambda *given: in_a_loop(*given, compiled=True),
    "stateless": stateless,
}
CASES = [*(("fit", name) for name in SCALINGS), ("loop", "hysteresis"), ("unscaled", "limits")]
CASES += [("graph", "limits")] * (BACKEND == "tensorflow")
CASES += [("stateless", "limits"), ("stateless", "hysteresis")] * (BACKEND == "jax")


@everywhere("fit-limits", "fit-hysteresis", *(f"{loop}-" for loop, _ in CASES if loop not in ("fit", "unscaled")))
@pytest.mark.parametrize(("loop", "name"), CASES)
def test_scale_skips_and_weights_are_those_of_the_rule(name, loop):
    rows, rule = planted(), Rule(SCALINGS[name])
    weights = rule.run(rows)
    model = network()
    scales, skipped = LOOPS[loop](model, LossScaleOptimizer(keras.optimizers.SGD(LR), SCALINGS[name]), rows)
    assert scales == rule.scales
    assert np.diff([0, *skipped]).tolist() == [int(each) for each in rule.skips]
    assert numbers(model.trainable_variables[0]).ravel().tolist() == weights.tolist()
    assert 20 < sum(rule.skips) < 60


def test_it_begins_at_the_scale_of_keras():
    first = [
        kind(keras.optimizers.SGD(LR)).initial_scale
        for kind in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer)
    ]
    assert first == [2.0**15, 2.0**15]


def test_keras_own_tests_of_its_loss_scale_pass(monkeypatch):
    def as_keras(inner, initial_scale=2.0**15, dynamic_growth_steps=2000):
        return LossScaleOptimizer(inner, Scaling("dynamic", init=initial_scale, growth_interval=dynamic_growth_steps))

    theirs = pytest.importorskip("keras.src.optimizers.loss_scale_optimizer_test")
    monkeypatch.setattr(theirs, "LossScaleOptimizer", as_keras)
    loader = unittest.TestLoader()
    loader.testNamePatterns = [
        "*finite_step*",
        "*scaling*",
        "*iterations*",
        "*no_vars*",
        "*test_config*",
    ]  # not its arguments
    loader.loadTestsFromModule(theirs).run(result := unittest.TestResult())
    assert result.testsRun - len(result.skipped) >= 8
    assert result.failures + result.errors == []


def test_hysteresis_forgives_overflows_from_the_first_step_on():
    rows = np.ones((4, 3), "float32")
    rows[:3, 0] = np.inf
    scales, skipped = in_fit(network(), LossScaleOptimizer(keras.optimizers.SGD(LR), SCALINGS["hysteresis"]), rows)
    assert (scales, skipped) == ([256.0, 256.0, 64.0, 64.0], [1, 2, 3, 3])


def test_without_limits_it_is_the_rule_of_keras():
    rows = planted()
    free = Scaling("dynamic", init=2.0**15, growth_interval=3, min=2.0**-126, max=2.0**126)
    kept = []
    for optimizer in (
        LossScaleOptimizer(keras.optimizers.SGD(LR), free),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(LR), 2.0**15, 3),
    ):
        model = network()
        kept.append((fitted(model, optimizer, rows).scales, numbers(model.trainable_variables[0]).tolist()))
    assert kept[0] == kept[1]
    assert len(set(kept[0][0])) > 5


def test_a_saved_model_goes_on_where_it_was(tmp_path):
    rows = np.where(np.isfinite(planted()[:60]), planted()[:60], 1.0)
    rows[[5, 29, 31, 33, 40], 0] = np.inf
    scaling = SCALINGS["hysteresis"]
    whole = network()
    expected = fitted(whole, LossScaleOptimizer(keras.optimizers.Adam(0.01), scaling), rows)
    model = network()
    fitted(model, LossScaleOptimizer(keras.optimizers.Adam(0.01), scaling), rows[:33])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"loss_of": loss_of})
    assert loaded.optimizer.scaling == scaling
    watch = Watch()
    loaded.fit(rows[33:], np.zeros(27), batch_size=1, shuffle=False, verbose=0, callbacks=[watch])
    assert watch.scales == expected.scales[33:]
    assert watch.skipped == expected.skipped[33:]
    assert np.array_equal(numbers(loaded.trainable_variables[0]), numbers(whole.trainable_variables[0]))


def test_a_norm_is_that_of_the_true_gradients():
    optimizer, model = LossScaleOptimizer(keras.optimizers.SGD(LR), 64.0), network()
    fitted(model, optimizer, np.array([[3.0, 0.0, 4.0]], "float32"))
    assert float(numbers(optimizer.grad_norm)) == 5.0


def test_an_overflow_that_clipping_hides_is_skipped():
    """Of the second half of the gradients, after that of the first: unscaled one by one, clipped, and applied."""
    optimizer, ops = LossScaleOptimizer(keras.optimizers.SGD(LR), Scaling("dynamic", init=8.0)), keras.ops
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer.build(model.trainable_variables)
    seen = []
    for first in (np.inf, 8.0, 8.0):
        grads = [ops.full((3, 1), first), ops.full((1,), 8.0)]
        true = [ops.clip(optimizer.unscale([grad])[0], -2.0, 2.0) for grad in grads]
        optimizer.apply_unscaled(true, model.trainable_variables)
        found = (optimizer.skipped, optimizer.dynamic_scale, model.trainable_variables[0][0, 0])
        seen.append([float(numbers(each)) for each in found])
    assert seen == [[1, 4, 0], [1, 4, -2 * LR], [1, 4, -4 * LR]]


def test_what_was_unscaled_to_be_looked_at_is_not_held_against_a_later_step():
    optimizer, model = LossScaleOptimizer(keras.optimizers.SGD(LR), 8.0), network()
    optimizer.build(model.trainable_variables)
    for first in (np.inf, 8.0):
        grads = [keras.ops.full((3, 1), first)]
        optimizer.unscale(grads)
        optimizer.apply(grads, model.trainable_variables)
    optimizer.apply_unscaled([keras.ops.full((3, 1), 1.0)], model.trainable_variables)
    assert int(numbers(optimizer.skipped)) == 1
    assert numbers(model.trainable_variables[0]).ravel().tolist() == [-2 * LR] * 3


def test_clipping_of_the_wrapped_optimizer_sees_true_gradients():
    optimizer, model = LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0), 64.0), network()
    fitted(model, optimizer, np.array([[3.0, 0.0, 4.0]], "float32"))
    assert numbers(model.trainable_variables[0]).ravel() == pytest.approx([-0.6, 0.0, -0.8])


def test_rates_and_steps_are_those_of_the_wrapped_optimizer():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25))
    optimizer.learning_rate = 0.125
    assert float(numbers(optimizer.inner_optimizer.learning_rate)) == 0.125
    fitted(network(), optimizer, planted()[:3])
    assert int(numbers(optimizer.iterations)) == int(np.isfinite(planted()[:3]).all(1).sum())


def test_what_cannot_be_wrapped_is_refused():
    wrapped = LossScaleOptimizer(keras.optimizers.SGD(LR))
    with pytest.raises(SetupError, match=r"LossScaleOptimizer\(optimizer\.inner_optimizer\)"):
        LossScaleOptimizer(wrapped)
    with pytest.raises(SetupError, match="Adam"):
        LossScaleOptimizer("sgd")
    with pytest.raises(PlanError, match="loss_scale is 'dynamc'"):
        LossScaleOptimizer(keras.optimizers.SGD(LR), "dynamc")
    with pytest.raises(ValueError, match="pass the variables too"):
        wrapped.apply([0.0])
    with pytest.raises(ValueError, match=r"call optimizer\.build\(model\.trainable_variables\)"):
        wrapped.unscale([0.0])


@on("tensorflow")
@pytest.mark.parametrize("kind", ["MirroredStrategy", "OneDeviceStrategy"])
def test_a_strategy_of_one_replica_trains(kind):
    import tensorflow as tf

    rows = np.ones((6, 3), "float32")
    rows[2, 0] = np.inf
    strategy = getattr(tf.distribute, kind)(["cpu:0"] if kind == "MirroredStrategy" else "cpu:0")

    @tf.function
    def run(row):
        def step(row):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(loss_of(None, model(row)))
            grads = [tf.clip_by_value(g, -1.0, 1.0) for g in optimizer.unscale(tape.gradient(loss, weights))]
            optimizer.apply_unscaled(grads, weights)

        strategy.run(step, args=(row,))

    for fits in (True, False):
        with strategy.scope():
            model, optimizer = network(), LossScaleOptimizer(keras.optimizers.SGD(LR), 64.0)
            weights = model.trainable_variables
            optimizer.build(weights)
        if fits:
            fitted(model, optimizer, rows)
        for row in [] if fits else rows:
            run(row[None])
        assert int(numbers(optimizer.skipped)) == 1
        assert numbers(model.trainable_variables[0]).ravel().tolist() == [-5 * LR] * 3


@everywhere("stateless")
@pytest.mark.parametrize("loop", ["apply", "unscale", "stateless"])
def test_what_overwrites_a_variable_is_neither_unscaled_nor_part_of_the_norm(loop):
    if loop == "stateless" and keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no stateless_apply on TensorFlow")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0)
    amax, weight = keras.Variable([1.0, 2.0]), keras.Variable([1.0])
    amax.overwrite_with_gradient = True
    optimizer.build([amax, weight])
    grads = [keras.ops.array([3.0, 6.0]), keras.ops.array([8.0])]
    if loop == "stateless":
        values, state = optimizer.stateless_apply(
            [v.value for v in optimizer.variables], grads, [amax.value, weight.value]
        )
        for variable, value in zip([amax, weight, *optimizer.variables], [*values, *state], strict=True):
            variable.assign(value)
    elif loop == "apply":
        optimizer.apply(grads, [amax, weight])
    else:
        optimizer.apply_unscaled(optimizer.unscale(grads), [amax, weight])
    assert numbers(amax).tolist() == [3.0, 6.0]
    assert numbers(weight).tolist() == [-1.0]
    assert numbers(optimizer.grad_norm) == 2.0
