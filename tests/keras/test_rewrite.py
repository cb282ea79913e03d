"""The one-line switch of mixed precision."""

import gc

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.adapters.keras import LossScaleOptimizer, enable_mixed_precision_graph_rewrite
from halfstep.errors import PlanError, SetupError
from tests.keras.common import BACKEND, keras, numbers

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_models():
    gc.collect()
    yield
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def models():
    return tuple(each for each in gc.get_objects() if isinstance(each, keras.Model))


def test_one_line_switches_mixed_precision_on():
    optimizer = enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.1), others=models())
    model = network()
    layer = model.layers[-1]
    assert (layer.compute_dtype, layer.variable_dtype) == ("float16", "float32")
    assert isinstance(optimizer, LossScaleOptimizer)
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert float(numbers(optimizer.dynamic_scale)) in (65536.0, 32768.0)  # the first may be too high for these numbers
    if BACKEND == "tensorflow":
        import tensorflow as tf

        assert tf.config.optimizer.get_experimental_options()["auto_mixed_precision"] is True


def test_a_fixed_scale_is_taken():
    optimizer = enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.1), 128, others=models())
    assert optimizer.scaling.init == 128.0


def test_a_deleted_model_that_is_not_collected_yet_does_not_count():
    before = models()
    model = network()
    model.itself = model  # a cycle, as compilation makes them
    gc.disable()
    try:
        del model
        assert isinstance(
            enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.1), others=before), keras.Optimizer
        )
    finally:
        gc.enable()


def test_what_comes_too_late_is_refused():
    before = models()
    model = network()
    with pytest.raises(SetupError, match=rf"already built.*'{model.name}'.*apply_plan\(model, level\('O1', 'fp16'\)\)"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.1), others=before)
    with pytest.raises(SetupError, match="'adam' is not a Keras optimizer"):
        enable_mixed_precision_graph_rewrite("adam")
    used = keras.optimizers.SGD(0.1)
    used.build(model.trainable_variables)
    with pytest.raises(SetupError, match="with a new optimizer"):
        enable_mixed_precision_graph_rewrite(used, others=(*before, model))
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(PlanError, match="is already 'mixed_float16'"):
        enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.1), others=(*before, model))
