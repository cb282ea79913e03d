"""Functions that mark the call stack, so that `observe/locator.py` can tell halfstep's own frames from a model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def begin_pass(run: Callable[[], Result]) -> Result:
    """Runs a forward or a backward pass; its callers are not part of the model, and their frames are not searched."""
    return run()


def cast_at_boundary(value: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor, or a batch with a `to` method, cast at the entry or exit of a module."""
    return value.to(dtype)
