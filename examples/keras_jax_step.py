"""Fashion-MNIST in a compiled, stateless step of JAX: python examples/keras_jax_step.py --data FOLDER"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from data import fashion_mnist

from halfstep.adapters.keras import LossScaleOptimizer, StepLog, apply_plan, set_plan
from halfstep.plan.levels import level

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with train-images-idx3-ubyte.gz")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--low", default="fp16")
parser.add_argument("--out", type=Path, default=Path("keras_jax_step.jsonl"), help="where the log goes")
args = parser.parse_args()

images, labels = (each.numpy() for each in fashion_mnist(args.data))
keras.utils.set_random_seed(0)
plan = level("O1", args.low)
set_plan(plan)
layers = keras.layers
model = keras.Sequential([keras.Input((1, 28, 28)), layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(10)])
apply_plan(model, plan)
optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3), plan.scale)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def scaled_loss(weights, others, state, x, y):
    outputs, others = model.stateless_call(weights, others, x, training=True)
    loss = loss_fn(y, outputs)
    return optimizer.stateless_scale_loss(state, loss), (loss, others)


@jax.jit
def train_step(weights, others, state, x, y):
    (_, (loss, others)), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(weights, others, state, x, y)
    weights, state = optimizer.stateless_apply(state, gradients, weights)
    return weights, others, state, loss, gradients


weights, others, state = (
    [v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
)
chosen = np.random.default_rng(0)
with StepLog(args.out, model, optimizer, plan) as log:
    for _ in range(args.steps):
        batch = chosen.integers(0, len(images), 64)
        weights, others, state, loss, gradients = train_step(weights, others, state, images[batch], labels[batch])
        log.step(loss, gradients, optimizer_variables=state, trainable_variables=weights)
for variable, value in zip([*model.trainable_variables, *optimizer.variables], [*weights, *state], strict=True):
    variable.assign(value)
print(f"loss {float(loss):.4f}, {int(optimizer.skipped.numpy())} steps skipped, scale {log.scale:g}")
