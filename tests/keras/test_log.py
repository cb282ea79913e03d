"""The run log from `fit` and from loops of one's own: what it holds, the page, and verdicts."""

import logging

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LogCallback, LossScaleOptimizer, StepLog, apply_plan, set_plan
from halfstep.edits import Scaling
from halfstep.errors import PlanError, SetupError
from halfstep.explain.report.html import page_html
from halfstep.explain.report.run import read_log
from halfstep.kinds import Kind
from halfstep.plan.levels import level
from halfstep.records import NumericsError
from tests.keras.common import BACKEND, keras, numbers, on, seed

pytestmark = pytest.mark.filterwarnings("ignore")
SCALING = Scaling("dynamic", init=64.0, growth_interval=4, min=16.0)
PLAN = level("O1", "fp16").edit(SCALING)
ROWS = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
BATCHES, BAD = 12, 5


def network(plan=PLAN):
    set_plan(plan)
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu", name="body"), layers.Dense(1, name="head")])
    apply_plan(model, plan)
    return model


def data(bad=BAD):
    rows, targets = ROWS.copy(), ROWS.sum(1, keepdims=True)
    if bad is not None:
        rows[2 * bad] = np.inf
    return rows, targets


def fit(model, path, *, scaling=SCALING, plan=PLAN, epochs=1, bad=BAD, **settings):
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), scaling), "mse")
    callback = LogCallback(path, plan, every=4, **settings)
    rows = data(bad)
    model.fit(*rows, batch_size=2, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback])
    return callback


def test_fit_writes_every_step_and_what_is_to_be_seen_at_some(tmp_path):
    model = network()
    before = [numbers(v) for v in model.trainable_variables]
    fit(model, tmp_path / "run.jsonl", epochs=2, bad=None)
    log = read_log(tmp_path / "run.jsonl")
    assert [step.step for step in log.steps] == list(range(1, 25))
    assert [step.scale for step in log.steps[:9]] == [64.0] * 4 + [128.0] * 4 + [256.0]
    assert log.plan["name"] == "O1"
    assert log.modules == ("body", "head")
    assert log.observed == (4, 8, 12, 16, 20, 24)
    seen = {(each.module, each.kind, each.name): each for each in log.observations() if each.step == 4}
    kinds = {(m, k, n) for m in ("body", "head") for k in ("weight", "weight_grad") for n in ("kernel", "bias")}
    assert set(seen) == kinds
    assert (seen["body", "weight", "kernel"].stats.count, seen["head", "weight_grad", "bias"].scale) == (12, 64.0)
    largest = max(each.stats.amax for key, each in seen.items() if key[1] == "weight_grad")
    assert 64 / (2 * 21**0.5) < largest / log.steps[3].grad_norm < 64 * 2  # of 21 elements, as scaled
    assert log.processes[0].closed
    loss, norm = first_step(before)
    assert (log.steps[0].loss, log.steps[0].grad_norm) == pytest.approx((loss, norm), rel=2e-2)
    assert all(0 < step.loss < 100 for step in log.steps)


def first_step(weights):
    """Loss and norm of the gradient of the first batch, in NumPy at fp64."""
    w1, b1, w2, b2 = (w.astype("float64") for w in weights)
    rows, targets = ROWS[:2].astype("float64"), ROWS[:2].sum(1, keepdims=True)
    hidden = rows @ w1 + b1
    error = np.maximum(hidden, 0) @ w2 + b2 - targets
    out = 2 * error / error.size
    into = (out @ w2.T) * (hidden > 0)
    parts = (np.maximum(hidden, 0).T @ out, out.sum(0), rows.T @ into, into.sum(0))
    return (error**2).mean(), np.sqrt(sum((part**2).sum() for part in parts))


