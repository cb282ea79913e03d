"""Two replicas of TensorFlow: they skip together, and the norm that is logged is that of the sum of their gradients."""

import subprocess
import sys

import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from tests.keras.common import on

REPLICAS = """
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
from halfstep.adapters.keras import LossScaleOptimizer
from halfstep.edits import Scaling

strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
scaling = Scaling("dynamic", init=256.0, growth_interval=3, min=32.0, max=1024.0)
rows = np.ones((12, 2, 3), "float32")
for step, replica in ((2, 0), (6, 1), (7, 1), (8, 0)):
    rows[step, replica] = np.inf

with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), scaling)
    optimizer.build(model.trainable_variables)

@tf.function
def loop_step(row):
    def one(row):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(model(row)) / 2)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
    strategy.run(one, args=(row,))

scales, skipped = [], []
for each in rows:
    values = strategy.experimental_distribute_values_from_function(lambda c: each[c.replica_id_in_sync_group][None])
    loop_step(values)
    scales.append(float(optimizer.dynamic_scale.numpy()))
    skipped.append(int(optimizer.skipped.numpy()))
print("LOOP", scales, skipped, model.trainable_variables[0].numpy().ravel().tolist())

with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), scaling)
    model.compile(optimizer, lambda y, p: tf.reduce_mean(p) / 2)
class Watch(keras.callbacks.Callback):
    scales = []
    def on_train_batch_end(self, batch, logs=None):
        self.scales.append(float(self.model.optimizer.dynamic_scale.numpy()))
model.fit(rows.reshape(24, 3), np.zeros(24), batch_size=2, shuffle=False, verbose=0, callbacks=[Watch()])
print("FIT", Watch.scales, int(optimizer.skipped.numpy()), model.trainable_variables[0].numpy().ravel().tolist())

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
def test_several_replicas_skip_together_and_sum_their_gradients():
    """Overflows in either replica; 8 of 12 steps are made, each with the sum of two halves of a gradient of ones.

    The norm is of a dense variable (3, 4), and of a table two rows of 3, each twice: 9 + 16 + 2 * 2 * 9.
    """
    run = subprocess.run([sys.executable, "-c", REPLICAS], capture_output=True, text=True, timeout=300)
    told = [line for line in run.stdout.splitlines() if line.startswith(("LOOP", "FIT", "NORM"))]
    scales = [256.0, 256.0, 128.0, 128.0, 128.0, 256.0, 128.0, 64.0, 32.0, 32.0, 32.0, 64.0]
    skipped = [0, 0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4]
    weights = [-4.0] * 3
    expected = [f"LOOP {scales} {skipped} {weights}", f"FIT {scales} 4 {weights}", "NORM 61.0 61.0"]
    assert told == expected, run.stderr[-2000:]
