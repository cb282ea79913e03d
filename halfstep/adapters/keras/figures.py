"""Describes Keras tensors: whether they are finite, and how large their values are."""

from __future__ import annotations

from typing import Any

import numpy as np

from halfstep.adapters.keras.installed import keras

ops, tree = keras.ops, keras.tree


def is_floating(value: Any) -> bool:
    """Returns whether a value is a tensor of floating-point numbers."""
    return keras.utils.is_keras_tensor(value) is False and hasattr(value, "dtype") and "float" in str(value.dtype)


def finite(values: Any) -> bool:
    """Returns whether all floating-point numbers in a structure of tensors are finite."""
    return all(bool(np.isfinite(each).all()) for each in _floating(values))


def finite_but_for_masks(values: Any) -> bool:
    """Returns whether all floating-point numbers in tensors are finite or, as in masks, minus infinity."""
    return all(bool((each < np.inf).all()) for each in _floating(values))


def figures(values: Any) -> str:
    """Describes the numbers in tensors as text: the largest finite magnitude, and how many are infinite or NaN."""
    found = _floating(values)
    numbers = np.concatenate([each.ravel() for each in found]) if found else np.zeros(0)
    finite = np.isfinite(numbers)
    largest = np.abs(numbers[finite]).max() if finite.any() else 0.0
    infinite = int(np.isinf(numbers).sum())
    words = [f"magnitudes up to {largest:.4g}"]
    words += [f"{infinite} infinite"] * bool(infinite)
    words += [f"{int(np.isnan(numbers).sum())} NaN"] * bool(np.isnan(numbers).any())
    return ", ".join(words)


def _floating(values: Any) -> list[np.ndarray[Any, Any]]:
    found = [each for each in tree.flatten(values) if is_floating(each)]
    return [np.asarray(ops.convert_to_numpy(ops.cast(each, "float32"))) for each in found]
