"""Running a closure again and leaving no trace: random state, buffers, weights and gradients are put back.

Whether it does the same each time is seen from what its modules get.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.errors import SessionError
from halfstep.observe.badness import unwrapped
from halfstep.processes import alone

_OF_MODULES = frozenset(vars(nn.Module()))
_CONTAINERS = (list, deque, dict, set)  # what a model may change in place
_KEPT = 2**24  # elements of a tensor that is an attribute, up to which what is written into it is undone
_NEAR = 0.05  # of the largest element, by which the same inputs may differ where a model computed them in low


@contextmanager
def untouched(roots: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Puts all back at its end; the function it gives does so in between, so that the next run starts the same.

    `params` are whose gradients are put aside: within, `p.grad` is None at the start of each run. Hooks that act on
    finished gradients, as of an optimizer that steps in the backward pass, are off, and DistributedDataParallel is.
    """
    state = _State(roots, params)
    with ExitStack() as stack:
        for param in params:
            stack.callback(_without_hooks(param))
        stack.callback(state.finish)
        stack.enter_context(alone(roots))
        state.rewind()
        yield state.rewind


class _State:
    def __init__(self, roots: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}
        self._buffers = [(m, name, b) for m in modules.values() for name, b in m._buffers.items() if b is not None]
        tensors = [b for _, _, b in self._buffers] + [p for root in roots for p in root.parameters()]
        distinct = {id(t): t for t in tensors if not t.is_meta and t.layout is torch.strided}
        self._values = [(t, t.detach().clone()) for t in distinct.values()]
        self._attributes = [(m, _attributes(m)) for m in modules.values()]
        reached = _reached(value for _, own in self._attributes for value in own.values())
        self._contents = [(each, copy.copy(each)) for each in reached if isinstance(each, _CONTAINERS)]
        kept = [each for each in reached if isinstance(each, Tensor) and _is_kept(each)]
        self._written = [(t, t._version, t.detach().clone()) for t in kept]
        self._grads = [(p, p.grad) for p in params]
        self._random = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def rewind(self) -> None:
        """Brings buffers, weights, attributes and random state back to the start, and clears the gradients."""
        self._rewind_attributes()
        for module, name, buffer in self._buffers:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
        for tensor, value in self._values:
            if tensor.is_floating_point() or tensor.is_complex() or not torch.equal(tensor.detach(), value):
                tensor.data.copy_(value)  # through .data: the count of writes would look like a change of the user's
        for param, _ in self._grads:
            param.grad = None
        python, numbers, cpu = self._random
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def _rewind_attributes(self) -> None:
        for module, own in self._attributes:
            _restore(module, own)
        for container, contents in self._contents:
            _put_back(container, contents)
        for tensor, version, value in self._written:
            if tensor._version != version:
                tensor.data.copy_(value)

    def finish(self) -> None:
        self.rewind()
        for param, grad in self._grads:
            param.grad = grad


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns what a module keeps beside its parameters, buffers and modules: states of the model's own, say."""
    return {n: v for n, v in vars(module).items() if n not in _OF_MODULES and not n.startswith("_halfstep")}


def _reached(values: Iterable[Any]) -> list[Any]:
    """Returns values, and what lies in the lists, deques, dicts, sets and tuples among them at any depth, once each."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, (*_CONTAINERS, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _ids(values: Iterable[Any]) -> list[int]:
    return [id(value) for value in values]


def _put_back(container: Any, contents: Any) -> None:
    """Gives a container the contents that it had, where it has others."""
    if isinstance(container, dict):
        same = _ids(container) == _ids(contents) and _ids(container.values()) == _ids(contents.values())
    else:
        same = _ids(container) == _ids(contents)
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(contents)


def _restore(module: nn.Module, own: dict[str, Any]) -> None:
    for name in _attributes(module).keys() - own.keys():
        del module.__dict__[name]
    module.__dict__.update(own)


def _is_kept(tensor: Tensor) -> bool:
    known = isinstance(tensor, nn.Parameter) or tensor.is_inference()
    return not known and _is_readable(tensor) and tensor.numel() <= _KEPT


def _without_hooks(param: nn.Parameter) -> Callable[[], None]:
    hooks: dict[Any, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    if not hooks:
        return lambda: None
    kept = dict(hooks)
    hooks.clear()
    return lambda: hooks.update(kept)


@contextmanager
def leaves_kept(loss: Tensor, params: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Gives the leaves that a backward pass of the loss writes to, without gradients; puts back what others had."""
    leaves = {id(leaf): leaf for leaf in [*params, *_leaves(loss)]}
    own = {id(p) for p in params}
    kept = [(leaf, leaf.grad) for leaf in leaves.values() if id(leaf) not in own]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield list(leaves.values())
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


