"""Tensor-core arithmetic on a device that lacks it: products of low matrices are computed in fp32 and rounded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import Format
from halfstep.modes import as_called, in_parts, is_composite
from halfstep.torch_internals import (
    ADDMM_ACTIVATION,
    FLASH_ATTENTION_CPU,
    FLASH_ATTENTION_CPU_BACKWARD,
    TRILINEAR,
    OpOverload,
    TorchDispatchMode,
    holds_shapes,
)

aten = torch.ops.aten
_ATTENTION = (FLASH_ATTENTION_CPU, FLASH_ATTENTION_CPU_BACKWARD)  # whose masks and sums may be fp32
_OF_NESTED = (aten.linear.default, aten.matmul.default)  # which a nested tensor cannot take apart
_POWER = aten.pow.Tensor_Scalar
POWERS = (2, 3)  # of fp16: the CPU's own kernel gives the same bits in five times the time

# What tensor cores compute. All else in a network is elementwise or a reduction, in fp16 as fast as in fp32 on a CPU.
PRODUCTS: frozenset[OpOverload] = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.vdot.default,
        ADDMM_ACTIVATION,
        TRILINEAR,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.conv_tbc.default,
        *_ATTENTION,
    }
)


class Emulation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """A dispatch mode that computes products of `low` tensors (fp16 or bf16) as a GPU's tensor cores do.

    Operands are converted to fp32 without loss, multiplied and summed there, and the result is rounded once to `low`;
    an overflow becomes inf. The same holds for a backward pass inside the mode. A product of mixed formats is not
    affected: torch refuses it. A mode may be entered again inside itself; where code may be compiled, enter
    `uncompiled(mode)`.

    >>> from halfstep.formats import FP16
    >>> a = torch.full((1, 2), 256.0, dtype=torch.float16)
    >>> with Emulation(FP16):
    ...     a @ a.T
    tensor([[inf]], dtype=torch.float16)
    """

    def __init__(self, low: Format) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._low = low.dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes a product of `low` operands in fp32, and runs everything else as it is."""
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            traced = any(map(holds_shapes, types))  # as DTensor asks for shapes
            return func(*args, **(kwargs or {})) if traced else NotImplemented
        named = {} if kwargs is None else kwargs
        operands = [a for a in (*args, *named.values()) if isinstance(a, Tensor)]
        is_nested = is_composite(func) and any(t.is_nested for t in operands)
        if func in PRODUCTS or (is_nested and func in _OF_NESTED):
            if all(t.dtype is self._low for t in operands[: 1 if func in _ATTENTION else None]):
                return self._product(func, args, named)
        elif func is _POWER and args[1] in POWERS and args[0].dtype is self._low is torch.float16:
            return self._product(func, args, named)
        elif is_composite(func) and not is_nested:
            with self:
                return in_parts(func, args, named)
        return as_called(func, args, named)

    def _product(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        low = self._low
        full = [a.float() if isinstance(a, Tensor) and a.dtype is low else a for a in args]
        named = {k: v.float() if isinstance(v, Tensor) and v.dtype is low else v for k, v in kwargs.items()}
        result = func(*full, **named)
        if isinstance(result, Tensor):
            return result.to(low)
        if func is FLASH_ATTENTION_CPU:  # its second output, the log of the sums of exponentials, is fp32 by itself
            return result[0].to(low), result[1]
        return tuple(t.to(low) if isinstance(t, Tensor) and t.is_floating_point() else t for t in result)


def is_emulated(func: OpOverload, args: Sequence[Any]) -> bool:
    """Tells whether an operation on low tensors is computed in fp32 where a session emulates."""
    return func in PRODUCTS or (func is _POWER and args[1] in POWERS)
