"""The gradient norm that is logged: that of the step taken, whatever its gradients come as."""

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LossScaleOptimizer
from tests.keras.common import BACKEND, keras, numbers

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
