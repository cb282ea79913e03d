"""Backward kernels that torch computes slowly in a low-precision format: they run in fp32 and round the result once.

The plan does not change: formats of inputs and results are those of the op table, as with a product that accumulates in
fp32. This holds in the backward passes of open sessions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from halfstep.formats import LOW_DTYPES
from halfstep.machine import WideBackward


def wide_attention(stock: Any, limits: Callable[[], WideBackward]) -> Callable[..., Any]:
    """Returns a kernel for the backward pass of CPU attention, which runs torch's own kernel, `stock`.

    Within `limits()`, low tensors are cast to fp32 and the gradients are rounded back. The forward pass runs in low
    precision in any case: it is faster in torch, and no more memory is kept for backward.
    """

    def kernel(keyset: Any, grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Sequence[Tensor]:
        low = query.dtype
        if low not in LOW_DTYPES or not goes_wide(limits(), query.size(-1), max(query.size(-2), key.size(-2))):
            found: Sequence[Tensor] = stock.call_boxed(keyset, grad, query, key, *rest, **kwargs)
            return found
        args = [_widened(value) for value in (grad, query, key, *rest)]
        wide = stock.call_boxed(keyset, *args, **{name: _widened(value) for name, value in kwargs.items()})
        return tuple(g.to(low) for g in wide)

    return kernel


def goes_wide(limits: WideBackward, width: int, length: int) -> bool:
    """Returns whether attention of a head width and a length runs its backward pass in fp32.

    `length` is that of the queries or the keys, whichever are longer. `limits` are pairs (largest width, largest
    length), widths ascending.

    >>> [goes_wide(((32, 512), (64, 256)), width, 300) for width in (32, 33, 65)]
    [True, False, False]
    """
    return length <= next((longest for widest, longest in limits if width <= widest), -1)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_DTYPES else value
