"""A small CNN on CIFAR-10 with fit, on any backend: KERAS_BACKEND=jax python examples/keras_fit.py --data FOLDER"""

import argparse
from pathlib import Path

import keras
from data import cifar10

from halfstep.adapters.keras import LogCallback, LossScaleOptimizer, apply_plan, set_plan
from halfstep.edits import FULL, Rule
from halfstep.plan.levels import level

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True, help="a folder with cifar-10-batches-py, or an .npz file")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--level", default="O1")
parser.add_argument("--low", default="bf16")
parser.add_argument("--out", type=Path, default=Path("keras_fit"), help="where the log and the model go")
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

images, labels, test_images, test_labels = (
    each.numpy().transpose(0, 2, 3, 1) if each.ndim == 4 else each.numpy() for each in cifar10(args.data)
)
keras.utils.set_random_seed(0)
plan = level(args.level, args.low)
if plan.ops != "none":
    plan = plan.edit(Rule("head", FULL))  # the softmax at the end in fp32
set_plan(plan)
model = keras.Sequential([keras.Input((32, 32, 3))])
for width in (args.width, 2 * args.width, 4 * args.width):
    model.add(keras.layers.Conv2D(width, 3, padding="same", use_bias=False))
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.ReLU())
    model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.GlobalAveragePooling2D())
model.add(keras.layers.Dense(10, activation="softmax", name="head"))
print(apply_plan(model, plan))

optimizer = LossScaleOptimizer(keras.optimizers.Adam(2e-3), plan.scale)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
per_epoch = min(args.steps, len(images) // args.batch)
history = model.fit(
    images[: per_epoch * args.batch],
    labels[: per_epoch * args.batch],
    batch_size=args.batch,
    epochs=max(1, args.steps // per_epoch),
    verbose=0,
    callbacks=[LogCallback(args.out, plan)],
)
model.save(args.out / "model.keras")
_, accuracy = model.evaluate(test_images, test_labels, verbose=0)
print(f"{accuracy:.1%} of the test images right, loss {history.history['loss'][-1]:.4f}")
print(f"halfstep report {args.out} draws the page")