def test_a_loss_is_that_of_its_own_batch(tmp_path):
    """The batch's loss by `evaluate`, of a model that does not learn."""
    model = network()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), SCALING), "mse")
    rows, targets = data(None)
    callback = LogCallback(tmp_path / "still.jsonl", PLAN)
    model.fit(rows, targets, batch_size=2, shuffle=False, verbose=0, callbacks=[callback])
    logged = [step.loss for step in read_log(tmp_path / "still.jsonl").steps]
    each = [model.evaluate(rows[i : i + 2], targets[i : i + 2], verbose=0) for i in (0, 10, 22)]
    assert [logged[i] for i in (0, 5, 11)] == pytest.approx(each, rel=1e-4)


def test_skips_are_written_and_the_page_is_drawn(tmp_path):
    fit(network(), tmp_path / "run.jsonl")
    log = read_log(tmp_path / "run.jsonl")
    assert [step.step for step in log.steps if step.skipped] == [BAD + 1]
    assert [step.scale for step in log.steps[4:8]] == [128.0, 128.0, 64.0, 64.0]
    assert log.events == ()
    page = page_html(log)
    assert "head" in page
    assert page.startswith("<!DOCTYPE html>")


def test_a_run_that_goes_on_counts_on(tmp_path):
    model = network()
    fit(model, tmp_path / "run.jsonl")
    model.fit(*data(None), batch_size=8, verbose=0, callbacks=[LogCallback(tmp_path / "run.jsonl", PLAN)])
    log = read_log(tmp_path / "run.jsonl")
    assert [step.step for step in log.steps] == list(range(1, 16))
    assert log.returns == ()


def test_a_run_that_accumulates_gradients_counts_on(tmp_path):
    model = network()
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
    model.compile(LossScaleOptimizer(optimizer, SCALING), "mse")
    for part in (slice(0, 12), slice(12, 24)):  # 6 steps each
        rows, targets = (each[part] for each in data())
        callback = LogCallback(tmp_path / "run.jsonl", PLAN)
        model.fit(rows, targets, batch_size=2, shuffle=False, verbose=0, callbacks=[callback])
    log = read_log(tmp_path / "run.jsonl")
    assert [step.step for step in log.steps] == list(range(1, 13))
    assert log.returns == ()


@on("tensorflow", "jax")  # Keras refuses it on torch
def test_several_steps_in_one_are_counted_and_told_of(tmp_path, caplog):
    model = network()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), SCALING), "mse", steps_per_execution=3)
    rows, targets = (each[:20] for each in data())
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        callback = LogCallback(tmp_path / "run.jsonl", PLAN, every=4)
        model.fit(rows, targets, batch_size=2, shuffle=False, verbose=0, callbacks=[callback])
    log = read_log(tmp_path / "run.jsonl")
    assert [(step.step, step.skipped) for step in log.steps] == [(3, False), (6, True), (9, False), (10, False)]
    assert log.observed == (6, 9)
    assert "steps_per_execution is 3" in caplog.text


def test_a_callback_looks_for_causes_in_each_fit(tmp_path):
    model = network(PLAN.edit(Scaling("static", init=16.0)))
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), 16.0), "mse")
    callback = LogCallback(tmp_path / "run.jsonl", PLAN)
    for found in (3, 6):
        model.fit(ROWS * np.inf, ROWS[:, :1], batch_size=6, verbose=0, callbacks=[callback])
        assert len(callback.verdicts) == found


