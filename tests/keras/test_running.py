"""Running statistics after steps that `fit` skips."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import KeepStatistics, LogCallback, LossScaleOptimizer
from halfstep.errors import SetupError
from halfstep.plan.levels import level
from tests.keras.common import keras, numbers

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = np.arange(24, dtype="float32").reshape(12, 2)


def network():
    layers = keras.layers
    frozen = layers.BatchNormalization(trainable=False)
    norm = layers.BatchNormalization(name="norm", momentum=0.5)
    return keras.Sequential([keras.Input((2,)), frozen, norm, layers.Dropout(0.5), layers.Dense(1)])


def fit(bad, callbacks):
    model = network()
    model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.0), 8.0), "mse")
    rows = ROWS.copy()
    rows[list(bad)] = np.inf
    model.fit(rows, ROWS[:, :1], batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert int(numbers(model.optimizer.skipped)) == len({row // 2 for row in bad})
    norm = model.get_layer("norm")
    return numbers(norm.moving_mean), numbers(norm.moving_variance)


@pytest.mark.parametrize("logged", [False, True])
def test_a_skipped_step_leaves_running_statistics_as_they_were(logged, tmp_path):
    """By hand: each batch halves what was, and adds half of its own mean or variance."""
    bad = (0, 5, 11)  # of the first, third and last batch
    mean, variance = np.zeros(2), np.ones(2)
    for batch in (1, 3, 4):
        rows = ROWS[2 * batch : 2 * batch + 2] / np.sqrt(1.001)  # by the frozen layer
        mean, variance = (mean + rows.mean(0)) / 2, (variance + rows.var(0)) / 2
    log = [LogCallback(tmp_path / "run.jsonl", level("O0", "fp16"), every=2)] * logged
    kept = fit(bad, [KeepStatistics(), *log])
    assert kept[0] == pytest.approx(mean, rel=1e-5)
    assert kept[1] == pytest.approx(variance, rel=1e-4)


def test_an_optimizer_that_does_not_count_skips_is_refused():
    model = network()
    model.compile("sgd", "mse")
    with pytest.raises(SetupError, match=r"LossScaleOptimizer\(optimizer\)"):
        model.fit(ROWS, ROWS[:, :1], verbose=0, callbacks=[KeepStatistics()])
