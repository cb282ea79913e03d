"""A sentiment LSTM in a GradientTape loop on TensorFlow: python examples/keras_gradient_tape.py --data FOLDER"""

import argparse
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from data import imdb

from halfstep.adapters.keras import LossScaleOptimizer, StepLog, apply_plan, set_plan
from halfstep.plan.levels import level

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="the folder with imdb_train.tsv.gz")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--low", default="fp16")
parser.add_argument("--out", type=Path, default=Path("keras_gradient_tape.jsonl"), help="where the log goes")
args = parser.parse_args()

reviews, verdicts = (each.numpy() for each in imdb(args.data))
keras.utils.set_random_seed(0)
plan = level("O1", args.low)
set_plan(plan)
layers = keras.layers
model = keras.Sequential([keras.Input((100,)), layers.Embedding(5000, 64), layers.LSTM(64), layers.Dense(1)])
apply_plan(model, plan)
optimizer = LossScaleOptimizer(keras.optimizers.Adam(2e-3), plan.scale)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def train_step(text, label):
    with tf.GradientTape() as tape:
        loss = loss_fn(label[:, None], model(text, training=True))
        scaled = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_variables)
    true, _ = tf.clip_by_global_norm(optimizer.unscale(gradients), 1.0)
    optimizer.apply_unscaled(true, model.trainable_variables)
    return loss, [tf.convert_to_tensor(each) for each in gradients]


chosen = np.random.default_rng(0)
with StepLog(args.out, model, optimizer, plan) as log:
    for _ in range(args.steps):
        batch = chosen.integers(0, len(reviews), 64)
        loss, gradients = train_step(tf.constant(reviews[batch]), tf.constant(verdicts[batch]))
        log.step(loss, gradients)
print(f"loss {float(loss):.4f}, {int(optimizer.skipped.numpy())} steps skipped, scale {log.scale:g}")
