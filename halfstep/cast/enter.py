"""Entering a plan around a module's own forward, by giving the module a subclass of its class.

Hooks and instance attributes each break one of Ctrl-C, torch.compile, deepcopy, pickle and DataParallel.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import logging
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from halfstep.cast.repeated import Calls
from halfstep.errors import SessionError
from halfstep.torch_internals import (
    AVERAGING,
    class_index_above,
    in_backward,
    is_sharding,
    makes_weights,
    state_dict_hooks_of,
    tree_leaves,
)

Values = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
GATE = "_halfstep_gate"
_PICKLED = "_halfstep_pickled"  # by which thread, from the reduction of a module until the pickler looks at its class
STAND_IN = "_halfstep_stand_in"
BASE = "_halfstep_base"
AGAIN = "_halfstep_again"  # makes a class of ours over another one
OURS = frozenset({GATE, STAND_IN})
"""What halfstep keeps in the `__dict__` of a module; written in this file alone."""
EMULATED = "its low format is emulated on this device, in a dispatch mode that compiled code would bypass"
OUTSIDE = (
    "a parameter that the session stores in low precision was combined with another format outside of the model's "
    "forward, where the plan does not apply: make this call inside `with session.autocast():`"
)
SWITCHED_OFF = (
    "the model's own code has switched autocast off here, and the weights are stored in low precision: keep this "
    "module in fp32 with a rule, Rule(name, FULL)"
)
# torch's words for formats that do not go together
_MIXED = re.compile(
    r"same (dtype|type|scalar type)|equal to src\.dtype|expected (scalar type|dtype)|should be the same|mixed dtype"
    r"|[Tt]ype promoting not supported|dtypes? .*(differ|match)|did not match|have dtype"
)
SHARD_FIRST = (
    "fully_shard was called on a model that is in a halfstep session, whose optimizer and masters have its old "
    "parameters: make a new model, and write first "
    "`fully_shard(module, mp_policy=halfstep.fsdp_policy(plan, low=...))`, then the optimizer from model.parameters(), "
    "then `halfstep.initialize`"
)
_LOG = logging.getLogger("halfstep")


@dataclass
class Gate:
    """What is done around one module's forward; shared by deep copies of the module, never pickled.

    `region` makes a context manager that torch.compile can trace; `enter` and `leave` do the same faster in eager code.
    `cast_in` takes and returns (args, kwargs). `cast_out` takes the output, and args and kwargs as they were given.
    `around` is a context for eager calls only (emulation), with which torch.compile runs `uncompiled` instead. `before`
    is called before each eager training forward, and `begin` before any eager one and its casts. `full` gives the fp32
    value of a parameter whose stored form is low. `first` takes its place where
    `marker`, which is on inside the plan, is off.
    """

    region: Callable[[], AbstractContextManager[Any]]
    enter: Callable[[], Any]
    leave: Callable[[Any], None]
    cast_in: Values | None
    cast_out: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None
    full: Callable[[nn.Parameter], Tensor]
    around: Callable[[], AbstractContextManager[Any]] | None = None
    before: Callable[[], None] | None = None
    begin: Callable[[], None] | None = None
    active: bool = True
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # they leave the session with it
    marker: str = ""
    first: Gate | None = None
    uncompiled: Callable[..., Any] | None = None
    calls: Calls = field(default_factory=Calls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self


@dataclass(frozen=True)
class Inside:
    """What tells that a plan is entered: both bits, as in a backward pass the marker is on outside of every forward.

    There a checkpoint switches the device's bit on as its caller had it; the format tells a caller's from the plan's.
    """

    device_type: str
    marker: str
    low: torch.dtype


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


class _OfOneModule:
    """What lies at one module and stays behind when that is copied or pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, ())  # nothing, in a form that `torch.load(weights_only=True)` takes


_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Who has a module; not in its `__dict__`, which is copied and pickled at O0 too, where its class is the user's."""


