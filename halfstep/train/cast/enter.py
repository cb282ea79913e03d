"""Enters a plan around a module's own forward, by giving the module a subclass of its class.

Forward hooks or a `forward` attribute on the instance would not do: each of the two breaks at least one of Ctrl-C,
torch.compile, deepcopy, pickle and DataParallel.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from halfstep.errors import SessionError
from halfstep.pages import MISMATCH, more
from halfstep.torch_internals import (
    buffers_of,
    class_index_above,
    compiled_module,
    forget_sharded,
    is_sharding,
    is_super,
    parameters_of,
)
from halfstep.train.cast.copies import (
    BASE,
    GATE,
    STAND_IN,
    StandIn,
    class_of,
    copy_of,
    deep_copy_of,
    give_back_forward,
    give_class,
    is_bound,
    plain_class,
    reduction_of,
)
from halfstep.train.cast.gate import Gate, explain, run_eager, run_traced
from halfstep.train.cast.opkernels import Act, OpSite
from halfstep.train.cast.ops import Switch
from halfstep.train.cast.reading import attributes, noting_grad_mode

F = nn.functional
_LAYER_NORM, _BATCH_NORM = nn.LayerNorm.forward, nn.BatchNorm1d.forward  # as torch wrote them
_FUNCTIONS, _UNCAST = (F.layer_norm, F.batch_norm), {torch.float32, torch.int64}  # of which no kernel casts
SAVING = ("save", "export", "push_to_hub", "to_onnx")
"""How the names of methods begin that save the model; called outside of its forward, they find fp32 weights."""
AGAIN = "_halfstep_again"  # makes a class of ours over another one
OUTSIDE = (
    "a parameter that the session stores in low precision was combined with another format outside of the model's "
    f"forward, where the plan does not apply: make this call inside `with session.autocast():`; {more(MISMATCH)}"
)
SHARD_FIRST = (
    "fully_shard was called on a model in a halfstep session, whose optimizer and masters still have the old "
    "parameters. Make a new model and shard it first: "
    "`fully_shard(module, mp_policy=halfstep.fsdp_policy(plan, low=...))`, then make the optimizer from "
    "model.parameters(), then call `halfstep.initialize`"
)


def _set_class(self: nn.Module, cls: type) -> None:
    """Sets the class of a module; this is the setter of `__class__` in the classes that halfstep makes."""
    # When torch removes a module's last parametrization, it sets the class to the base of the module's class. In a
    # session that base is torch's own parametrized class; the module then gets a new class of halfstep's, made from
    # the class that torch had parametrized.
    own = type(self)
    if is_sharding(cls) and not is_sharding(own):
        forget_sharded(own)
        raise SessionError(SHARD_FIRST)
    if cls is plain_class(own) and cls.__module__ == parametrize.__name__:
        cls = getattr(own, AGAIN)(cls.__bases__[0])
    give_class(self, cls)


def _explaining(base: type[nn.Module], inside: Switch) -> dict[str, FunctionType]:
    """Returns wrappers of a user's methods, by name, that add advice to torch's errors about mixed formats."""
    is_on = torch.is_autocast_enabled

    def explaining(name: str, method: FunctionType) -> FunctionType:
        saves = name.startswith(SAVING)

        @functools.wraps(method)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            gate = self.__dict__.get(GATE)
            if gate is None or is_on(inside.marker) or torch.compiler.is_compiling():
                return method(self, *args, **kwargs)
            with gate.lent() if saves else nullcontext():
                try:
                    return method(self, *args, **kwargs)
                except RuntimeError as error:
                    explain(error, f"{type(self).__name__}.{method.__name__}", OUTSIDE)
                    raise

        return call  # type: ignore[return-value]

    own = [cls for cls in base.__mro__ if issubclass(cls, nn.Module) and not cls.__module__.startswith("torch.")]
    found = {name: value for cls in reversed(own) for name, value in vars(cls).items()}
    return {
        name: explaining(name, value)
        for name, value in found.items()
        if isinstance(value, FunctionType) and not name.startswith("__") and not hasattr(nn.Module, name)
    }


@dataclass(frozen=True)
class Options:
    """What a class of halfstep's does in a session; without a `plan` it serves stand-ins alone."""

    plan: Switch | None = None
    door: bool = False  # casts nothing inside the plan, so that calls there pass at once
    explains: bool = False  # methods add advice to errors about mixed formats
    at_call: bool = False  # `__call__` enters the plan too, since hooks compute weights
    reads: frozenset[str] = frozenset()  # weights stored in fp32 that its code reads low inside the plan
    layer_norm: Act | None = None  # what the plan's kernel of this operation does
    batch_norm: OpSite | None = None  # where its kernel of that one is


