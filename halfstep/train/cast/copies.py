"""Deep-copies and pickles modules that have a gate, with fp32 parameters; pickles load without halfstep."""

from __future__ import annotations

import copy
import copyreg
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch import Tensor, nn

from halfstep.torch_internals import state_dict_hooks_of, tree_leaves
from halfstep.train.cast.gate import Gate

GATE = "_halfstep_gate"
_TORCHS = frozenset(vars(nn.Module()))
_PICKLED = "_halfstep_pickled"  # by which thread, from the reduction of a module until the pickler looks at its class
STAND_IN = "_halfstep_stand_in"
BASE = "_halfstep_base"
OURS = frozenset({GATE, STAND_IN})
"""The names that halfstep sets in a module's `__dict__`, here and in `enter.py` (`Replicas` sets DDP's `join_hook`)."""


class CheckpointHook:
    """A hook on saving or loading a module's state dict; in copies and pickles of the module it does nothing."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointHook:
        return CheckpointHook(lambda *_: None)  # which does not keep the session alive

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles a function that does nothing in place of the hook, so that the pickle loads without halfstep."""
        return getattr, (nullcontext(), "__exit__")


class StandIn:
    """The function that is called in place of a module's forward; copies and pickles of the module leave it out."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())  # nothing, in a form that `torch.load(weights_only=True)` takes


def deep_copy_of(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copies a module; parameters that are stored low copy themselves as fp32 (`MasterStore`)."""
    # A copy may hold an average of the weights, which would lose every small update if it were stored low.
    own = _own(type(self), "__deepcopy__", deep_copy_of)
    if own is not None:
        return own(self, memo)  # type: ignore[no-any-return]
    twin = self.__class__.__new__(self.__class__)
    memo[id(self)] = twin
    for name, value in [*vars(self).items()]:
        empty = name in _TORCHS and type(value) in (dict, OrderedDict) and not value  # of hooks: ten in each module
        twin.__dict__[name] = type(value)() if empty else copy.deepcopy(value, memo)
    gate: Gate | None = self.__dict__.get(GATE)
    if gate is not None:
        gate.copies.add(twin)
    return twin


def copy_of(self: nn.Module) -> nn.Module:
    """Returns a shallow copy of a module; the classes that halfstep makes have this function as `__copy__`."""
    own = _own(type(self), "__copy__", copy_of)
    if own is not None:
        return own(self)  # type: ignore[no-any-return]
    twin = self.__class__.__new__(self.__class__)
    twin.__dict__.update(self.__dict__)
    return twin


def _own(cls: type, name: str, ours: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns the first method called `name` of a class and its bases that is not `ours`; None if there is none."""
    # `ours` need not be the first: torch's parametrizations put a class of their own above halfstep's.
    found = (vars(each).get(name) for each in cls.__mro__)
    return next((method for method in found if method is not None and method is not ours), None)


def plain_class(cls: type) -> type:
    """Returns the user's class from which halfstep made `cls`; `cls` itself if halfstep did not make it."""
    return cls.__dict__.get(BASE, cls)  # type: ignore[no-any-return]  # of the class itself, not of a base


def forward_set_on(module: nn.Module) -> Any:
    """Returns the forward that a user set on the instance, around which a session may have put its own; or None."""
    found = module.__dict__.get("forward")
    gate: Gate | None = module.__dict__.get(GATE)
    if gate is None or gate.own is None or getattr(found, "__func__", None) is not gate.forward:
        return found
    return gate.own(module)


def give_back_forward(module: nn.Module) -> None:
    """Sets the forward on the instance that `forward_set_on` returns."""
    if "forward" in module.__dict__:
        module.__dict__["forward"] = forward_set_on(module)


def is_bound(forward: Any, module: nn.Module) -> bool:
    """Returns whether a forward is a method bound to this module, so that it can be bound to another."""
    return getattr(forward, "__self__", None) is module


def plain_copies(models: Iterable[nn.Module], *, shared: Iterable[Tensor] = ()) -> list[nn.Module]:
    """Returns copies of models as ordinary fp32 models without a session; what the models share, their copies share."""
    models = list(models)
    attributes = [value for model in models for module in model.modules() for value in vars(module).values()]
    computed = [t for t in tree_leaves(attributes) if isinstance(t, Tensor) and t.grad_fn is not None]
    twins = copy.deepcopy(models, {**{id(t): t.detach().clone() for t in computed}, **{id(t): t for t in shared}})
    for module in {id(module): module for twin in twins for module in twin.modules()}.values():
        give_back_forward(module)
        for own in OURS:
            module.__dict__.pop(own, None)
        give_class(module, plain_class(type(module)))
        for hooks in state_dict_hooks_of(module):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), CheckpointHook)]:
                del hooks[key]
    return twins


def reduction_of(self: nn.Module, protocol: Any) -> Any:
    """Pickles the module as an ordinary fp32 module of the user's class, which loads without halfstep."""
    # Parameters and buffers are not copied, so that an optimizer in the same pickle still refers to the same tensors
    # as the model.
    gate: Gate | None = self.__dict__.get(GATE)
    process = get_spawning_popen()
    shared = [p for p in self.parameters() if process is None or gate is None or gate.full(p).dtype is p.dtype]
    (twin,) = plain_copies([self], shared=[*shared, *self.buffers()])
    if process is not None:  # which shares the memory of the copies by its descriptor, so that they must outlive this
        weakref.finalize(process, list, [twin]).atexit = False
    reduced: Any = twin.__reduce_ex__(protocol)
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        self.__dict__[_PICKLED] = threading.get_ident()
    return reduced


def class_of(self: nn.Module) -> type:
    """Returns the class of the module, or the user's class if the pickler asks for it."""
    if self.__dict__.get(_PICKLED) == threading.get_ident():
        del self.__dict__[_PICKLED]
        return plain_class(type(self))
    return type(self)


def give_class(module: nn.Module, cls: type) -> None:
    """Sets the class of a module, bypassing the `__class__` property of the classes that halfstep makes."""
    object.__dict__["__class__"].__set__(module, cls)