class _StandIn(_OfOneModule):
    """What is called in the place of one module's forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


def mark(modules: Iterable[nn.Module], owner: object) -> Callable[[], None]:
    """Marks modules as the owner's and returns the undo."""
    marked, sign = list(modules), weakref.ref(owner)
    _OWNERS.update((module, sign) for module in marked)

    def undo() -> None:
        for module in marked:
            if _OWNERS.get(module) is sign:
                del _OWNERS[module]

    return undo


def is_marked(module: nn.Module) -> bool:
    """Tells whether a module has an owner; its copies have none."""
    return module in _OWNERS


def owners(modules: Iterable[nn.Module]) -> list[object]:
    """Returns whose mark modules bear, each once."""
    signs = [sign for module in modules if (sign := _OWNERS.get(module)) is not None]
    return list({id(owner): owner for sign in signs if (owner := sign()) is not None}.values())


def _run_eager(gate: Gate, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    if gate.begin is not None:
        gate.begin()
    if gate.before is not None and module.training and torch.is_grad_enabled():
        gate.before()
    given = args, kwargs
    if gate.cast_in is not None:
        args, kwargs = gate.cast_in(args, kwargs)
    if gate.around is None:
        return _run_inside(gate, forward, module, args, kwargs, given)
    with gate.around():
        return _run_inside(gate, forward, module, args, kwargs, given)


def _run_inside(
    gate: Gate, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, given: tuple[Any, Any]
) -> Any:
    token = gate.enter()
    try:
        out = forward(module, *args, **kwargs)
    finally:
        gate.leave(token)
    return out if gate.cast_out is None else gate.cast_out(out, *given)


def _run_in_region(gate: Gate, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a call under the plan; the forward in it casts, and says that it begins."""
    with nullcontext() if gate.around is None else gate.around():
        token = gate.enter()
        try:
            return call(module, *args, **kwargs)
        finally:
            gate.leave(token)


def _run_generator(
    gate: Gate, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
) -> Generator[Any, Any, Any]:
    """Does the same around each part of a forward that is a generator, and nothing while its caller has the turn."""
    parts: Generator[Any, Any, Any]

    def start(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal parts
        parts = forward(module, *args, **kwargs)
        return next(parts)

    resume: Callable[[], Any] = functools.partial(_run_eager, gate, start, module, args, kwargs)
    while True:
        try:
            value = resume()
        except StopIteration as end:
            return end.value
        try:
            sent = yield value
            go_on, given = parts.send, sent
        except GeneratorExit:
            parts.close()
            raise
        except BaseException as error:
            go_on, given = parts.throw, error
        resume = functools.partial(_run_part, gate, go_on, given, (args, kwargs))


def _run_part(gate: Gate, go_on: Callable[[Any], Any], given: Any, called_with: tuple[Any, Any]) -> Any:
    with ExitStack() as stack:
        if gate.around is not None:
            stack.enter_context(gate.around())
        stack.callback(gate.leave, gate.enter())
        out = go_on(given)
    return out if gate.cast_out is None else gate.cast_out(out, *called_with)


def _run_uncompiled() -> Callable[..., Any]:
    said = False

    def run(*arguments: Any) -> Any:
        nonlocal said
        if not said:
            _LOG.warning("torch.compile is left out for this model: %s", EMULATED)
            said = True
        return _run_eager(*arguments)

    return run


def _run_traced(gate: Gate, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    given = args, kwargs
    if gate.cast_in is not None:
        args, kwargs = gate.cast_in(args, kwargs)
    with gate.region():
        out = forward(module, *args, **kwargs)
    return out if gate.cast_out is None else gate.cast_out(out, *given)


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies the module with fp32 parameters: an average held in low weights would lose every small update."""
    gate: Gate | None = self.__dict__.get(GATE)
    for parameter in self.parameters() if gate is not None else ():
        if gate is not None and id(parameter) not in memo:  # a module around this one has copied its own
            full = gate.full(parameter).detach().clone()
            memo[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
    own = _own(type(self), "__deepcopy__", _deepcopy)
    if own is not None:
        copied: nn.Module = own(self, memo)
        return copied
    twin = self.__class__.__new__(self.__class__)
    memo[id(self)] = twin
    twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
    if gate is not None:
        gate.copies.add(twin)
    return twin


def _copy(self: nn.Module) -> nn.Module:
    own = _own(type(self), "__copy__", _copy)
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


def _plain_class(cls: type) -> type:
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
        give_class(module, _plain_class(type(module)))
        for hooks in state_dict_hooks_of(module):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), CheckpointHook)]:
                del hooks[key]
    return twins


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
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