def test_the_logs_of_fit_are_keras_s_own(tmp_path):
    rows, targets = data(None)
    histories = []
    for callbacks in ([], [LogCallback(tmp_path / "run.jsonl", PLAN, every=4)]):
        keras.config.set_dtype_policy("float32")
        seed()
        model = network()
        model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), SCALING), "mse", metrics=["mae"])
        found = model.fit(rows, targets, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        histories.append(found.history)
    assert histories[0] == histories[1]


def test_a_step_that_fails_at_the_floor_gets_a_verdict(tmp_path, caplog):
    model = network()
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        callback = fit(model, tmp_path / "run.jsonl", scaling=Scaling("dynamic", init=16.0, min=16.0))
    (event,) = read_log(tmp_path / "run.jsonl").events
    assert event.step == BAD + 1
    assert (event.record.module, event.record.kind) == ("body", Kind.INPUT_DATA)
    assert callback.verdicts == [event.record]
    assert event.record.operator == ("matmul" if BACKEND == "torch" else "Dense")
    assert "input data: " in caplog.text
    assert "body" in caplog.text
    model.fit(*data(None), batch_size=2, verbose=0)


def test_a_verdict_ends_the_run_where_it_is_told_to(tmp_path):
    with pytest.raises(NumericsError, match="step 6 was skipped") as raised:
        fit(network(), tmp_path / "run.jsonl", scaling=Scaling("none"), on_failure="raise")
    assert raised.value.verdict.module == "body"
    assert len(read_log(tmp_path / "run.jsonl").steps) == BAD + 1


def test_an_overflow_of_a_layer_in_fit_is_named_while_others_learn(tmp_path):
    model = network()
    kernel = model.get_layer("head").weights[0]
    kernel.assign(np.full(kernel.shape, 6e4))
    model.get_layer("body").weights[1].assign(np.full(4, 100.0))
    callback = fit(model, tmp_path / "run.jsonl", scaling=Scaling("none"), bad=None)
    assert {(each.module, each.kind) for each in callback.verdicts} == {("head", Kind.OVERFLOW)}
    assert len(callback.verdicts) == 3


def test_a_loop_of_one_s_own_writes_the_same(tmp_path):
    model = network()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.05), SCALING)
    optimizer.build(model.trainable_variables)
    ops = keras.ops
    rows, targets = data()

    def loss_of(x, y):
        return ops.mean(ops.square(ops.cast(model(x), "float32") - y))

    with StepLog(tmp_path / "run.jsonl", model, optimizer, PLAN, every=4) as log:
        for i in range(0, 24, 2):
            x, y = ops.convert_to_tensor(rows[i : i + 2]), ops.convert_to_tensor(targets[i : i + 2])
            loss, grads = step_of(model, optimizer, loss_of, x, y)
            skipped = log.step(loss, grads)
            assert skipped == (i // 2 == BAD)
    own, fitted = read_log(tmp_path / "run.jsonl"), tmp_path / "fit.jsonl"
    keras.config.set_dtype_policy("float32")
    seed()
    fit(network(), fitted)
    keys = [(step.step, step.scale, step.skipped) for step in own.steps]
    assert keys == [(step.step, step.scale, step.skipped) for step in read_log(fitted).steps]
    assert {each.kind for each in own.observations()} == {"weight", "weight_grad"}


def step_of(model, optimizer, loss_of, x, y):
    variables = model.trainable_variables
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, variables)
    elif BACKEND == "torch":
        model.zero_grad()
        loss = loss_of(x, y)
        optimizer.scale_loss(loss).backward()
        grads = [v.value.grad for v in variables]
    else:
        import jax

        def scaled(values):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                loss = loss_of(x, y)
                return optimizer.scale_loss(loss), loss

        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)([v.value for v in variables])
    optimizer.apply(grads, variables)
    return loss if BACKEND != "torch" else loss.detach(), grads


def test_what_cannot_be_logged_is_refused(tmp_path):
    model = network()
    model.compile("sgd", "mse")
    with pytest.raises(SetupError, match=r"LossScaleOptimizer\(optimizer, plan\.scale\)"):
        model.fit(*data(), verbose=0, callbacks=[LogCallback(tmp_path / "run.jsonl", PLAN)])
    other = level("O1", "bf16")
    with pytest.raises(PlanError, match=r"call apply_plan\(model, plan\)"):
        StepLog(tmp_path / "run.jsonl", model, LossScaleOptimizer(keras.optimizers.SGD(0.1)), other)
    with pytest.raises(SetupError, match="set it to 'warn' or 'raise'"):
        LogCallback(tmp_path / "run.jsonl", PLAN, on_failure="no")


