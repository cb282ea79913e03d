"""Gives code inside a plan the low form of weights that stay in fp32 because no optimizer updates them.

A frozen position table must not turn all that is computed from it into fp32, but user code that writes such a weight
(prototypes, centres: averages, which stand still in bf16) must meet the fp32 weight itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.plan.matching import norm_kind
from halfstep.plan.resolve import ModuleFormats
from halfstep.torch_internals import own_parameter, tree_map_only, without_subclasses
from halfstep.train.cast.ops import Switch

# torch's own forwards of these modules cast what they compute with, or return the format of their input.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CASTING = (nn.Linear, *CONVOLUTIONS, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.PReLU)
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


def read_low(module: nn.Module, formats: ModuleFormats) -> frozenset[str]:
    """Returns the names of a module's weights that its code reads low although they stay in fp32."""
    if not formats.kept or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return frozenset()
    by_torch = type(module).forward.__module__.startswith("torch.nn.modules.")
    if by_torch and (isinstance(module, _CASTING) or norm_kind(module) == "torch"):
        return frozenset()
    return frozenset(formats.kept)


class LowForm(Tensor):
    """The low form of an fp32 weight; what writes into it, or asks for its `data`, gets the weight itself."""

    weight: Tensor
    wrote: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func` with the weights if it writes into one, else with their low forms."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        with without_subclasses():
            if written:
                for each in written:
                    each.wrote()
                args, kwargs = tree_map_only(LowForm, lambda each: each.weight, (tuple(args), kwargs))
                return func(*args, **kwargs)
            out = func(*args, **kwargs)
            read = args[0] if args and isinstance(args[0], LowForm) else None
            if read is None or type(out) is not Tensor:
                return out
            if out.untyped_storage().data_ptr() != read.untyped_storage().data_ptr():
                return out
            return low_form(out, func(read.weight, *args[1:], **kwargs), read.wrote)  # a view, which may be written


def low_form(low: Tensor, weight: Tensor, wrote: Callable[[], None]) -> LowForm:
    """Returns `low` as the low form of `weight`; `wrote` is called when code writes into it."""
    form: LowForm = low.as_subclass(LowForm)
    form.weight, form.wrote = weight, wrote
    return form


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[LowForm]:
    """Returns the low forms that a call would write into, or whose memory it would hand out."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")  # such as __iadd__
    if in_place or operator or func in _DATA or name == "__setitem__":
        first = args[0] if args else None
        places = first if isinstance(first, (list, tuple)) else [first]
    else:
        out = kwargs.get("out")
        places = out if isinstance(out, (list, tuple)) else [out]
    return [each for each in places if isinstance(each, LowForm)]


def attributes(base: type[nn.Module], names: frozenset[str], inside: Switch) -> dict[str, Any]:
    """Returns the attributes of a class above `base` whose instances read some weights low: a property for each."""

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name in names and isinstance(value, nn.Parameter) and inside.is_inside():
            gate: Any = self._halfstep_gate
            if gate is not None:
                gate.written.add(name)
            value = nn.Parameter(value.detach().float(), value.requires_grad) if value.dtype is inside.low else value
        base.__setattr__(self, name, value)

    return {"__setattr__": set_attribute, **{name: _property(name, inside) for name in names}}


def _property(name: str, inside: Switch) -> property:
    def read(self: nn.Module) -> Any:
        weight = own_parameter(self, name)
        if weight is None:  # torch's own way goes on where this raises: it may be a buffer now
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not inside.is_inside():
            return weight
        gate: Any = self._halfstep_gate
        if gate is None or weight.dtype is not torch.float32 or not gate.reads_low(self, name, weight):
            return weight
        low = weight.to(inside.low)
        return (
            low if torch.compiler.is_compiling() else low_form(low, weight, functools.partial(gate.written.add, name))
        )

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(read, write, delete)


def noting_grad_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that notes on the module's gate whether gradients were on when it began."""

    @functools.wraps(forward)
    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate: Any = self._halfstep_gate
        if gate is None:
            return forward(self, *args, **kwargs)
        before, gate.began_with_grad = gate.began_with_grad, torch.is_grad_enabled()
        try:
            return forward(self, *args, **kwargs)
        finally:
            gate.began_with_grad = before

    return noted
