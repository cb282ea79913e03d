"""The gate around a module's forward: its casts and callbacks, and the functions that run a call through a gate."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.cast.repeated import Calls
from halfstep.pages import MISMATCH, more
from halfstep.torch_internals import compiled_inside, in_backward, in_checkpoint

Values = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
SWITCHED_OFF = (
    "the model's own code has switched autocast off here, and the weights are stored in low precision: keep this "
    f"module in fp32 with a rule, Rule(name, FULL); {more(MISMATCH)}"
)
INSIDE = (
    "an operation got two formats in a forward under the plan: halfstep.check(session, closure) names the operation, "
    f"and the edit that keeps its module in fp32; {more(MISMATCH)}"
)
# How torch words errors about formats that do not go together.
MIXED = re.compile(
    r"same (dtype|type|scalar type)|equal to src\.dtype|expected (scalar type|dtype)|should be the same|mixed dtype"
    r"|[Tt]ype promoting not supported|dtypes? .*(differ|match)|did not match|have dtype"
)
_LOW = re.compile("Half|BFloat16|b?float16")
_LOG = logging.getLogger("halfstep")


@dataclass
class Gate:
    """The casts and callbacks around a module's forward; deep copies of the module share its gate, pickles do not."""

    region: Callable[[], AbstractContextManager[Any]]  # enters the plan; torch.compile can trace it
    read: Callable[[], Any]  # in eager code faster than `region`: the token for `enter` and `leave`
    enter: Callable[[Any], None]
    leave: Callable[[Any], None]
    cast_in: Values | None  # returns the arguments cast
    cast_out: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None  # gets the arguments from before `cast_in`
    full: Callable[[nn.Parameter], Tensor]  # the fp32 value of a parameter that is stored low
    lent: Callable[[], AbstractContextManager[Any]] = nullcontext  # in it the session stores all parameters in fp32
    around: Callable[[], AbstractContextManager[Any]] | None = None  # open during a forward whose operations are seen
    before: Callable[[], None] | None = None  # called before each training forward in eager code, after `begin`
    begin: Callable[[], None] | None = None  # called before each forward in eager code
    active: bool = True  # if False, the gate does nothing
    copies: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)  # they leave the session with it
    marker: str = ""  # an autocast bit that is on inside the plan
    first: Gate | None = None  # used in place of this gate while the marker is off
    calls: Calls = field(default_factory=Calls)
    kept: dict[str, nn.Parameter] = field(default_factory=dict)  # stored in fp32, read low by the module's own code
    written: set[str] = field(default_factory=set)  # of `kept`: written by code inside the plan, read in fp32 since
    began_with_grad: bool | None = None  # whether gradients were on when the forward began; None: it does not run

    def reads_low(self, module: nn.Module, name: str, weight: Tensor) -> bool:
        """Returns whether code inside the plan gets the low form of a module's fp32 weight, and not the weight itself.

        Code that has switched gradients off since the forward began is about to write weights, not to compute with
        them; so has code that has replaced the weight.
        """
        if name in self.written or (self.began_with_grad is not False and not torch.is_grad_enabled()):
            return False
        return self.kept.get(name) is weight or module in self.copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return self


@dataclass(frozen=True)
class Inside:
    """The autocast settings by which a thread tells that it is inside a plan.

    Three conditions must hold: the autocast bit `marker` is on, autocast is on for `device_type`, and its format is
    `low`. The marker is not enough, because in a backward pass it is also on outside of forwards. The format is needed
    because an activation checkpoint restores the caller's own autocast, which may be on for `device_type` in another
    format.
    """

    device_type: str
    marker: str
    low: torch.dtype


def run_eager(gate: Gate, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a forward eagerly, with all that the gate does around it."""
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
    try:
        out = _entered(gate, forward, module, *args, **kwargs)
    except RuntimeError as error:
        if _LOW.search(str(error)):  # else it may be of integers, which no plan casts
            explain(error, type(module).__name__, INSIDE)
        raise
    return out if gate.cast_out is None else gate.cast_out(out, *given)


def _entered(gate: Gate, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Makes a call under the plan; a Ctrl-C, wherever it comes, leaves the thread's autocast as it was."""
    token = gate.read()
    try:
        try:
            gate.enter(token)
            return call(*args, **kwargs)
        finally:
            gate.leave(token)
    except BaseException:  # it may have come in the middle of leaving
        gate.leave(token)
        raise


def explain(error: RuntimeError, where: str, why: str) -> None:
    """Adds `where` and `why` to the message of torch's error about mixed formats; other errors stay as they are."""
    if not torch.compiler.is_compiling() and MIXED.search(str(error)) and more(MISMATCH) not in str(error):
        error.args = (f"{error} ({where}: {why})", *error.args[1:])


def run_in_region(gate: Gate, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a module's `__call__` under the plan, so that its hooks run there too."""
    with nullcontext() if gate.around is None else gate.around():
        return _entered(gate, call, module, *args, **kwargs)


@compiled_inside
def run_traced(gate: Gate, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a forward under the plan with the gate's casts, in a form that torch.compile can trace."""
    given = args, kwargs
    if gate.cast_in is not None:
        args, kwargs = gate.cast_in(args, kwargs)
    with gate.region():
        out = forward(module, *args, **kwargs)
    return out if gate.cast_out is None else gate.cast_out(out, *given)


def stays_as_written(module: nn.Module, args: Any, kwargs: Any, *, inside: bool) -> bool:
    """Returns whether the model itself switched autocast off around this call; then the plan must not switch it on."""
    gate: Any = module._halfstep_gate
    if gate is None or torch.compiler.is_compiling():
        return inside
    if in_backward():  # the thread's flags cannot tell there, so a call runs as its first run did
        entered: bool | None = gate.calls.repeated(args, kwargs)
        if entered is not None:
            return not entered
        inside = inside and in_checkpoint()
    gate.calls.note(args, kwargs, entered=not inside)
    return inside


def with_marker(marker: str, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Makes a call with the plan's marker on, so that modules inside do not take it for a call from outside."""
    # It is for calls that run as written because the model's own code has changed autocast. Without the marker, a
    # module inside would enter the plan.
    if torch.is_autocast_enabled(marker):
        return call(module, *args, **kwargs)
    try:
        try:
            torch.set_autocast_enabled(marker, True)
            return call(module, *args, **kwargs)
        finally:
            torch.set_autocast_enabled(marker, False)
    except BaseException:  # a Ctrl-C may have come in the middle of the line above
        torch.set_autocast_enabled(marker, False)
        raise


def as_written(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a forward in which the model's own code has switched autocast off; an error about mixed formats says so."""
    try:
        return forward(module, *args, **kwargs)
    except RuntimeError as error:
        explain(error, type(module).__name__, SWITCHED_OFF)
        raise
