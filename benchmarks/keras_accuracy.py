"""A CNN on CIFAR-10 and an LSTM on IMDB in Keras: mixed bf16 through halfstep against fp32, same seeds, same batches.

    KERAS_BACKEND=jax python benchmarks/keras_accuracy.py --data FOLDER [--json FILE]

Needs the extra [keras]. FILE keeps the figures of other backends. The criterion: the mean loss on the test set in bf16
is within two standard deviations, over the seeds, of that in fp32. Exits with 1 if a model misses it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import keras
import numpy as np
import torch

from halfstep.adapters.keras import LossScaleOptimizer, apply_plan, set_plan
from halfstep.edits import FULL, Rule
from halfstep.explain.report.lines import plain
from halfstep.lab.workloads.cifar_resnet import normalize, read_images
from halfstep.lab.workloads.imdb_lstm import encode, read_reviews, tokenize, vocabulary
from halfstep.machine import read_machine
from halfstep.plan.levels import level
from halfstep.plan.plan import Plan

SEEDS = (0, 1, 2)
WORDS, LENGTH = 5000, 60
TESTED = 4000  # images or reviews of the test set
PLANS = {"fp32": level("O0", "bf16"), "bf16": level("O1", "bf16").edit(Rule("head", FULL))}
Data = tuple[np.ndarray[Any, Any], ...]


def images(folder: Path) -> Data:
    """Returns training images and labels of CIFAR-10, then those of the test set; channels come last."""
    found = read_images(folder)
    train, test = (normalize(each).permute(0, 2, 3, 1).numpy() for each in (found.x_train, found.x_test))
    return train, found.y_train.numpy(), test[:TESTED], found.y_test.numpy()[:TESTED]


def reviews(folder: Path) -> Data:
    """Returns the last words of IMDB's training reviews and their verdicts, then those of the test set."""
    train, test = read_reviews(folder)
    ids = vocabulary([tokenize(text) for _, text in train], WORDS - 2)
    words = [encode([tokenize(text) for _, text in each], ids, LENGTH).numpy() for each in (train, test)]
    verdicts = [np.array([[label] for label, _ in each], "float32") for each in (train, test)]
    chosen = np.random.default_rng(0).permutation(len(words[1]))[:TESTED]  # they come in order of their verdicts
    return words[0], verdicts[0], words[1][chosen], verdicts[1][chosen]


def cnn() -> keras.Model:
    """Returns the CNN: three blocks of convolution and normalization."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for width in (8, 16, 32):
        model.add(layers.Conv2D(width, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))  # 0.99 lags behind the weights of so few steps
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10, activation="softmax", name="head"))
    return model


def lstm() -> keras.Model:
    """Returns the LSTM over embedded words."""
    layers = keras.layers
    head = layers.Dense(1, activation="sigmoid", name="head")
    return keras.Sequential([keras.Input((LENGTH,)), layers.Embedding(WORDS, 32), layers.LSTM(32), head])


WORK: dict[str, tuple[Callable[[Path], Data], Callable[[], keras.Model], str, int]] = {
    "cifar_cnn": (images, cnn, "sparse_categorical_crossentropy", 250),
    "imdb_lstm": (reviews, lstm, "binary_crossentropy", 200),
}


def train(build: Callable[[], keras.Model], data: Data, loss: str, plan: Plan, steps: int, seed: int) -> dict[str, Any]:
    """Returns loss and accuracy on the test set after `steps` batches of 64."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(seed)
    set_plan(plan)
    model = build()
    apply_plan(model, plan)
    rate = keras.optimizers.schedules.CosineDecay(4e-3, steps)  # down to 0, where seeds come to agree
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(rate), plan.scale)
    model.compile(optimizer, loss, metrics=["accuracy"])
    x, y, test_x, test_y = data
    order = np.random.default_rng(seed)
    chosen = np.concatenate([order.permutation(len(x)) for _ in range(steps * 64 // len(x) + 1)])[: steps * 64]
    model.fit(x[chosen], y[chosen], batch_size=64, shuffle=False, verbose=0)
    found = model.evaluate(test_x, test_y, batch_size=500, verbose=0, return_dict=True)
    return {"seed": seed, "loss": found["loss"], "accuracy": found["accuracy"]}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the figures of the models that are done, beside those of other backends that are there."""
    before = json.loads(path.read_text(encoding="utf-8"))["backends"] if path.exists() else {}
    told = {
        "command": shlex.join(["python", "benchmarks/keras_accuracy.py", *sys.argv[1:]]),
        "keras": keras.__version__,
        "machine": plain(read_machine(torch.device("cpu"))),
        "backends": before | {keras.backend.backend(): rows},
    }
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Trains every model in both formats with each seed, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds cifar10/ and imdb/")
    parser.add_argument("--work", choices=list(WORK), action="append", help="only this one; repeatable")
    parser.add_argument("--steps", type=int, help="training steps (default: 250 or 200, by model)")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    rows = []
    for name in options.work or WORK:
        load, build, loss, steps = WORK[name]
        data = load(options.data)
        runs = {
            low: [train(build, data, loss, plan, options.steps or steps, seed) for seed in SEEDS]
            for low, plan in PLANS.items()
        }
        losses = {low: [run["loss"] for run in each] for low, each in runs.items()}
        difference, allowed = mean(losses["bf16"]) - mean(losses["fp32"]), 2 * stdev(losses["fp32"])
        rows.append(
            {"model": name, "steps": options.steps or steps, "difference": difference, "allowed": allowed, "runs": runs}
        )
        accuracy = {low: mean(run["accuracy"] for run in each) for low, each in runs.items()}
        print(
            f"{name} on {keras.backend.backend()}: loss {mean(losses['bf16']):.4f} in bf16, "
            f"{mean(losses['fp32']):.4f} in fp32, difference {difference:+.4f}, allowed {allowed:.4f}; accuracy "
            f"{accuracy['bf16']:.1%} and {accuracy['fp32']:.1%}",
            flush=True,
        )
        if options.json is not None:
            write(options.json, rows)
    return int(any(abs(row["difference"]) > row["allowed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
