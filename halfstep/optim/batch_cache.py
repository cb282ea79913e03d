"""Keeps the batches that an optimizer step has made, so that later steps can reuse them.

A step makes new batches if a parameter, its memory, its optimizer state or the param groups have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.kernels.batch import Batch, Options, in_layout_of
from halfstep.optim.sparse import SparseRows
from halfstep.processes.shards import local

Group = dict[str, Any]


class Placed:
    """A parameter in a batch: its index there, and the memory and state that it had when the batch was made."""

    __slots__ = (
        "address",
        "batch",
        "contiguous",
        "grad_dtype",
        "index",
        "param",
        "shape",
        "state",
        "stride",
        "tensors",
        "weight",
    )

    def __init__(self, batch: Batch, param: Parameter, state: dict[str, Any] | None) -> None:
        self.batch, self.index = batch, len(batch.grads) - 1
        self.param = param
        self.weight = weight = batch.weights[-1]  # keeps its memory alive, so that an equal address is the same memory
        own = local(param)
        self.address, self.shape, self.stride = weight.data_ptr(), own.shape, own.stride()
        self.contiguous = weight.is_contiguous()
        self.grad_dtype = batch.grads[-1].dtype
        self.state = state
        # With an alias, that keeps the memory alive: what `.data` is set to later cannot come to lie at its address.
        self.tensors = [
            (name, t, part.detach(), part.data_ptr(), part.dtype, part.stride())
            for name, t in (state or {}).items()
            if isinstance(t, Tensor) and (part := local(t)) is not None
        ]

    def take(self, param: Parameter, grad: Tensor, state: dict[str, Any] | None) -> bool:
        """Puts the gradient of a new step into the batch and returns True; returns False if the batch does not fit."""
        own = param if type(param) is Parameter else local(param)
        if (
            param is not self.param
            or type(grad) is not Tensor
            or grad.dtype is not self.grad_dtype
            or grad.layout is not torch.strided
            or state is not self.state
            or own.data_ptr() != self.address
            or own.shape != self.shape
            or own.stride() != self.stride
            or grad.shape != self.shape
        ):
            return False
        for name, tensor, _, address, dtype, stride in self.tensors:
            if self.state is None or self.state.get(name) is not tensor:
                return False
            part = tensor if type(tensor) is Tensor else local(tensor)
            if part.data_ptr() != address or part.dtype is not dtype or part.stride() != stride:
                return False
        if not (self.contiguous and grad.is_contiguous()):
            grad = in_layout_of(grad, self.weight)
        self.batch.grads[self.index] = grad
        return True


@dataclass
class BatchCache:
    """An optimizer's parameters, sorted into batches and sparse rows that the next step may reuse.

    `groups` has the batches and the sparse rows of each param group, in the order of the param groups. `lasting` says
    whether the next step may reuse this cache.
    """

    groups: list[tuple[list[Batch], list[SparseRows]]] = field(default_factory=list)
    lasting: bool = False  # whether the next step can use it again
    _placed: dict[int, Placed] = field(default_factory=dict)
    _order: list[Placed] = field(default_factory=list)
    _made_for: list[tuple[Group, list[int], tuple[str, ...]]] = field(default_factory=list)

    def place(self, param: Parameter, batch: Batch, state: dict[str, Any] | None) -> None:
        """Notes that `param`, whose optimizer state is `state`, is the last parameter in `batch`."""
        self._placed[id(param)] = Placed(batch, param, state)

    def complete(self, params: Sequence[Parameter], all_options: Sequence[Options], optimizer: Optimizer) -> None:
        """Records the parameters, param groups and state names that `take` compares later, and sets `lasting`."""
        # `lasting` becomes True if no parameter is in sparse rows, since sparse gradients reach different rows in each
        # step.
        groups = zip(optimizer.param_groups, all_options, strict=True)
        self._made_for = [(group, _ids(group), options.states) for group, options in groups]
        self._order = [self._placed[id(p)] for p in params if id(p) in self._placed]
        self.lasting = len(self._order) == sum(p.numel() > 0 for p in params)

    def take(
        self, params: list[Parameter], grads: list[Tensor], all_options: Sequence[Options], optimizer: Optimizer
    ) -> bool:
        """Puts the gradients of a new step into the batches and returns True; returns False if the cache does not fit.

        The cache does not fit if parameters, param groups or optimizer states have changed since `complete`. If False
        is returned, some batches may have new gradients already, so the caller must discard the cache.
        """
        groups = optimizer.param_groups
        if len(params) != len(self._order):  # parameters without elements stand nowhere
            kept = [pair for pair in zip(params, grads, strict=True) if pair[0].numel() or pair[1].numel()]
            params, grads = [p for p, _ in kept], [grad for _, grad in kept]
        if len(params) != len(self._order) or len(groups) != len(self._made_for):
            return False
        for (group, ids, names), now, options in zip(self._made_for, groups, all_options, strict=True):
            if group is not now or ids != _ids(now) or names != options.states:
                return False
        states = optimizer.state
        for placed, param, grad in zip(self._order, params, grads, strict=True):
            if not placed.take(param, grad, states.get(param)):
                return False
        return True

    def release(self) -> None:
        """Drops the gradients from the batches, so that `zero_grad` can free their memory."""
        for batches, _ in self.groups:
            for batch in batches:
                batch.grads[:] = batch.weights


def _ids(group: Group) -> list[int]:
    return [id(p) for p in group["params"]]
