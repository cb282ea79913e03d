"""Copies and pickles of modules with a gate: ordinary fp32 modules of the user's classes."""

from __future__ import annotations

import copy
import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from halfstep.cast.gate import Gate
from halfstep.torch_internals import state_dict_hooks_of, tree_leaves

GATE = "_halfstep_gate"
_PICKLED = "_halfstep_pickled"  # by which thread, from the reduction of a module until the pickler looks at its class
STAND_IN = "_halfstep_stand_in"
BASE = "_halfstep_base"
OURS = frozenset({GATE, STAND_IN})
"""What halfstep keeps in the `__dict__` of a module; here and in `enter.py` (DDP's `join_hook` by `Replicas`)."""


class CheckpointHook:
    """A hook on a module's state_dict; deep copies share it, and a pickled module drops it."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, *args: Any) -> None:
        """Runs the hook."""
        self.run(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves in a submodule that is pickled by itself what does nothing, also where halfstep is not installed."""
        return getattr, (nullcontext(), "__exit__")


class StandIn:
    """What is called in the place of one module's forward; it stays behind when that is copied or pickled."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())  # nothing, in a form that `torch.load(weights_only=True)` takes


def deep_copy_of(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies the module with fp32 parameters: an average held in low weights would lose every small update."""
    gate: Gate | None = self.__dict__.get(GATE)
    for parameter in self.parameters() if gate is not None else ():
        if gate is not None and id(parameter) not in memo:  # a module around this one has copied its own
            full = gate.full(parameter).detach().clone()
            memo[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
    own = _own(type(self), "__deepcopy__", deep_copy_of)
    if own is not None:
        copied: nn.Module = own(self, memo)
        return copied
    twin = self.__class__.__new__(self.__class__)
    memo[id(self)] = twin
    twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
    if gate is not None:
        gate.copies.add(twin)
    return twin


def copy_of(self: nn.Module) -> nn.Module:
    """Copies the module as `copy.copy` does one of the plain class."""
    own = _own(type(self), "__copy__", copy_of)
    if own is not None:
        copied: nn.Module = own(self)
        return copied
    twin = self.__class__.__new__(self.__class__)
    twin.__dict__.update(self.__dict__)
    return twin


def _own(cls: type, name: str, ours: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns a method that is not `ours`: ours may lie between classes of others, such as parametrize's on top."""
    found = (vars(each).get(name) for each in cls.__mro__)
    return next((method for method in found if method is not None and method is not ours), None)


def plain_class(cls: type) -> type:
    """Returns the user's class below one of ours, and any other class itself."""
    plain: type = cls.__dict__.get(BASE, cls)  # of the class itself, not of a base
    return plain


def plain_copies(models: Iterable[nn.Module], *, shared: Iterable[Tensor] = ()) -> list[nn.Module]:
    """Returns copies as ordinary fp32 models that know of no session; what the models share their copies share.

    What is an attribute and was computed, as a loss that forward leaves there, is copied without its graph. Tensors
    that are `shared` are not copied.
    """
    models = list(models)
    attributes = [value for model in models for module in model.modules() for value in vars(module).values()]
    computed = [t for t in tree_leaves(attributes) if isinstance(t, Tensor) and t.grad_fn is not None]
    twins = copy.deepcopy(models, {**{id(t): t.detach().clone() for t in computed}, **{id(t): t for t in shared}})
    for module in {id(module): module for twin in twins for module in twin.modules()}.values():
        for own in OURS:
            module.__dict__.pop(own, None)
        give_class(module, plain_class(type(module)))
        for hooks in state_dict_hooks_of(module):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), CheckpointHook)]:
                del hooks[key]
    return twins


def reduction_of(self: nn.Module, protocol: Any) -> Any:
    """Pickles an ordinary fp32 module of the plain class, which loads where halfstep is not installed.

    What is stored as it is written stays the same tensor, by which the pickler ties it to an optimizer's.
    """
    gate: Gate | None = self.__dict__.get(GATE)
    as_stored = (p for p in self.parameters() if gate is None or gate.full(p).dtype is p.dtype)
    (twin,) = plain_copies([self], shared=[*as_stored, *self.buffers()])
    reduced: Any = twin.__reduce_ex__(protocol)
    if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        self.__dict__[_PICKLED] = threading.get_ident()
    return reduced


def class_of(self: nn.Module) -> type:
    """Returns the class of the module; to the pickler that has just reduced it, the plain class.

    The pickler compares `__class__` with the class that it is to write, and looks once, right after `__reduce_ex__`.
    Any other way to rebuild a module than by its class alone would not load with `weights_only`.
    """
    if self.__dict__.get(_PICKLED) == threading.get_ident():
        del self.__dict__[_PICKLED]
        return plain_class(type(self))
    return type(self)


def give_class(module: nn.Module, cls: type) -> None:
    """Gives a module a class, whatever its class says of that."""
    object.__dict__["__class__"].__set__(module, cls)
