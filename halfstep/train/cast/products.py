"""Tensor-core arithmetic on a device that lacks it: products of low tensors, computed in fp32 and rounded once.

As kernels of the op engine they are three operations, which autograd and torch.compile know: so the gradient of a
product is again a product in fp32 of low operands, rounded once, and so is a gradient of a gradient. While the mode
`Emulation` is on, which makes one operation of each, these kernels do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn.attention import SDPBackend

from halfstep.formats import Format, as_format, is_low, round_nearest
from halfstep.modes import as_called, in_parts, is_composite
from halfstep.plan.optable import Action
from halfstep.torch_internals import (
    ADDMM_ACTIVATION,
    FLASH_ATTENTION_CPU,
    FLASH_ATTENTION_CPU_BACKWARD,
    TRILINEAR,
    DispatchKey,
    OpOverload,
    TorchDispatchMode,
    attention_kernel,
    call_by_key,
    forced_keys,
    holds_shapes,
    in_functorch,
    keys_excluded_here,
    keys_included_here,
    mode_stack,
    recomputed,
    saved_tensor_hooks,
    version_of,
)
from halfstep.train.cast.opkernels import RECURRENT, Act, OpSite, make_act

aten = torch.ops.aten
Way = Callable[["ProductSite", torch.dtype, Sequence[Any], Mapping[str, Any]], Any]

KEEP_LOW_FROM = 1 << 14
"""Products with an operand of this many elements keep their operands low for the backward pass, as native ones do.

Smaller ones keep the fp32 forms: Python's part in keeping them low costs more than the product.
"""

_LAYERS = tuple(name for name in RECURRENT if not name.endswith("_cell"))
_ATTENTION = "scaled_dot_product_attention"
# Run as the products that they consist of: what they round in between is a part of their arithmetic.
IN_PARTS = ("einsum", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "tensordot", "inner")
_OPERATIONS = (
    "linear matmul mm bmm mv addmm addmv baddbmm dot vdot bilinear _addmm_activation addbmm conv_tbc "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution"
)
EMULATED = frozenset({*_OPERATIONS.split(), *IN_PARTS, *_LAYERS, _ATTENTION})
"""Names of the aten operations of the op table that compute products in fp32 where a session emulates."""

ALSO_EMULATED = ("pow.Tensor_Scalar", "_grouped_mm")
"""Overloads that no row of the table casts, but that take many times fp32's time in low precision."""


_FLASH = (FLASH_ATTENTION_CPU, FLASH_ATTENTION_CPU_BACKWARD)  # whose masks and sums may be fp32
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
        *_FLASH,
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

    supports_higher_order_operators = sees_parts = True

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
            if all(t.dtype is self._low for t in operands[: 1 if func in _FLASH else None]):
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


