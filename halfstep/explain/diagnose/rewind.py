"""Restores what a run of a closure changes: weights, buffers, attributes, gradients and random state."""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import setitem
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
_KEPT = 2**24  # elements up to which writes into a tensor or array that is an attribute are undone
# what an object may hold whose own attributes are put back; models, optimizers and what else holds others is left
_SIMPLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Tensor, numpy.ndarray, numpy.generic)


@contextmanager
def untouched(roots: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Yields a function that restores the initial state before another run; restores everything when the context ends.

    Hooks on accumulated gradients, as of an optimizer that steps in the backward pass, are off. Calls of a
    DistributedDataParallel wrapper go to the wrapped module, since other processes would mistake a broadcast or a
    reduction for part of their next step.
    """
    rewind = _rewinding(roots, params)
    with ExitStack() as stack:
        for param in params:
            if hooks := post_accumulate_hooks_of(param):
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
            stack.callback(setattr, param, "grad", param.grad)
        stack.callback(rewind)
        stack.callback(put_in_place((wrapper, partial(_locally, wrapper)) for wrapper in wrappers_of(roots)))
        rewind()
        yield rewind


def _locally(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    if wrapper.device_ids:
        given, named = scatter_kwargs(args, kwargs, wrapper.device_ids)
        args, kwargs = given[0], named[0]
    return wrapper.module(*args, **kwargs)


def _rewinding(roots: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Returns a function that puts back the state of this moment, in this order, and clears the gradients."""
    modules = {id(module): module for root in roots for module in root.modules()}.values()
    owned = [(module, attributes(module)) for module in modules]
    buffers = [(buffers_of(m), name, b) for m in modules for name, b in buffers_of(m).items() if b is not None]
    tensors = [b for _, _, b in buffers] + [p for root in roots for p in root.parameters()]
    distinct = {id(t): t for t in tensors if not t.is_meta and t.layout is torch.strided}
    reached = _reached(value for _, own in owned for value in own.values())
    kept = [t for t in reached if is_readable(t) and not (isinstance(t, nn.Parameter) or t.is_inference())]
    undo: list[Callable[[], object]] = [
        *(partial(give_attributes, *each) for each in owned),
        *(partial(_put_back, each, copy.copy(each)) for each in reached if isinstance(each, CONTAINERS)),
        *(partial(_unwrite, t, t.detach().clone(), version_of(t)) for t in kept if t.numel() <= _KEPT),
        *(partial(setitem, *each) for each in buffers),
        *(partial(_unwrite, t, t.detach().clone()) for t in distinct.values()),
        *(partial(setattr, param, "grad", None) for param in params),
        random_state_now(),
        *filter(None, map(_state_of, reached)),
    ]

    def rewind() -> None:
        for each in undo:
            each()

    return rewind


def _unwrite(tensor: Tensor, value: Tensor, version: int | None = None) -> None:
    """Copies a value back into a tensor, if it was written to; without a `version`, if it may have been."""
    changed = version_of(tensor) != version
    if version is None and not (tensor.is_floating_point() or tensor.is_complex()):
        changed = not torch.equal(tensor.detach(), value)
    if changed:
        tensor.data.copy_(value)  # through .data: a raised version count would look like a change by the user


def attributes(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes other than parameters, buffers and submodules; they may hold state of the model."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_STATE}


def _reached(values: Iterable[Any]) -> list[Any]:
    """Returns the values, and everything in the collections and objects of simple values among them, each once."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, (*CONTAINERS, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
        elif _is_simple(value):
            waiting.append(vars(value))
    return list(found.values())


def _is_simple(value: Any) -> bool:
    if isinstance(value, (*_SIMPLE, type)) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return all(isinstance(v, _SIMPLE) and not isinstance(v, nn.Parameter) for v in vars(value).values())


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


def is_readable(value: Any) -> bool:
    """Tells whether a value is a tensor whose elements can be compared and copied."""
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return value.is_nested or value.layout is torch.strided


def _state_of(value: Any) -> Callable[[], object] | None:
    """Returns a function that puts back the state of this moment of a random generator or an array, or None."""
    rows: tuple[tuple[Any, Callable[[Any], Callable[[], object] | None]], ...] = (
        (torch.Generator, lambda it: partial(it.set_state, it.get_state())),
        (random.Random, lambda it: partial(it.setstate, it.getstate())),
        (numpy.random.RandomState, lambda it: partial(it.set_state, it.get_state(legacy=False))),
        (numpy.random.Generator, lambda it: _state_of(it.bit_generator)),
        (numpy.random.BitGenerator, lambda it: partial(setattr, it, "state", copy.deepcopy(it.state))),
        (numpy.ndarray, lambda it: partial(setitem, it, ..., it.copy()) if it.flags.writeable else None),
        ((array, bytearray), lambda it: partial(setitem, it, slice(None), it[:])),
    )
    large = isinstance(value, numpy.ndarray) and value.size > _KEPT
    return None if large else next((keep(value) for kinds, keep in rows if isinstance(value, kinds)), None)


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
