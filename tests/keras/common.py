"""What the tests of the Keras adapter share."""

import random

import keras
import pytest

BACKEND = keras.backend.backend()


def on(*backends):
    """Marks a test of these backends only."""
    return pytest.mark.skipif(BACKEND not in backends, reason=f"of {', '.join(backends)}; this is {BACKEND}")


def everywhere(*words):
    """Marks which rows are fast on each backend; torch, the quickest, has all rows fast."""
    return pytest.mark.slow_but(*[""] if BACKEND == "torch" else words)


def numbers(value):
    return keras.ops.convert_to_numpy(value)


def seed():
    """Has names of layers and random numbers begin anew; `keras.utils.set_random_seed` imports TensorFlow for it."""
    keras.utils.clear_session()
    random.seed(0)