class Added(keras.layers.Layer):
    """That adds five times the sum of its weights to the loss."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3,), initializer="ones", name="kernel")

    def call(self, x):
        self.add_loss(5 * keras.ops.sum(keras.ops.cast(self.kernel, "float32")))
        return x


def adding(compiled_loss, path):
    set_plan(PLAN)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(Added(name="added")(inputs)))
    apply_plan(model, PLAN)
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), SCALING), compiled_loss)
    rows = data(None)[: 2 if compiled_loss else 1]
    model.fit(*rows, batch_size=2, shuffle=False, verbose=0, callbacks=[LogCallback(path, PLAN, every=4)])
    return read_log(path)


@pytest.mark.parametrize("compiled_loss", ["mse", None])
def test_histograms_have_what_layers_add_to_the_loss(compiled_loss, tmp_path):
    """Also where that is the whole loss; the gradient of each of three weights is 5, times the scale."""
    log = adding(compiled_loss, tmp_path / "run.jsonl")
    assert [step.step for step in log.steps] == list(range(1, 13))
    found = [each for each in log.observations() if (each.module, each.kind) == ("added", "weight_grad")]
    assert [each.step for each in found] == [4, 8, 12]
    assert [each.stats.amax / each.scale for each in found] == [5.0] * 3


def test_a_train_step_of_one_s_own_is_logged_without_what_takes_another_run(tmp_path, caplog):
    class Own(keras.Sequential):
        def train_step(self, *given):
            return STEPS[BACKEND](self, *given)

    model = Own([keras.Input((3,)), keras.layers.Dense(1, name="head")])
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.05), Scaling("none")))
    callback = LogCallback(tmp_path / "run.jsonl", level("O0", "fp16"), every=2)
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        model.fit(data()[0], batch_size=2, shuffle=False, verbose=0, callbacks=[callback])
    log = read_log(tmp_path / "run.jsonl")
    assert [step.step for step in log.steps if step.skipped] == [BAD + 1]
    assert len(log.steps) == BATCHES
    assert {each.kind for each in log.observations()} == {"weight"}
    assert callback.verdicts == []
    assert caplog.text.count("a batch could not be run again: model 'own' has no loss") == 1


def own_loss(outputs):
    return keras.ops.mean(keras.ops.square(outputs))


def on_tensorflow(model, rows):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        scaled = model.optimizer.scale_loss(own_loss(model(rows)))
    model.optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
    return {}


def on_torch(model, rows):
    model.zero_grad()
    model.optimizer.scale_loss(own_loss(model(rows))).backward()
    model.optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
    return {}


def on_jax(model, state, rows):
    import jax

    weights, others, own, metrics = state

    def scaled(weights):
        outputs, _ = model.stateless_call(weights, others, rows)
        return model.optimizer.stateless_scale_loss(own, own_loss(outputs))

    weights, own = model.optimizer.stateless_apply(own, jax.grad(scaled)(weights), weights)
    return {}, (weights, others, own, metrics)


STEPS = {"tensorflow": on_tensorflow, "torch": on_torch, "jax": on_jax}


def encoder(name):
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(3, name="deep")(inputs), name=name)


class Stack(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(3, name="fc") for _ in range(2)]
        self.inner = encoder("inner")

    def call(self, x):
        return self.inner(self.parts[1](self.parts[0](x)))


def test_histograms_have_the_names_of_the_module_list(tmp_path):
    inputs = keras.Input((3,))
    nested = keras.Model(inputs, encoder("second")(encoder("first")(inputs)))
    stack = Stack()
    stack(ROWS)
    names = {nested: {"first.deep", "second.deep"}, stack: {"fc", "fc_1", "inner.deep"}}
    for i, (model, paths) in enumerate(names.items()):
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        with StepLog(tmp_path / f"{i}.jsonl", model, optimizer, level("O0", "fp16"), every=1) as log:
            optimizer.apply([keras.ops.zeros(v.shape) for v in model.trainable_variables])
            log.step()
        read = read_log(tmp_path / f"{i}.jsonl")
        assert {each.module for each in read.observations()} == paths <= set(read.modules)
        assert len(list(read.observations())) == 2 * len(paths)
