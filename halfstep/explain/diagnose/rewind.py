"""Restores what a run of a closure changes: weights, buffers, attributes, gradients and random state."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.scatter_gather import scatter_kwargs

from halfstep.torch_internals import buffers_of, post_accumulate_hooks_of, version_of
from halfstep.train.cast.copies import OURS
from halfstep.train.cast.enter import put_in_place
from halfstep.train.processes.wrappers import wrappers_of

_NOT_STATE = frozenset(vars(nn.Module())) | OURS
CONTAINERS = (list, deque, dict, set)  # what a model may change in place
_KEPT = 2**24  # elements up to which writes into a tensor that is an attribute are undone


@contextmanager
def untouched(roots: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Yields a function that restores the initial state before another run; restores everything when the context ends.

    Hooks on accumulated gradients, as of an optimizer that steps in the backward pass, are off. Calls of a
    DistributedDataParallel wrapper go to the wrapped module, since other processes would mistake a broadcast or a
    reduction for part of their next step.
    """
    state = _State(roots, params)
    with ExitStack() as stack:
        for param in params:
            stack.callback(_without_hooks(param))
        stack.callback(state.finish)
        stack.callback(put_in_place((wrapper, partial(_locally, wrapper)) for wrapper in wrappers_of(roots)))
        state.rewind()
        yield state.rewind


def _locally(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    if wrapper.device_ids:
        given, named = scatter_kwargs(args, kwargs, wrapper.device_ids)
        args, kwargs = given[0], named[0]
    return wrapper.module(*args, **kwargs)


class _State:
    def __init__(self, roots: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}
        self._buffers = [(m, name, b) for m in modules.values() for name, b in buffers_of(m).items() if b is not None]
        tensors = [b for _, _, b in self._buffers] + [p for root in roots for p in root.parameters()]
        distinct = {id(t): t for t in tensors if not t.is_meta and t.layout is torch.strided}
        self._values = [(t, t.detach().clone()) for t in distinct.values()]
        self._attributes = [(m, attributes(m)) for m in modules.values()]
        reached = _reached(value for _, own in self._attributes for value in own.values())
        self._contents = [(each, copy.copy(each)) for each in reached if isinstance(each, CONTAINERS)]
        self._generators = [put_back for each in reached if (put_back := _state_of(each)) is not None]
        kept = [t for t in reached if is_readable(t) and not (isinstance(t, nn.Parameter) or t.is_inference())]
        self._written = [(t, version_of(t), t.detach().clone()) for t in kept if t.numel() <= _KEPT]
        self._grads = [(p, p.grad) for p in params]
        self._random = random_state_now()

    def rewind(self) -> None:
        """Restores the initial buffers, weights, attributes and random state, and clears the gradients."""
        for module, own in self._attributes:
            give_attributes(module, own)
        for container, contents in self._contents:
            _put_back(container, contents)
        for tensor, version, value in self._written:
            if version_of(tensor) != version:
                tensor.data.copy_(value)
        for module, name, buffer in self._buffers:
            buffers_of(module)[name] = buffer
        for tensor, value in self._values:
            if tensor.is_floating_point() or tensor.is_complex() or not torch.equal(tensor.detach(), value):
                tensor.data.copy_(value)  # through .data: a raised version count would look like a change by the user
        for param, _ in self._grads:
            param.grad = None
        self._random()
        for put_back in self._generators:
            put_back()

    def finish(self) -> None:
        self.rewind()
        for param, grad in self._grads:
            param.grad = grad


def attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes other than parameters, buffers and submodules; they may hold state of the model."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_STATE}


def _reached(values: Iterable[Any]) -> list[Any]:
    """Returns the values, and everything nested in the lists, deques, dicts, sets and tuples among them, each once."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, (*CONTAINERS, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _put_back(container: Any, contents: Any) -> None:
    """Restores the contents of a container if they have changed."""
    both = [[*c.keys(), *c.values()] if isinstance(c, dict) else c for c in (container, contents)]
    if [*map(id, both[0])] != [*map(id, both[1])]:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(contents)


def give_attributes(module: nn.Module, own: Mapping[str, Any]) -> None:
    """Sets the plain attributes of a module to `own`, and removes all others."""
    # Writes to `__dict__`, so that a `__setattr__` of the model does not see these assignments.
    for name in attributes(module).keys() - own.keys():
        del module.__dict__[name]
    module.__dict__.update(own)


def _without_hooks(param: nn.Parameter) -> Callable[[], None]:
    hooks = post_accumulate_hooks_of(param)
    if not hooks:
        return lambda: None
    kept = dict(hooks)
    hooks.clear()
    return lambda: hooks.update(kept)


def is_readable(value: Any) -> bool:
    """Tells whether a value is a tensor whose elements can be compared and copied."""
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.is_nested or value.layout is torch.strided


def _state_of(value: Any) -> Callable[[], object] | None:
    """Returns a function that puts back a random generator's state of this moment; None if it is none."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if type(value).__module__.startswith("numpy.random"):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    return None


def random_state_now() -> Callable[[], None]:
    """Returns a function that puts back the random state of this moment: Python's, numpy's and torch's."""
    python, numbers, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return put_back
