"""The gate around a module's forward: how a call enters the plan, and the casts around it.

A call that an activation checkpoint repeats must run as the original did. Autocast's state, which the checkpoint
restores, does not tell whether that one entered the plan, so it is recognized by its arguments: the same memory.
"""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from dis import opmap
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.pages import MISMATCH, more
from halfstep.torch_internals import (
    StorageWeakRef,
    compiled_inside,
    in_backward,
    in_checkpoint,
    saved_tensor_hooks,
    storage_identity,
    tree_leaves,
)
from halfstep.train.cast.ops import Switch

Values = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
SWITCHED_OFF = (
    "the model's own code has switched autocast off here, and the weights are stored in low precision: keep this "
    f"module in fp32 with a rule, Rule(name, FULL); {more(MISMATCH)}"
)
INSIDE = (
    "an operation got two formats in a forward under the plan: halfstep.check(session, closure) names the operation, "
    f"and the edit that keeps its module in fp32; {more(MISMATCH)}"
)
HELD = (
    "weights are torch.float64 (model.double()?), which no plan casts, and an operation met one with a narrower input, "
    f"such as x.float(): call model.float() before halfstep.initialize; {more(MISMATCH)}"
)
GIVEN = (
    "the model was given a {dtype} tensor, which no plan casts, and an operation met it with another format: pass "
    f"x{{cast}}{{later}}; {more(MISMATCH)}"
)
_IDS = ", or where forward needs integers (F.one_hot), call .float() on what it makes of them"
MADE = (
    "a {dtype} tensor that forward made, or keeps in a buffer, met another format: no plan casts it, and it fails in "
    f"fp32 as well; call {{cast}} on it there; {more(MISMATCH)}"
)
# As torch's errors name the formats that no plan casts: a model may be given ids too, which are not at fault.
_NO_PLAN_CASTS = {
    torch.complex64: re.compile("ComplexFloat|complex<float>|complex64"),
    torch.complex128: re.compile("ComplexDouble|complex<double>|complex128"),
    torch.float64: re.compile("(?<!Complex)Double|(?<!<)double|float64"),
    torch.int64: re.compile("(?<!expected scalar type )Long|long int|int64"),
    torch.int32: re.compile(r"(?<!expected scalar type )\bInt\b|\(int\)|\bint32"),
    torch.uint8: re.compile("Byte|unsigned char|uint8"),
    torch.int16: re.compile(r"\bShort\b|\(short\)|\bshort int|\bint16"),
    torch.int8: re.compile(r"\bChar\b|\bsigned char|\bint8"),
    torch.bool: re.compile(r"\b[Bb]ool\b(?! or )"),
}
# How torch words errors about formats that do not go together.
MIXED = re.compile(
    r"same (dtype|type|scalar type)|equal to src\.dtype|expected (scalar type|dtype)|should be the same|mixed dtype"
    r"|[Tt]ype promoting not supported|dtypes? .*(differ|match)|did not match|have dtype"
    r"|[Nn]orm\w*\" not implemented for '(Long|Int|Short|Byte|Char|Bool|Complex)"
)
_NORM = re.compile("mixed dtype|[Nn]orm.* not implemented")  # errors that name one format at most
_LOW = re.compile("Half|BFloat16|b?float16")
_WEIGHT = re.compile(r"Half|[Ff]loat(?!64)")
_NOBODY_LOOKS = nullcontext()
_MANY = 64  # calls of one module at least, before those whose memory is gone are dropped


def _why_mixed(module: nn.Module, given: Any, error: RuntimeError) -> str | None:
    """Returns why an operation got two formats in a call with the arguments `given`, after which torch said `error`."""
    words, trace = str(error), error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next  # up to what called torch
    if trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]:
        return INSIDE if _LOW.search(words) else None  # of Python code, in words of its own
    if trace is not None and _NORM.search(words):
        words += str(_dtypes(list(trace.tb_frame.f_locals.values())))
    elif not _WEIGHT.search(words):  # it may be of integers, which no plan casts
        return None
    wide = [dtype for dtype, names in _NO_PLAN_CASTS.items() if names.search(words)]
    came = [dtype for dtype in wide if dtype in _dtypes(given)]
    if not came and any(p.dtype in wide for p in module.parameters()):
        return HELD if torch.float64 in wide else None
    if wide:
        dtype = (came or wide)[0]
        later = _IDS if dtype in (torch.int64, torch.int32) else ""
        cast = ".real or .abs()" if dtype.is_complex else ".float()"
        return (GIVEN if came else MADE).format(dtype=dtype, cast=cast, later=later)
    return INSIDE if _LOW.search(words) else None