def _class_of(self: nn.Module) -> type:
    """Returns the class of the module; to the pickler that has just reduced it, the plain class.

    The pickler compares `__class__` with the class that it is to write, and looks once, right after `__reduce_ex__`.
    Any other way to rebuild a module than by its class alone would not load with `weights_only`.
    """
    if self.__dict__.get(_PICKLED) == threading.get_ident():
        del self.__dict__[_PICKLED]
        return _plain_class(type(self))
    return type(self)


def _set_class(self: nn.Module, cls: type) -> None:
    """Sets the class; where torch takes off the one that it made for parametrizations, that below ours goes."""
    own = type(self)
    if is_sharding(cls) and not is_sharding(own):
        raise SessionError(SHARD_FIRST)
    if cls is _plain_class(own) and cls.__module__ == parametrize.__name__:
        cls = getattr(own, AGAIN)(cls.__bases__[0])
    give_class(self, cls)


def give_class(module: nn.Module, cls: type) -> None:
    """Gives a module a class, whatever its class says of that."""
    object.__dict__["__class__"].__set__(module, cls)


def _parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yields the module's own Parameters; to torch's AveragedModel, which averages them, their fp32 values."""
    own = nn.Module.parameters(self, recurse)
    gate = self.__dict__.get(GATE)
    if gate is None or torch.compiler.is_compiling():
        return own
    if sys._getframe(1).f_code is not AVERAGING:
        return own
    return (gate.full(parameter) for parameter in own)  # tensors, as update_parameters accepts


def _explaining(methods: dict[str, FunctionType], inside: Inside) -> dict[str, FunctionType]:
    """Returns methods of a class whose errors of mixed formats, outside of every forward, say what to do.

    Nothing of ours sees an operation there: the rows of the op table are kernels for autocast, which is off.
    """
    is_on = torch.is_autocast_enabled

    def explaining(method: FunctionType) -> FunctionType:
        @functools.wraps(method)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_on(inside.marker) or torch.compiler.is_compiling():
                return method(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except RuntimeError as error:
                if _MIXED.search(str(error)) and OUTSIDE not in str(error):
                    error.args = (f"{error} ({type(self).__name__}.{method.__name__}: {OUTSIDE})", *error.args[1:])
                raise

        return call  # type: ignore[return-value]

    return {name: explaining(method) for name, method in methods.items()}


def _methods(base: type[nn.Module]) -> dict[str, FunctionType]:
    """Returns the methods that a user's class defines beside those of torch's modules."""
    own = [cls for cls in base.__mro__ if issubclass(cls, nn.Module) and not cls.__module__.startswith("torch.")]
    found = {name: value for cls in reversed(own) for name, value in vars(cls).items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, FunctionType) and not name.startswith("__") and not hasattr(nn.Module, name)
    }


def _stays_as_written(module: nn.Module, args: Any, kwargs: Any, *, inside: bool) -> bool:
    """Returns whether a call where autocast is off or in another format runs so: the model's own code has set it.

    That it is `inside` the plan its mark tells, but not in a backward pass, where the mark may be on outside of every
    forward and off in the repetition of what was inside. A checkpoint repeats a call there as it was made.
    """
    gate: Any = module._halfstep_gate
    if gate is None or torch.compiler.is_compiling():
        return inside
    entered: bool | None = gate.calls.repeated(args, kwargs) if in_backward() else None
    if entered is not None:
        return not entered
    gate.calls.note(args, kwargs, entered=not inside)
    return inside


def _with_marker(marker: str, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Makes a call inside the plan with the plan's mark on, by which modules inside see autocast as this one does."""
    if torch.is_autocast_enabled(marker):
        return call(module, *args, **kwargs)
    torch.set_autocast_enabled(marker, True)
    try:
        return call(module, *args, **kwargs)
    finally:
        torch.set_autocast_enabled(marker, False)


