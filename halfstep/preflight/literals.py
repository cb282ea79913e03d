"""Observes tensors made from Python numbers: torch rounds the numbers before any operation sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep.formats import LOW_DTYPES
from halfstep.torch_internals import tree_leaves

_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


class Literals(TorchFunctionMode):
    """Calls `tell(tensor, numbers)` for each tensor of a low format that is made from numbers."""

    def __init__(self, tell: Callable[[Tensor, list[float]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function and examines its result."""
        named = {} if kwargs is None else kwargs
        result = func(*args, **named)
        if func in _FROM_NUMBERS and result.dtype in LOW_DTYPES:
            self._tell(result, list(numbers((*args, *named.values()))))
        return result


def numbers(values: Sequence[Any]) -> Iterator[float]:
    """Yields the numbers in values and in the containers among them."""
    for leaf in tree_leaves(tuple(values)):
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            yield float(leaf)
