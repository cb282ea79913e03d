"""The code of docs/keras.md runs as it stands there."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LossScaleOptimizer
from halfstep.explain.report.run import read_log
from tests.keras.common import keras, numbers, on
from tests.test_readme import BLOCKS

pytestmark = pytest.mark.filterwarnings("ignore")
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1, name="head")])


def test_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS["keras fit"], {"keras": keras, "build": build, "x": X, "y": Y})
    assert "rule 'head'" in capsys.readouterr().out
    assert len(read_log("run.jsonl").steps) == 1


@on("tensorflow")
def test_a_tape():
    import tensorflow as tf

    model = build()
    before = numbers(model.trainable_variables[0])
    names = {"model": model, "x": X, "y": Y, "tf": tf, "loss_fn": keras.losses.MeanSquaredError()}
    exec(BLOCKS["keras tape"], names | {"optimizer": LossScaleOptimizer(keras.optimizers.SGD(0.1))})
    assert not np.array_equal(numbers(model.trainable_variables[0]), before)


@on("torch")
def test_a_loop_of_torch():
    import torch

    import halfstep
    from halfstep.edits import FULL, Rule

    model = build()
    names = {"model": model, "halfstep": halfstep, "Rule": Rule, "FULL": FULL}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(BLOCKS["keras modules"], names)
    with names["session"] as session:
        assert session.assignment.of("head").reason == "rule 'head'"
