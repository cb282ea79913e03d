"""The gradient norm that is logged: that of the step taken, whatever its gradients come as."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LossScaleOptimizer
from tests.keras.common import BACKEND, keras, numbers, on

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("jit", [False] if BACKEND == "torch" else [False, True])
def test_rows_of_an_embedding_that_come_several_times_are_summed(jit):
    """Tokens 1, 4, 1, 1 at a gradient of (1, 1): rows of 3 and 1, each twice, have the norm sqrt(20)."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(6, 2), layers.Flatten()])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)
    model.compile(optimizer, lambda y, p: keras.ops.sum(p), jit_compile=jit)
    before = numbers(model.trainable_variables[0]).copy()
    model.fit(np.array([[1, 4, 1, 1]]), np.ones((1, 8)), verbose=0)
    step = numbers(model.trainable_variables[0]) - before
    assert float(numbers(optimizer.grad_norm)) == pytest.approx(20**0.5)
    assert np.linalg.norm(step) == pytest.approx(20**0.5)


REPLICAS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
from halfstep.adapters.keras import LossScaleOptimizer

strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
rows, tokens = [[3.0, 0.0], [0.0, 4.0]], [[1, 1, 2], [1, 2, 2]]
with strategy.scope():
    dense, table = (keras.Variable(tf.zeros(shape)) for shape in ((2,), (5, 2)))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0)
    optimizer.build([dense, table])

@tf.function
def step(row, places):
    def one(row, places):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense.value * row) + tf.reduce_sum(tf.gather(table.value, places))
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, [dense.value, table.value]), [dense, table])
    strategy.run(one, args=(row, places))

each = strategy.experimental_distribute_values_from_function
step(*(each(lambda c: tf.constant(values[c.replica_id_in_sync_group])) for values in (rows, tokens)))
taken = sum(float(tf.reduce_sum(v.value ** 2)) for v in (dense, table))
print("NORM", round(taken, 3), round(float(optimizer.grad_norm.numpy()) ** 2, 3))
"""


@on("tensorflow")
def test_the_gradients_of_replicas_are_summed():
    """Of a dense variable (3, 4), and of a table two rows of 3, each twice: 9 + 16 + 2 * 2 * 9."""
    run = subprocess.run([sys.executable, "-c", REPLICAS], capture_output=True, text=True, timeout=300)
    assert "NORM 61.0 61.0" in run.stdout, run.stderr[-2000:]