class ProductSite(OpSite):
    """An op made of products; what `OpSite` runs on low tensors, it computes in fp32 and rounds once."""

    def __init__(self, overload: OpOverload, device_type: str, place: Any = None) -> None:
        super().__init__(overload, device_type, place)
        self.in_one = self.name in _LAYERS
        self._by = _WAYS.get(self.name, _rounded_once)
        self.direct = self._emulated

    def _emulated(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the op in fp32 if its operands are low, and rounds the result."""
        low = None if _WITHIN.functorch else _low_format(args, kwargs)
        if low is None or (not self.in_one and any(isinstance(mode, Emulation) for mode in mode_stack())):
            return self.plain(*args, **kwargs)
        if in_functorch() is None:
            return self._by(self, low, args, kwargs)
        _WITHIN.functorch = True  # which sees the fp32 operation again
        try:
            return self._by(self, low, args, kwargs)
        finally:
            _WITHIN.functorch = False


class _Within(threading.local):
    functorch = False  # whether the thread runs a product's fp32 operation under a transform of torch.func


_WITHIN = _Within()


@cache
def make_product(overload: OpOverload, device_type: str, action: Action, place: Any = None) -> Act:
    """Returns the function that runs a call of a product as `action` says, and emulates it; `place` as in `OpSite`."""
    site = ProductSite(overload, device_type, place)
    act = make_act(site, "infer" if action == "pass" else action)

    def once(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return site.excluded(keyset, args, kwargs) if _WITHIN.functorch else act(keyset, args, kwargs)

    return once


def _rounded_once(site: ProductSite, low: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes a product of `low` operands in fp32 and rounds its results to `low`."""
    wide = _Widened(low)
    args, kwargs = [wide(a) for a in args], {name: wide(value) for name, value in kwargs.items()}
    with wide.kept_low(of_operands_alone=not site.in_one):
        out = site.plain(*args, **kwargs)
    return wide.rounded(out) if isinstance(out, Tensor) else tuple(map(wide.rounded, out))


def _in_parts(site: ProductSite, low: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a composite op as the ops that it consists of, with the kernels of their own rows."""
    with forced_keys(keys_included_here(), keys_excluded_here().remove(site.key).remove(site.place)):
        out: Tensor = call_by_key(site.overload)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return out.to(low)


def _linear(site: ProductSite, low: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes a linear layer; torch adds the bias to a result already rounded if the input has gaps."""
    x, has_bias = args[0], (args[2] if len(args) > 2 else kwargs.get("bias")) is not None
    in_parts = has_bias and x.dim() > 2 and not x.is_contiguous()
    return (_in_parts if in_parts else _rounded_once)(site, low, args, kwargs)


def _attention(site: ProductSite, low: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes attention; the backward pass reads the rounded result, as the native kernel's does."""
    given = {**dict(zip(site.arguments, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    if not _is_eager_training(query, key, value) or attention_kernel(**given) != SDPBackend.FLASH_ATTENTION.value:
        return _rounded_once(site, low, args, kwargs)
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        mask = mask.float()
    causal = given.get("is_causal", False)
    return _Attention.apply(query, key, value, mask, causal, given.get("scale"), _Widened(low))  # type: ignore[no-untyped-call]


def _power(site: ProductSite, low: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    emulate = low is torch.float16 and args[1] in POWERS and in_functorch() is None
    return _Power.apply(*args) if emulate else site.plain(*args, **kwargs)  # type: ignore[no-untyped-call]


class _Power(torch.autograd.Function):
    """The square or cube of a low tensor, computed in fp32 and rounded; the gradient in torch's order of operations."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, exponent: int) -> Tensor:
        ctx.save_for_backward(base)
        ctx.exponent = exponent
        return base.float().pow(exponent).to(base.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (base,), lower = ctx.saved_tensors, ctx.exponent - 1
        power = base if lower == 1 else _Power.apply(base, lower)  # type: ignore[no-untyped-call]
        return grad * (power * ctx.exponent), None


class _Attention(torch.autograd.Function):
    """CPU attention of low tensors in fp32; keeps its operands and its result low."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
        mask, causal, scale, wide = settings
        out, sums = FLASH_ATTENTION_CPU(*map(wide.widen, (query, key, value)), 0.0, causal, attn_mask=mask, scale=scale)
        rounded: Tensor = wide.rounded(out)
        ctx.save_for_backward(query, key, value, rounded, sums, mask)
        ctx.settings = causal, scale, wide
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *low, sums, mask = ctx.saved_tensors
        causal, scale, wide = ctx.settings
        operands = [wide.widen(t) for t in (grad, *low)]
        grads = FLASH_ATTENTION_CPU_BACKWARD(*operands, sums, 0.0, causal, attn_mask=mask, scale=scale)
        return (*map(wide.rounded, grads), None, None, None, None)


class _Rounded(torch.autograd.Function):
    """Rounds fp32 values, and their gradients, to the values of a format, in code that torch.compile traces.

    Compiled code may leave out a cast to a low format that a cast to fp32 follows; it cannot leave out this arithmetic.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return round_nearest(t, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Rounded.apply(grad, ctx.fmt), None  # type: ignore[no-untyped-call]


class _Widened:
    """Widens the operands of one product, and can have autograd keep their low forms in place of the fp32 ones."""

    def __init__(self, low: torch.dtype) -> None:
        self._low = low
        traced = keys_included_here().has(DispatchKey.PythonDispatcher) and in_functorch() is None
        self.traced = as_format(low) if traced else None  # transforms of torch.func cannot take `_Rounded` here
        self._operands: list[Tensor] = []
        self._wide: list[Tensor] = []

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype is not self._low:
                return value
            wide = self.widen(value)
            self._operands.append(value)
            self._wide.append(wide)
            return wide
        return [self(item) for item in value] if isinstance(value, (list, tuple)) else value

    def widen(self, operand: Tensor) -> Tensor:
        if self.traced is None:
            return operand.float()
        with recomputed():  # so that compiled code keeps the low form for its backward pass
            return self._round(operand.float())

    def rounded(self, wide: Tensor) -> Tensor:
        return self._round(wide).to(self._low)

    def _round(self, wide: Tensor) -> Tensor:
        return wide if self.traced is None else _Rounded.apply(wide, self.traced)  # type: ignore[no-untyped-call]

    def kept_low(self, *, of_operands_alone: bool) -> AbstractContextManager[Any]:
        """A context in which autograd keeps low operands, if backward needs `of_operands_alone`."""
        if all(t.numel() < KEEP_LOW_FROM for t in self._operands) or not _is_eager_training(*self._operands):
            return nullcontext()
        if saved_tensor_hooks(False) is not None:  # another's, which would not see what autograd saves
            return nullcontext()
        kept = {
            wide.data_ptr(): low.detach()
            for low, wide in zip(self._operands, self._wide, strict=True)
            if low.stride() == wide.stride()
        }
        return saved_tensors_hooks(partial(_pack, kept, self._low if of_operands_alone else None), _unpack)


def _pack(kept: Mapping[int, Tensor], low: torch.dtype | None, saved: Tensor) -> Any:
    """Returns what is kept of a tensor that autograd saves: the low operand that it was widened from, if it is one."""
    if saved.dtype is not torch.float32:
        return saved
    operand = kept.get(saved.data_ptr())
    if operand is not None and saved.storage_offset() == 0:
        same = operand.as_strided(saved.size(), saved.stride(), operand.storage_offset())
        return same, version_of(same)
    return saved if low is None else (saved.detach().to(low), 0)  # a rearranged operand: no value is lost


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    kept, version = packed
    if version_of(kept) != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{kept.dtype} operand of shape {list(kept.shape)} of an emulated product is at version "
            f"{version_of(kept)}; expected version {version}"
        )
    if kept.untyped_storage().nbytes() == 0 < kept.numel():
        raise RuntimeError(
            f"the memory of a {kept.dtype} operand of shape {list(kept.shape)} of an emulated product was freed before "
            "a backward pass that reads it, as fully_shard does after the first one"
        )
    wide: Tensor = kept.float()
    return wide


def _is_eager_training(*operands: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and any(t.requires_grad for t in operands)
        and all(type(t) in (Tensor, Parameter) and not t.is_nested for t in operands)
        and not mode_stack()
        and in_functorch() is None
    )


def _low_format(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the low dtype of all floating-point tensors among the arguments; None if they differ or are wider."""
    found: torch.dtype | None = None
    values = [*args, *kwargs.values()]
    for value in values:  # and what lists among them hold
        if isinstance(value, Tensor):
            dtype = value.dtype
            if dtype is not found and (dtype.is_floating_point or dtype.is_complex):
                if found is not None or not is_low(dtype):
                    return None
                found = dtype
        elif isinstance(value, (list, tuple)):
            values += value
    return found


_WAYS: Mapping[str, Way] = {
    "linear": _linear,
    _ATTENTION: _attention,
    "pow": _power,
    **dict.fromkeys(IN_PARTS, _in_parts),
}