def _norm_at_once(call: Callable[..., Any], how: Options) -> Callable[..., Any]:
    """Returns a norm's forward inside the plan that the dispatcher need not call; `call` if it is that of no norm."""
    compiling, overridden = torch.compiler.is_compiling, torch.overrides.has_torch_function_variadic
    act, site = how.layer_norm, how.batch_norm

    def layer_norm(self: nn.LayerNorm, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or compiling() or F.layer_norm is not _FUNCTIONS[0]:  # else a plan names it
            return call(self, *args, **kwargs)
        weight, bias = self.weight, self.bias
        if overridden(args[0], weight, bias):
            return call(self, *args)
        return act(None, (args[0], self.normalized_shape, weight, bias, self.eps), {})  # type: ignore[misc]

    def batch_norm(self: nn.BatchNorm1d, *args: Any, **kwargs: Any) -> Any:
        if not compiling() and F.batch_norm is _FUNCTIONS[1]:
            held = (*parameters_of(self).values(), *buffers_of(self).values())
            if {t.dtype for t in held if t is not None} == _UNCAST:
                return site.passed(call, (self, *args), kwargs)  # type: ignore[union-attr]
        return call(self, *args, **kwargs)

    return layer_norm if call is _LAYER_NORM and act else batch_norm if call is _BATCH_NORM and site else call


def _entering(call: Callable[..., Any], how: Options, *, at_call: bool) -> Callable[..., Any]:
    """Returns a forward, or `at_call` a `__call__`, that makes a call as the gate says."""
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    inside = _norm_at_once(call, how)
    door = how.plan if how.door or inside is not call else None
    marker, device_type, low = ("", "", None) if door is None else (door.marker, door.device_type, door.low)

    @functools.wraps(call)
    def entering(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stand_in: Any = self.__dict__.get(STAND_IN)
        if stand_in is not None and not at_call:
            return stand_in.forward(*args, **kwargs)
        if marker and is_on(marker) and is_on(device_type) and dtype_of(device_type) is low:
            return inside(self, *args, **kwargs)
        gate: Any = self._halfstep_gate  # the class's None, or the instance's Gate
        casts = None if gate is None or gate.outside is None else gate.way(args, kwargs)
        if casts is None:
            return call(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return run_traced(casts, call, self, args, kwargs)
        return run_eager(casts, call, self, args, kwargs)

    # each its own code: where torch.compile cannot trace one, it gives up the code, and with it all that share it
    entering.__code__ = entering.__code__.replace()  # type: ignore[attr-defined]
    return entering


def _forward(call: Callable[..., Any], how: Options) -> Callable[..., Any]:
    forward = _entering(call, how, at_call=False)
    return noting_grad_mode(forward) if how.reads else forward


def _enter_own(module: nn.Module, gate: Gate, how: Options) -> None:
    """Enters the plan around a forward that is set on the instance, as TRL and Accelerate do."""
    own = module.__dict__.get("forward")
    if own is None or compiled_module(module) is not None:  # what torch.compile sets calls a module that is entered
        return
    if is_bound(own, module):
        call, gate.own = own.__func__, functools.partial(MethodType, own.__func__)
    else:
        call, gate.own = lambda _, *args, **kwargs: own(*args, **kwargs), lambda _: own
    gate.forward = _forward(call, how)
    module.__dict__["forward"] = MethodType(gate.forward, module)  # a deep copy of which is bound to the copy


def make_class(base: type[nn.Module], how: Options) -> type[nn.Module]:
    """Returns a subclass of `base`, with the same name, whose forward uses the instance's stand-in or gate."""
    # not super(): zero-argument super inside two `with` trips an assertion in dynamo
    forward = _forward(base.forward, how)
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__deepcopy__": deep_copy_of,
        "__copy__": copy_of,
        "__reduce_ex__": reduction_of,
        "__class__": property(class_of, _set_class),
        BASE: base,
        AGAIN: staticmethod(functools.partial(make_class, how=how)),
        GATE: None,
        STAND_IN: None,
        **class_index_above(base),
        **({"forward": forward} if base.forward is not nn.Module.forward else {}),  # a ModuleList keeps having none
        **(attributes(base, how.reads, how.plan) if how.reads and how.plan else {}),
        **(_explaining(base, how.plan) if how.explains and how.plan else {}),
        **({"__call__": _entering(base.__call__, how, at_call=True)} if how.at_call else {}),
    }
    return _subclass(base, namespace)


@functools.cache
def _writing_through(metaclass: Any) -> Any:
    """Returns a metaclass for classes that halfstep makes, which equal the user's class and pass writes on to it."""
    # Code that looks up a layer's class in a table, as Opacus does, finds what it would find without a session. User
    # code (`type(self).count += 1`) and parametrizations write to a module's class. What halfstep's class defines
    # itself, such as `forward`, is written there: code that restores a method must not put ours into the user's class.

    def own(cls: type, name: str) -> bool:
        return BASE not in vars(cls) or name in vars(cls) or name == "__bases__"

    def set_attribute(cls: type, name: str, value: Any) -> None:
        metaclass.__setattr__(cls, name, value) if own(cls, name) else setattr(vars(cls)[BASE], name, value)

    def delete_attribute(cls: type, name: str) -> None:
        metaclass.__delattr__(cls, name) if own(cls, name) else delattr(vars(cls)[BASE], name)

    def equals(cls: type, other: Any) -> Any:
        if is_super(sys._getframe(1).f_code):
            return cls is other
        return metaclass.__eq__(plain_class(cls), plain_class(other) if isinstance(other, type) else other)

    def hashed(cls: type) -> int:
        return metaclass.__hash__(plain_class(cls))  # type: ignore[no-any-return]

    own_methods = {"__setattr__": set_attribute, "__delattr__": delete_attribute, "__eq__": equals, "__hash__": hashed}
    through = type(metaclass.__name__, (metaclass,), own_methods)
    copyreg.pickle(through, _reduce_class)
    return through


def _reduce_class(cls: type) -> Any:
    if BASE in vars(cls):
        return copy.copy, (vars(cls)[BASE],)  # a class is its own copy, also where halfstep is not installed
    return cls.__qualname__  # a class on top of ours: torch's words for those that cannot be found


def _subclass(base: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    # The `__init_subclass__` and the metaclass of `base` are not called, because they may keep registries of classes.
    written: Any = type(base)
    metaclass: Any = _writing_through(written)
    swapped: type[nn.Module]
    try:
        swapped = type.__new__(metaclass, base.__name__, (nn.Module,), namespace)
        type.__setattr__(swapped, "__bases__", (base,))
    except TypeError:  # a base with slots has another layout
        swapped = metaclass(base.__name__, (base,), namespace)
    return swapped


def put_in_place(stand_ins: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Callable[[], None]:
    """Makes calls of each module go to the function paired with it; returns a function that undoes this."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    with ExitStack() as stack:
        for module, forward in stand_ins:
            base = type(module)
            if not hasattr(base, STAND_IN):
                if base not in classes:
                    classes[base] = make_class(base, Options())
                module.__class__ = classes[base]
                stack.callback(give_class, module, base)
                if "forward" in module.__dict__:  # which would hide that of the class
                    stack.callback(module.__dict__.__setitem__, "forward", module.__dict__.pop("forward"))
            module.__dict__[STAND_IN] = StandIn(forward)
            stack.callback(module.__dict__.pop, STAND_IN, None)
        return stack.pop_all().close


def gated(
    module: nn.Module, gate: Gate, how: Options, classes: dict[tuple[type, Options], type[nn.Module]]
) -> Callable[[], None]:
    """Puts a gate around the module's forward, by one of a session's `classes`; returns a function that removes it."""
    base = type(module)
    if (base, how) not in classes:
        classes[base, how] = make_class(base, how)
    swapped = classes[base, how]
    gate.kept = {name: p for name, p in parameters_of(module).items() if p is not None and name in how.reads}
    module.__dict__[GATE] = gate
    module.__class__ = swapped
    _enter_own(module, gate, how)

    def undo() -> None:
        gate.outside = gate.inside = None
        for entered in (module, *gate.copies):
            give_back_forward(entered)
            cls = type(entered)
            if cls is swapped or (entered.__dict__.get(GATE) is gate and BASE in vars(cls)):
                give_class(entered, plain_class(cls))  # else somebody (FSDP2) put one on top: ours passes calls on
                entered.__dict__.pop(GATE, None)

    return undo
