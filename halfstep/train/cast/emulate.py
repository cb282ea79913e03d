"""Tensor-core arithmetic on a device that lacks it: products of low matrices are computed in fp32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import FormatError
from halfstep.formats import LOW_FORMATS, Format
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
# oneDNN's LSTM layer: torch takes it for bf16, and for fp16 without gradients where the CPU has fp16 units.
_LSTM = aten.mkldnn_rnn_layer.default
_LSTM_BACKWARD = aten.mkldnn_rnn_layer_backward.default
_MIXING = (FLASH_ATTENTION_CPU, FLASH_ATTENTION_CPU_BACKWARD, _LSTM_BACKWARD)

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
        FLASH_ATTENTION_CPU,
        FLASH_ATTENTION_CPU_BACKWARD,
        _LSTM,
        _LSTM_BACKWARD,
    }
)

# Products that write into a tensor of the caller's, each with the function that computes the same.
WRITERS: Mapping[OpOverload, OpOverload] = {
    aten.addmm_.default: aten.addmm.default,
    aten.baddbmm_.default: aten.baddbmm.default,
    aten.addbmm_.default: aten.addbmm.default,
    aten.addmv_.default: aten.addmv.default,
    aten.mm.out: aten.mm.default,
    aten.addmm.out: aten.addmm.default,
    aten.bmm.out: aten.bmm.default,
    aten.baddbmm.out: aten.baddbmm.default,
    aten.addbmm.out: aten.addbmm.default,
    aten.mv.out: aten.mv.default,
    aten.addmv.out: aten.addmv.default,
    aten.dot.out: aten.dot.default,
    aten.vdot.out: aten.vdot.default,
}


def _addbmm(
    addmm: Callable[..., Tensor], addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    for each, other in zip(a, b, strict=True):
        addend, beta = addmm(addend, each, other, beta=beta, alpha=alpha), 1
    return addend


def _conv_tbc(addmm: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, pad, pad))
    length = x.size(0) - weight.size(0) + 1
    out = bias.expand(length * x.size(1), weight.size(2))
    for step, tap in enumerate(weight):
        out = addmm(out, x[step : step + length].flatten(0, 1), tap)
    return out.view(length, x.size(1), weight.size(2))


# Torch computes these on every device, and so on tensor cores, as a chain of products each of which adds to a result
# that is kept in the low format. The function gets `addmm` first.
SUMS_OF_PRODUCTS: Mapping[OpOverload, Callable[..., Tensor]] = {
    aten.addbmm.default: _addbmm,
    aten.conv_tbc.default: _conv_tbc,
}


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
        if low not in LOW_FORMATS:
            raise FormatError(f"{low} cannot be emulated; use {' or '.join(map(str, reversed(LOW_FORMATS)))}")
        super().__init__()  # type: ignore[no-untyped-call]
        self.low = low
        self._dtype = low.dtype

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes a product of `low` operands in fp32, and runs everything else as it is."""
        if any(map(_dispatches, types)):
            traced = any(map(holds_shapes, types))  # as DTensor asks for shapes
            return func(*args, **(kwargs or {})) if traced else NotImplemented
        named = {} if kwargs is None else kwargs
        if func in PRODUCTS and self._is_low(func, args, named):
            return self._lstm(*args) if func is _LSTM else self._product(func, args, named)
        if func in WRITERS and self._is_low(func, args, named):
            return self._write(func, args, named)
        if func is _POWER and args[1] in POWERS and args[0].dtype is self._dtype is torch.float16:
            return self._product(func, args, named)
        if is_composite(func) and any(isinstance(a, Tensor) and a.is_nested for a in args):
            low = func in _OF_NESTED and self._is_low(func, args, named)
            return self._product(func, args, named) if low else as_called(func, args, named)
        if is_composite(func):
            with self:
                return in_parts(func, args, named)
        return as_called(func, args, named)

    def _is_low(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        low = self._dtype
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if func in _MIXING:
            return operands[0].dtype is low
        return all(t.dtype is low for t in operands)

    def _product(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        low = self._dtype
        if func in SUMS_OF_PRODUCTS:
            return SUMS_OF_PRODUCTS[func](
                lambda *a, **named: self._product(aten.addmm.default, a, named), *args, **kwargs
            )
        full = [a.float() if isinstance(a, Tensor) and a.dtype is low else a for a in args]
        named = {k: v.float() if isinstance(v, Tensor) and v.dtype is low else v for k, v in kwargs.items()}
        result = func(*full, **named)
        if isinstance(result, Tensor):
            return result.to(low)
        if func is FLASH_ATTENTION_CPU:  # its second output, the log of the sums of exponentials, is fp32 by itself
            return result[0].to(low), result[1]
        return tuple(t.to(low) if isinstance(t, Tensor) and t.is_floating_point() else t for t in result)

    def _lstm(self, x: Tensor, *args: Any) -> Any:
        """Computes an LSTM layer: as one fp32 operation if gradients are on, otherwise time step by time step."""
        # Without gradients, results are rounded in each time step, as in torch without oneDNN's LSTM kernel.
        weight_ih, weight_hh, bias_ih, bias_hh, hidden, cell, reverse = args[:7]
        if torch.is_grad_enabled():
            return self._product(_LSTM, (x, *args), {})
        gates_of = partial(self._product, aten.addmm.default, kwargs={})
        from_inputs = gates_of((bias_ih, x.flatten(0, 1), weight_ih.t())).unflatten(0, x.shape[:2])
        outputs = []
        for from_input in reversed(from_inputs) if reverse else from_inputs:
            gates = gates_of((bias_hh, hidden, weight_hh.t())).add_(from_input)
            enter, forget, candidate, leave = gates.chunk(4, 1)
            cell = (forget.sigmoid() * cell).add_(enter.sigmoid() * candidate.tanh())
            hidden = leave.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs[::-1] if reverse else outputs), hidden, cell, None

    def _write(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        named = dict(kwargs)
        target: Tensor = named.pop("out") if "out" in named else args[0]
        result = self._product(WRITERS[func], args, named)
        if target.shape != result.shape:
            target.resize_(result.shape)
        return target.copy_(result)


def is_emulated(func: OpOverload, args: Sequence[Any]) -> bool:
    """Tells whether an operation on low tensors is computed in fp32 where a session emulates."""
    return func in PRODUCTS or func in WRITERS or (func is _POWER and args[1] in POWERS)


def _dispatches(kind: Any) -> bool:
    """Tells whether a class of tensors has a `__torch_dispatch__` of its own."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
