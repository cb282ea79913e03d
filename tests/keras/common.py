"""What the tests of the Keras adapter share; importing it skips a module where Keras, or its backend, is missing."""

import random

import pytest

keras = pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras", exc_type=ImportError)
BACKEND = keras.backend.backend()


def on(*backends):
    """Marks a test of these backends only."""
    return pytest.mark.skipif(BACKEND not in backends, reason=f"of {', '.join(backends)}; this is {BACKEND}")


def numbers(value):
    return keras.ops.convert_to_numpy(value)


def seed():
    """Has names of layers and random numbers begin anew; `keras.utils.set_random_seed` imports TensorFlow for it."""
    keras.utils.clear_session()
    random.seed(0)
