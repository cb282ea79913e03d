"""Marks on the stack of calls, by which `observe/locator.py` tells halfstep's own frames from those of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def begin_pass(run: Callable[[], Result]) -> Result:
    """Runs a forward or a backward pass: what called this is no part of the model, and is not looked at."""
    return run()


def cast_at_boundary(value: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor, or a batch with a `to`, cast where a module is entered or left."""
    return value.to(dtype)
