"""What tells halfstep's own frames on the call stack from a model's: its folder, and functions that mark a place."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from halfstep.torch_internals import compiled_inside

Result = TypeVar("Result")

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def begin_pass(run: Callable[[], Result]) -> Result:
    """Calls `run`, a forward or backward pass, and marks on the call stack where the pass begins."""
    return run()


@compiled_inside
def cast_at_boundary(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value`, a tensor or a batch with a `to` method, cast to `dtype` at the entry or exit of a module."""
    return value.to(dtype)