def _leaves(loss: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


class Inputs:
    """Whether the first module that each run of a closure calls gets the same tensors: others are another batch."""

    def __init__(self) -> None:
        self.same = True
        self._first: list[Tensor] | None = None
        self._noted = False

    def begin_run(self) -> None:
        """Says that what is called next belongs to another run."""
        self._noted = False

    def note(self, given: Any) -> None:
        """Compares what the first module of a run was given with what that of the first run was."""
        if self._noted:
            return
        self._noted = True
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            tensors = [unwrapped(leaf) for leaf in tree_leaves(given) if _is_readable(leaf)]
            if self._first is None:
                self._first = [t.clone() for t in tensors]
            elif len(tensors) != len(self._first) or not all(map(_is_same, tensors, self._first)):
                self.same = False


@contextmanager
def noting_inputs(roots: Sequence[nn.Module]) -> Iterator[Inputs]:
    """Gives what is known of the inputs of a closure's runs."""
    inputs = Inputs()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:  # a function, which copies of the modules share
        inputs.note((args, kwargs))

    modules = {id(module): module for root in roots for module in root.modules()}.values()
    with ExitStack() as stack:
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                stack.callback(module.register_forward_pre_hook(note, prepend=True, with_kwargs=True).remove)
        yield inputs


def _is_readable(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.is_nested or value.layout is torch.strided


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.device != other.device:
        return False
    if not (one.is_floating_point() and other.is_floating_point()):
        return one.dtype == other.dtype and torch.equal(one, other)
    one, other = one.float(), other.float()
    finite = other[torch.isfinite(other)]
    room = _NEAR * float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=room, equal_nan=True)


@contextmanager
def standing_in(models: Sequence[nn.Module], twins: Sequence[nn.Module]) -> Iterator[None]:
    """Makes copies stand in for models: who calls a module of a model calls that of its copy.

    Hooks on the gradients of the models' parameters act on those of the copies. What a copy's forward leaves in an
    attribute, as a loss that is added to the others', its model has too.

    Raises:
        RuntimeError: a module has a `forward` of its own (not its class's), which no copy can stand in for.
    """
    pairs = {
        id(own): (own, other)
        for model, twin in zip(models, twins, strict=True)
        for own, other in zip(model.modules(), twin.modules(), strict=True)
    }
    for own, _ in pairs.values():
        if "forward" in own.__dict__ or isinstance(own, torch.jit.ScriptModule):
            raise RuntimeError(f"{type(own).__name__} has a forward of its own, which a copy cannot stand in for")
    kept = [(own, _attributes(own)) for own, _ in pairs.values()]
    handing_over = _handing_over(list(pairs.values()))
    for own, other in pairs.values():
        own.__dict__["forward"] = _forward_of(other, handing_over)
    try:
        with ExitStack() as stack:
            for own, other in pairs.values():
                for name, param in own._parameters.items():
                    stack.callback(_share_hooks(param, other._parameters.get(name)))
            yield
    finally:
        for own, before in kept:
            _restore(own, before)


def _handing_over(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> Callable[[], AbstractContextManager[None]]:
    """Returns a context for a copy's forward: at the end of the outermost, modules get what their copies were given."""
    first = [(own, other, _attributes(other)) for own, other in pairs]
    running = 0

    @contextmanager
    def handing_over() -> Iterator[None]:
        nonlocal running
        running += 1
        try:
            yield
        finally:
            running -= 1
            for own, other, before in first if running == 0 else ():
                for name, value in _attributes(other).items():
                    if name not in before or before[name] is not value or isinstance(value, _CONTAINERS):
                        own.__dict__[name] = value

    return handing_over


def _forward_of(twin: nn.Module, handing_over: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with handing_over():
            return type(twin).forward(twin, *args, **kwargs)

    return forward


def _share_hooks(param: nn.Parameter | None, twin: nn.Parameter | None) -> Callable[[], None]:
    hooks: dict[Any, Any] | None = getattr(param, "_backward_hooks", None)
    if not hooks or twin is None or twin._backward_hooks:  # the last: shared by two modules, and done
        return lambda: None
    with ExitStack() as stack:
        for hook in list(hooks.values()):
            stack.callback(twin.register_hook(hook).remove)  # type: ignore[no-untyped-call]
        return stack.pop_all().close


@contextmanager
def refused(owner: object, methods: Sequence[str], why: str) -> Iterator[None]:
    """Makes calls of these methods of one object raise a SessionError.

    Raises:
        SessionError: they are refused already: a closure called what runs it.
    """
    if any(name in owner.__dict__ for name in methods):
        raise SessionError(f"this was called inside a closure that blame or check runs; {why}; call it outside")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise SessionError(why)

    for name in methods:
        owner.__dict__[name] = refuse
    try:
        yield
    finally:
        for name in methods:
            del owner.__dict__[name]


def run_to_the_loss(closure: Callable[[], Any], params: Sequence[nn.Parameter]) -> Tensor:
    """Calls the closure and returns the loss that it computed.

    Raises:
        SessionError: it returned no scalar tensor that needs a gradient, or ran the backward pass itself.
    """
    loss = closure()
    what = "give a function without arguments that computes the loss and returns it, as lambda: loss_fn(model(x), y)"
    if not isinstance(loss, Tensor):
        raise SessionError(f"the closure returned {type(loss).__name__}, not the loss; {what}")
    if loss.numel() != 1 or loss.is_complex():
        raise SessionError(f"the closure returned a tensor of shape {tuple(loss.shape)}, not one real number; {what}")
    if any(param.grad is not None for param in params):
        raise SessionError(
            "the closure ran the backward pass; leave it out, it is run by what calls the closure, which is to compute "
            "and return the loss only"
        )
    if not loss.requires_grad:
        raise SessionError(
            "the loss of the closure needs no gradient: it was computed under torch.no_grad(), detached, or from "
            "nothing trainable"
        )
    return loss
