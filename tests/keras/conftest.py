import pytest

collect_ignore = ["common.py", "zoo.py"]  # which import Keras, and have no doctests


@pytest.fixture(autouse=True)
def fresh():
    """Leaves no global policy and no names of layers to the next test."""
    from tests.keras.common import keras, seed

    keras.config.set_dtype_policy("float32")
    seed()
    yield
    keras.config.set_dtype_policy("float32")
