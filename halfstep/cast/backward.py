"""Backward kernels that compute in fp32 because torch's low-precision kernels are slower; they round the result once.

The plan does not change: inputs and results have the formats of the op table, as with a product that accumulates in
fp32. The kernels act only in the backward passes of open sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from halfstep.formats import is_low
from halfstep.machine import WideBackward


def wide_attention(stock: Any, limits: Callable[[], WideBackward]) -> Callable[..., Any]:
    """Returns a kernel for the backward pass of CPU attention, which computes in fp32 if that is faster."""
    # The kernel calls torch's own kernel, `stock`. The forward pass stays in low precision: torch's forward kernel is
    # faster in it, and a forward in fp32 would keep more memory for the backward pass.

    def kernel(keyset: Any, grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Sequence[Tensor]:
        low = query.dtype
        if not is_low(low) or not goes_wide(limits(), query.size(-1), max(query.size(-2), key.size(-2))):
            found: Sequence[Tensor] = stock.call_boxed(keyset, grad, query, key, *rest, **kwargs)
            return found
        args = [_widened(value) for value in (grad, query, key, *rest)]
        wide = stock.call_boxed(keyset, *args, **{name: _widened(value) for name, value in kwargs.items()})
        return tuple(g.to(low) for g in wide)

    return kernel


def goes_wide(limits: WideBackward, width: int, length: int) -> bool:
    """Returns whether attention with this head width and length runs its backward pass in fp32.

    `length` is the number of queries or of keys, whichever is larger. `limits` are pairs (largest width, largest
    length) in the order of their widths.

    >>> [goes_wide(((32, 512), (64, 256)), width, 300) for width in (32, 33, 65)]
    [True, False, False]
    """
    return length <= next((longest for widest, longest in limits if width <= widest), -1)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and is_low(value.dtype) else value
