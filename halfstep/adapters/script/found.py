"""Finds which models a script trains, from its optimizers, from the modules it calls and from its backward passes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from halfstep.errors import SessionError
from halfstep.torch_internals import is_tracing, parameters_of
from halfstep.train.scale.loss import leaves_of, pair_outputs


class CallWatch:
    """While on, calls `called` with each module that is about to be called; while off, it costs nothing."""

    # A forward pre-hook would run too late: torch has looked up `forward` by then, and a session changes the class.

    def __init__(self, called: Callable[[nn.Module], None]) -> None:
        self.on = False
        self._before = call = vars(nn.Module)["__call__"]

        @functools.wraps(call)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self.on and not is_tracing():
                called(module)
            return call(module, *args, **kwargs)

        self._watched = __call__

    def start(self) -> None:
        """Reports calls of modules from now on."""
        self.on = True
        if vars(nn.Module)["__call__"] is self._before:
            nn.Module.__call__ = self._watched  # type: ignore[method-assign]

    def stop(self) -> None:
        """Stops reporting calls; the patch stays as a pass-through if other code, such as torch.fx, has wrapped it."""
        self.on = False
        if vars(nn.Module)["__call__"] is self._watched:
            nn.Module.__call__ = self._before  # type: ignore[method-assign]


class Strays(nn.Module):
    """Holds tensors that an optimizer updates but no module owns, such as loss weights; stays fp32 at every level."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            parameters_of(self)[f"stray_{number}"] = tensor  # type: ignore[assignment]  # also what is no nn.Parameter


class ByHand(Optimizer):
    """A placeholder optimizer for a script that updates weights by hand; its step changes nothing."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(list(dict.fromkeys(params)), {})  # roots may share some

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: the script itself makes the update."""


class Outsiders:
    """Names the models whose weights change although the session does not train them; looks at pass 1, 2, 4, 8 ..."""

    def __init__(self) -> None:
        self._passes = 0
        self._seen: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # by id, with values at the first sight
        self.names: dict[str, None] = {}
        """The types of the models, in the order in which they were found."""

    def look(self, outputs: Sequence[Tensor], own: Collection[int]) -> None:
        """Looks at a backward pass from `outputs`; `own` has the ids of what the session trains."""
        self._passes += 1
        if self._passes & (self._passes - 1):
            return
        self.find(own)
        for leaf in leaves_of(outputs):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own and id(leaf) not in self._seen:
                self._seen[id(leaf)] = weakref.ref(leaf), _sample(leaf)

    def find(self, own: Collection[int]) -> None:
        """Names the models of which weights have changed since they were first seen."""
        changed = []
        for key, (there, before) in list(self._seen.items()):
            leaf = there()
            if leaf is None or key in own:
                del self._seen[key]
            elif not torch.equal(_sample(leaf), before):
                changed.append(leaf)
                del self._seen[key]
        if changed:
            roots = roots_of(changed, nn.Module())
            self.names.update(dict.fromkeys(type(root).__name__ for root in roots))


def _sample(t: Tensor) -> Tensor:
    return t.detach().flatten()[:64].cpu().clone()


def alias_of(optimizer: Optimizer) -> Optimizer:
    """Returns another object with the very attributes of an optimizer, for a session to hold in its place."""
    # Only what the script itself holds keeps its optimizer alive, so that the optimizer is freed when it is in plain
    # Python.
    alias: Optimizer = object.__new__(type(optimizer))
    alias.__dict__ = optimizer.__dict__
    return alias


def trained_by(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns the tensors that these optimizers update, in the optimizers' order, each tensor once."""
    found = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return list({id(p): p for p in found}.values())


def newest(optimizers: Sequence[Optimizer]) -> tuple[list[Optimizer], list[Optimizer]]:
    """Splits optimizers into those in use and those that a newer optimizer has replaced; returns both lists."""
    taken: set[int] = set()
    kept: list[Optimizer] = []
    replaced: list[Optimizer] = []
    for optimizer in reversed(optimizers):
        own = {id(p) for p in trained_by([optimizer])}
        if own & taken:
            replaced.append(optimizer)
        else:
            kept.append(optimizer)
            taken |= own
    return kept[::-1], replaced


def roots_of(parameters: Sequence[Tensor], called: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules that own any of these parameters, sorted by the first parameter that each owns."""
    places = {id(p): place for place, p in reversed(list(enumerate(parameters)))}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]  # a million objects, so no more
    modules = [each for each in modules if not isinstance(each, Strays)]
    if not any(each is called for each in modules):
        modules.append(called)
    inner: set[int] = set()
    first: dict[int, int] = {}
    for module in modules:
        try:
            inner.update(id(child) for child in module.modules() if child is not module)
            owned = min((places[id(p)] for p in module.parameters() if id(p) in places), default=None)
        except AttributeError:  # its __init__ has not run yet
            continue
        if owned is not None:
            first[id(module)] = owned
    roots = [module for module in modules if id(module) in first and id(module) not in inner]
    written = [root for root in roots if not _is_program(root)]
    if {id(p) for root in roots for p in root.parameters()} == {id(p) for root in written for p in root.parameters()}:
        roots = written  # the others are programs that were traced from these
    return sorted(roots, key=lambda module: first[id(module)])


def _is_program(root: nn.Module) -> bool:
    """Returns whether `torch.jit` or `torch.export` made a module: what holds its parameters has no code."""
    if isinstance(root, torch.jit.ScriptModule):
        return True
    holders = [part for part in root.modules() if next(part.parameters(recurse=False), None) is not None]
    return all(type(part) is nn.Module or isinstance(part, fx.GraphModule) for part in holders)


def paired(tensors: Any, directions: Any) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor | None, ...]]:
    """Returns a pass's outputs and their gradients (None for 1); None for outputs that halfstep cannot scale."""
    given = [each if each is None or isinstance(each, Tensor) else list(each) for each in (tensors, directions)]
    try:
        return pair_outputs(*given)
    except SessionError:
        return None, ()
