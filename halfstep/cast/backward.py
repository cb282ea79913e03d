"""Backward kernels that torch has in a low format and computes slowly there: done in fp32 and rounded once instead.

The plan does not change: formats of inputs and results are those of the op table, as with a product that accumulates in
fp32. What acts, acts inside the backward passes of open sessions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
# Up to here fp32 takes 0.4 to 0.7 of the time of bf16 on a CPU with AVX512-BF16 (torch 2.13); above it is slower.
_LONGEST, _WIDEST = 128, 64
_LOW = (torch.bfloat16, torch.float16)


def wide_attention(stock: Any, active: Callable[[], bool]) -> Callable[..., Any]:
    """Returns the kernel of the CPU's attention backward above torch's own, `stock`; it acts where `active()`.

    The forward pass stays low, in which torch is faster, so that nothing more is kept for backward.
    """

    def kernel(keyset: Any, grad: Tensor, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Sequence[Tensor]:
        low = query.dtype
        if low not in _LOW or not _short(query, key) or not active():
            found: Sequence[Tensor] = stock.call_boxed(keyset, grad, query, key, *rest, **kwargs)
            return found
        args = [_widened(value) for value in (grad, query, key, *rest)]
        wide = stock.call_boxed(keyset, *args, **{name: _widened(value) for name, value in kwargs.items()})
        return tuple(g.to(low) for g in wide)

    return kernel


def pays_off() -> bool:
    """Returns whether this CPU is one where it was measured to be faster: AMX computes small low products fast."""
    return not torch.cpu._is_amx_tile_supported()


def _short(query: Tensor, key: Tensor) -> bool:
    return query.size(-1) <= _WIDEST and query.size(-2) <= _LONGEST and key.size(-2) <= _LONGEST


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value