def _dtypes(values: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


@dataclass
class Around:
    """What a session has run around the forwards that enter its plan from outside, in eager code."""

    emulating: Callable[[], AbstractContextManager[Any]] | None = None  # open during a forward
    begin: Callable[[], None] | None = None  # called before each forward
    before: Callable[[], None] | None = None  # called before each training forward, after `begin`


@dataclass
class Casts:
    """The casts around a forward that enters the plan."""

    region: Callable[[], AbstractContextManager[Any]]  # enters the plan; torch.compile can trace it
    read: Callable[[], Any]  # in eager code faster than `region`: the token for `enter` and `leave`
    enter: Callable[[Any], None]
    leave: Callable[[Any], None]
    cast_in: Values | None = None  # returns the arguments cast
    cast_out: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None  # gets the arguments as they came
    around: Around | None = None
    # Returns why a call of the module with these arguments failed with an error about formats.
    why: Callable[[nn.Module, Any, RuntimeError], str | None] = _why_mixed


def marking(plan: Switch) -> Casts:
    """Returns the casts around a call that casts nothing, with the marker on, as a module inside must not enter."""
    is_on, turn = torch.is_autocast_enabled, partial(torch.set_autocast_enabled, plan.marker)

    def why(module: nn.Module, given: Any, error: RuntimeError) -> str | None:
        return None if is_on(plan.device_type) else SWITCHED_OFF

    return Casts(nullcontext, partial(is_on, plan.marker), lambda _: turn(True), turn, why=why)


class Calls:
    """Remembers which calls of a module that a checkpoint may repeat entered the plan, by their arguments' memory.

    Of several calls with the same arguments the last one is repeated first, as in a backward pass.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[int, ...], tuple[deque[bool], list[StorageWeakRef]]] = {}
        self._room = _MANY

    def note(self, args: Any, kwargs: Any, *, entered: bool) -> None:
        hooked = saved_tensor_hooks(True) is not None
        if not hooked and torch.is_grad_enabled():
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not hooked and not any(leaf.requires_grad for leaf in leaves):
            return
        key, memory = _memory_of(leaves)
        if len(self._ways) >= self._room:
            self._ways = {each: kept for each, kept in self._ways.items() if self._known(each) is not None}
            self._room = max(_MANY, 2 * len(self._ways))
        ways = self._known(key)
        if ways is None:
            ways = deque(maxlen=_MANY)
            self._ways[key] = ways, [StorageWeakRef(storage) for storage in memory]  # type: ignore[no-untyped-call]
        ways.appendleft(entered)

    def repeated(self, args: Any, kwargs: Any) -> bool | None:
        """Returns whether a repeated call entered the plan at first; None if no call with these arguments is known."""
        ways = self._known(_memory_of(tree_leaves((args, kwargs)))[0])
        if ways is None:
            return None
        ways.rotate(-1)  # a graph that is kept is run through again in the same order
        return ways[-1]

    def _known(self, key: tuple[int, ...]) -> deque[bool] | None:
        ways, memory = self._ways.get(key, (None, []))
        return None if any(reference.expired() for reference in memory) else ways  # type: ignore[no-untyped-call]


def _memory_of(leaves: Iterable[Any]) -> tuple[tuple[int, ...], list[Any]]:
    storages = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            try:
                storages.append(leaf.untyped_storage())
            except (RuntimeError, NotImplementedError):  # sparse, or a wrapper: it has none of its own
                continue
    return tuple(storage_identity(storage) for storage in storages), storages


@dataclass
class Gate:
    """How calls of one module enter the plan; deep copies of the module share its gate, pickles do not."""

    plan: Switch
    full: Callable[[nn.Parameter], Tensor]  # the fp32 value of a parameter that is stored low
    lent: Callable[[], AbstractContextManager[Any]]  # in it the session stores all parameters in fp32
    outside: Casts | None = None  # for calls from outside of the model's forward; without them the gate does nothing
    inside: Casts | None = None  # for calls from inside
    asks: bool = False  # whether `inside` enters nothing, so that a call from inside is one of a door
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # they leave the session with it
    calls: Calls = field(default_factory=Calls)
    kept: dict[str, nn.Parameter] = field(default_factory=dict)  # stored in fp32, read low by the module's own code
    written: set[str] = field(default_factory=set)  # of `kept`: written by code inside the plan, read in fp32 since
    own: Callable[[nn.Module], Any] | None = None  # returns the forward that was set on the module, or on its copy
    forward: Callable[..., Any] | None = None  # the function that enters it
    began_with_grad: bool | None = None  # whether gradients were on when the forward began; None: it does not run

    def way(self, args: Any, kwargs: Any) -> Casts | None:
        """Returns the casts around a call; None once the session is closed."""
        # `inside` too if the model itself switched autocast off around the call. A module with casts of its own inside
        # does not ask: there its caller's rule may have switched it off.
        entered = torch.is_autocast_enabled(self.plan.marker)
        if not self.asks or torch.compiler.is_compiling():
            return self.inside if entered else self.outside
        if in_backward():  # the thread's flags cannot tell there, so a call runs as its first run did
            first = self.calls.repeated(args, kwargs)
            if first is not None:
                return self.outside if first else self.inside
            entered = entered and in_checkpoint()
        self.calls.note(args, kwargs, entered=not entered)
        return self.inside if entered else self.outside

    def reads_low(self, module: nn.Module, name: str, weight: Tensor) -> bool:
        """Returns whether code inside the plan gets the low form of a module's fp32 weight, not the weight itself."""
        # Code that has switched gradients off since the forward began is about to write weights; so is what has
        # replaced one.
        if name in self.written or (self.began_with_grad is not False and not torch.is_grad_enabled()):
            return False
        return self.kept.get(name) is weight or module in self.copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self


def run_eager(casts: Casts, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Makes a call under the plan in eager code, with all that belongs around it."""
    around = casts.around
    if around is not None:
        if around.begin is not None:
            around.begin()
        if around.before is not None and module.training and torch.is_grad_enabled():
            around.before()
    given = args, kwargs
    if casts.cast_in is not None:
        args, kwargs = casts.cast_in(args, kwargs)
    with _NOBODY_LOOKS if around is None or around.emulating is None else around.emulating():
        try:
            out = _entered(casts, call, module, *args, **kwargs)
        except RuntimeError as error:
            why = casts.why(module, given, error)
            if why is not None:
                explain(error, type(module).__name__, why)
            raise
        return out if casts.cast_out is None else casts.cast_out(out, *given)


def _entered(casts: Casts, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Makes a call under the plan; a Ctrl-C, wherever it comes, leaves the thread's autocast as it was."""
    token = casts.read()
    try:
        try:
            casts.enter(token)
            return call(*args, **kwargs)
        finally:
            casts.leave(token)
    except BaseException:  # it may have come in the middle of leaving
        casts.leave(token)
        raise


def explain(error: RuntimeError, where: str, why: str) -> None:
    """Adds `where` and `why` to the message of torch's error about mixed formats; other errors stay as they are."""
    if not torch.compiler.is_compiling() and MIXED.search(str(error)) and more(MISMATCH) not in str(error):
        error.args = (f"{error} ({where}: {why})", *error.args[1:])


@compiled_inside
def run_traced(casts: Casts, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Makes a call under the plan with its casts, in a form that torch.compile can trace."""
    given = args, kwargs
    if casts.cast_in is not None:
        args, kwargs = casts.cast_in(args, kwargs)
    with casts.region():
        out = call(module, *args, **kwargs)
    return out if casts.cast_out is None else casts.cast_out(out, *given)