def _as_written(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a forward where the model's own code has switched autocast off."""
    try:
        return forward(module, *args, **kwargs)
    except RuntimeError as error:
        if not torch.compiler.is_compiling() and _MIXED.search(str(error)) and SWITCHED_OFF not in str(error):
            error.args = (f"{error} ({type(module).__name__}: {SWITCHED_OFF})", *error.args[1:])
        raise


def _around_call(base: type[nn.Module], door: Inside) -> Callable[..., Any]:
    """Returns the `__call__` of a door whose forward is not all that computes, or not its class's."""
    base_call = base.__call__
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    @functools.wraps(base_call)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate: Any = self._halfstep_gate
        if gate is None or not gate.active:
            return base_call(self, *args, **kwargs)
        inside = is_on(door.marker)
        if inside and is_on(door.device_type) and dtype_of(door.device_type) is door.low:
            return base_call(self, *args, **kwargs)
        if _stays_as_written(self, args, kwargs, inside=inside):
            return _with_marker(door.marker, base_call, self, args, kwargs)
        if torch.compiler.is_compiling():
            return (gate.uncompiled or _run_traced)(gate, base_call, self, args, kwargs)
        return _run_eager(gate, base_call, self, args, kwargs)

    return call


def _around_hooks(base: type[nn.Module]) -> Callable[..., Any]:
    """Returns the `__call__` of a boundary with hooks that compute its weight: under the plan, as forward does."""
    base_call = base.__call__
    is_on = torch.is_autocast_enabled

    @functools.wraps(base_call)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate: Any = self._halfstep_gate
        if gate is None or not gate.active:
            return base_call(self, *args, **kwargs)
        if gate.first is not None and not is_on(gate.marker):
            gate = gate.first
            run: Callable[..., Any] = _run_eager
        else:
            run = _run_in_region
        if torch.compiler.is_compiling():
            run = gate.uncompiled or _run_traced
        return run(gate, base_call, self, args, kwargs)

    return call


def make_class(  # noqa: C901  # two forwards, one of which is a hot path
    base: type[nn.Module], *, door: Inside | None = None, explain: Inside | None = None, at_call: bool = False
) -> type[nn.Module]:
    """Returns a subclass of `base` with its name, whose forward goes to the instance's stand-in or gate.

    That of a `door` does so only where the plan is not entered yet; inside it costs two looks at bits of the thread.
    A module is entered `at_call` where its hooks compute its weight, a door also where its forward is the instance's.
    With `explain` an error of mixed formats in another method of a user's says what to do.
    """
    base_forward = base.forward  # not super(): zero-argument super inside two `with` trips an assertion in dynamo
    is_on = torch.is_autocast_enabled
    run = _run_generator if inspect.isgeneratorfunction(base_forward) else _run_eager

    @functools.wraps(base_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stand_in: Any = self._halfstep_stand_in
        if stand_in is not None:
            return stand_in.forward(*args, **kwargs)
        gate: Any = self._halfstep_gate  # the class's None, or the instance's Gate
        if gate is None or not gate.active:
            return base_forward(self, *args, **kwargs)
        if gate.first is not None and not is_on(gate.marker):
            gate = gate.first
        if torch.compiler.is_compiling() and gate.uncompiled is not None:
            return gate.uncompiled(gate, base_forward, self, args, kwargs)
        if torch.compiler.is_compiling():
            return _run_traced(gate, base_forward, self, args, kwargs)
        return run(gate, base_forward, self, args, kwargs)

    if door is not None:
        device_type, marker, low, through = door.device_type, door.marker, door.low, forward
        dtype_of = torch.get_autocast_dtype

        @functools.wraps(base_forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._halfstep_stand_in is None:
                inside, on = is_on(marker), is_on(device_type)
                if inside and on and dtype_of(device_type) is low:
                    return base_forward(self, *args, **kwargs)
                if _stays_as_written(self, args, kwargs, inside=inside):
                    written = base_forward if on else functools.partial(_as_written, base_forward)
                    return _with_marker(marker, written, self, args, kwargs)
            return through(self, *args, **kwargs)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__deepcopy__": _deepcopy,
        "__copy__": _copy,
        "__reduce_ex__": _reduce_ex,
        "__class__": property(_class_of, _set_class),
        BASE: base,
        AGAIN: staticmethod(functools.partial(make_class, door=door, explain=explain, at_call=at_call)),
        GATE: None,
        STAND_IN: None,
        **class_index_above(base),
        "forward": forward,
        "parameters": _parameters,
        **(_explaining(_methods(base), explain) if explain is not None else {}),
        **({"__call__": _around_hooks(base) if door is None else _around_call(base, door)} if at_call else {}),
    }
    return _subclass(base, namespace)


@functools.cache
def _writing_through(metaclass: Any) -> Any:
    """Returns a metaclass whose classes hand on what is written to them, and are pickled as the class below.

    `type(self).count += 1` and torch's parametrizations write to the class of a module. What the class has itself
    stays there: the class below would otherwise get a function of ours where somebody puts one back.
    """

    def own(cls: type, name: str) -> bool:
        return BASE not in vars(cls) or name in vars(cls) or name == "__bases__"

    def set_attribute(cls: type, name: str, value: Any) -> None:
        metaclass.__setattr__(cls, name, value) if own(cls, name) else setattr(vars(cls)[BASE], name, value)

    def delete_attribute(cls: type, name: str) -> None:
        metaclass.__delattr__(cls, name) if own(cls, name) else delattr(vars(cls)[BASE], name)

    through = type(metaclass.__name__, (metaclass,), {"__setattr__": set_attribute, "__delattr__": delete_attribute})
    copyreg.pickle(through, _reduce_class)
    return through


def _reduce_class(cls: type) -> Any:
    if BASE in vars(cls):
        return copy.copy, (vars(cls)[BASE],)  # a class is its own copy, also where halfstep is not installed
    return cls.__qualname__  # a class on top of ours: torch's words for those that cannot be found


def _subclass(base: type[nn.Module], namespace: dict[str, Any]) -> type[nn.Module]:
    """Returns the subclass without telling the base's `__init_subclass__` and metaclass, which may keep registries."""
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
    """Sends calls of each module to the function beside it and returns the undo; copies of the module are not meant."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    with ExitStack() as stack:
        for module, forward in stand_ins:
            base = type(module)
            if not hasattr(base, STAND_IN):
                if base not in classes:
                    classes[base] = make_class(base)
                module.__class__ = classes[base]
                stack.callback(give_class, module, base)
            module.__dict__[STAND_IN] = _StandIn(forward)
            stack.callback(module.__dict__.pop, STAND_IN, None)
        return stack.pop_all().close


class Entrances:
    """The modules of one session whose forward is entered through a gate; a few subclasses of a class at most."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type[nn.Module], Inside | None, Inside | None, bool], type[nn.Module]] = {}

    def install(
        self, module: nn.Module, gate: Gate, *, door: Inside | None = None, explain: Inside | None = None
    ) -> Callable[[], None]:
        """Sends the module's forward through the gate, that of a `door` where it is first, and returns the undo."""
        base = type(module)
        at_call = makes_weights(module) or (door is not None and "forward" in module.__dict__)
        key = base, door, explain, at_call
        swapped = self._classes.get(key)
        if swapped is None:
            swapped = self._classes[key] = make_class(base, door=door, explain=explain, at_call=at_call)
        for each in (gate, gate.first):
            if each is not None and each.around is not None:
                each.uncompiled = torch.compiler.disable(_run_uncompiled(), reason=EMULATED)  # type: ignore[no-untyped-call]
        module.__dict__[GATE] = gate
        module.__class__ = swapped

        def undo() -> None:
            gate.active = False
            for each in (module, *gate.copies):
                cls = type(each)
                if cls is swapped or (each.__dict__.get(GATE) is gate and BASE in vars(cls)):
                    give_class(each, _plain_class(cls))  # else somebody (FSDP2) put one on top: ours passes calls on
                    each.__dict__.pop(GATE, None)

        return undo
