"""The input of one update: a batch of parameters that are stored alike, and the options of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from halfstep.torch_internals import unflatten

Layout = Literal["full", "low", "copy", "split"]
T = TypeVar("T")
_MOST_KEPT = 256  # tables: those of weights and states, asked for in every step, and those of gradients, which move
_MOST_VIEWS = 4096  # of scratch memory; far more than chunks, unless other parameters take part in every step


class Options(NamedTuple):
    """The numbers of an update, from a param group."""

    lr: float | Tensor
    weight_decay: float
    maximize: bool
    decoupled: bool  # as by Loshchilov & Hutter 2019; else decay is added to the gradient
    numbers: tuple[float, ...]  # the optimizer's own, such as betas and eps, as its kernels take them


@dataclass
class Batch:
    """Parameters of one device, layout and dtype, and what their update needs: lists with one tensor per parameter.

    `weights` are the stored weights. `extras` are the fp32 masters in layout `copy` and the int16 remainders in layout
    `split`, otherwise empty. `grads` are dense, in low or full precision, and still multiplied by the loss scale.
    `states` maps names to the optimizer's state tensors, in the order in which its kernels take them, in the dtype of
    the full weight. An optimizer that counts its updates has the counts in `steps` (0-dim fp32); an update increments
    them before it uses them. With `whole`, weights are not cut into parts, as the update needs their norms.

    A batch is reused from step to step while its tensors and their memory stay the same. Only `grads` change, and they
    keep their dtypes, shapes and memory layouts. `memory` is for an implementation to keep what it derives from the
    tensors.
    """

    layout: Layout
    weights: list[Tensor]
    extras: list[Tensor]
    grads: list[Tensor]
    states: Mapping[str, list[Tensor]] = field(default_factory=dict)
    steps: list[Tensor] = field(default_factory=list)
    whole: bool = False
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the batch."""
        return self.weights[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the update is computed."""
        return self.weights[0].dtype if self.layout == "full" else torch.float32


class Scratch:
    """Flat working memory that is reused from step to step, so that a step allocates nothing large."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, int], Tensor] = {}
        self._views: dict[tuple[Any, ...], tuple[Tensor, list[Tensor]]] = {}
        self._kept: dict[Hashable, Any] = {}
        self._in_graphs: list[Any] = []

    def kept(self, key: Hashable, make: Callable[[], T], *, captured: bool = False) -> T:
        """Returns the value that is kept for `key`, or the result of `make`, which is then kept."""
        # `captured` says that a CUDA graph is being captured. The graph reads the returned value at each replay, so
        # that value is never dropped.
        held = key in self._kept
        value: T = self._kept.pop(key) if held else make()
        if held or not captured:
            self._kept[key] = value
        if captured:
            self._in_graphs.append(value)
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return value

    def views(self, role: str, dtype: torch.dtype, like: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns uninitialised flat memory and views of it in the shapes of `like`."""
        device = like[0].device
        key = (role, device, dtype, *[t.shape for t in like])
        made = self._views.get(key)
        if made is None:
            flat = self._flat(role, device, dtype, sum(t.numel() for t in like))
            made = flat, list(unflatten(flat, like))
            self._views[key] = made
        return made

    def _flat(self, role: str, device: torch.device, dtype: torch.dtype, numel: int) -> Tensor:
        key = (role, device, dtype.itemsize)
        buffer = self._buffers.get(key)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        if buffer is None or buffer.numel() < numel:
            self._views.clear()  # they would keep the smaller buffer
            buffer = self._buffers[key] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel].view(dtype)


def chunks(batch: Batch, limit: int) -> Iterator[Batch]:
    """Yields the batch in parts of about `limit` elements; a larger weight is cut, unless `batch.whole`."""
    part: list[tuple[int, int, int]] = []  # index of the parameter, first and last element; (0, 0) stands for all of it
    size = 0
    for i, weight in enumerate(batch.weights):
        numel = weight.numel()
        if size and size + min(numel, limit) > limit:
            yield _part(batch, part)
            part, size = [], 0
        if batch.whole or numel <= limit or not is_dense(weight):
            part.append((i, 0, 0))
            size += numel
            continue
        for start in range(0, numel, limit):
            end = min(start + limit, numel)
            if end < numel:
                yield _part(batch, [(i, start, end)])
            else:
                part, size = [(i, start, end)], end - start
    if part:
        yield _part(batch, part)


def is_dense(t: Tensor) -> bool:
    """Returns whether `t` fills one block of memory without gaps or overlaps, in whatever order."""
    return t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t)


def resolved(t: Tensor) -> Tensor:
    """Returns `t` without torch's lazy negative and conjugate bits, which kernels do not read."""
    if t.is_conj():
        t = t.resolve_conj()
    return t.resolve_neg() if t.is_neg() else t


def as_real(t: Tensor) -> Tensor:
    """Returns a complex `t` as a real view with a last dimension of size 2 (real, imaginary); a real `t` as it is."""
    return torch.view_as_real(t) if t.is_complex() else t


def in_layout_of(t: Tensor, weight: Tensor) -> Tensor:
    """Returns `t` in the memory order of a dense `weight`: `t` itself if it has that order, otherwise a copy."""
    # Kernels that walk over raw memory would pair the wrong elements of tensors in different orders, for example of a
    # `channels_last` weight and a contiguous gradient.
    if t.stride() == weight.stride() or (t.is_contiguous() and weight.is_contiguous()) or not is_dense(weight):
        return t
    return torch.empty_like(weight, dtype=t.dtype, device=t.device).copy_(t)


def mapped(batch: Batch, change: Callable[[list[Tensor]], list[Tensor]]) -> Batch:
    """Returns the batch with `change` made to each list of tensors that have the elements of the weights."""
    return replace(
        batch,
        weights=change(batch.weights),
        extras=change(batch.extras),
        grads=change(batch.grads),
        states={name: change(tensors) for name, tensors in batch.states.items()},
        memory={},
    )


def _part(batch: Batch, part: list[tuple[int, int, int]]) -> Batch:
    cut = mapped(batch, lambda tensors: [_piece(tensors[i], *ends) for i, *ends in part] if tensors else [])
    return replace(cut, steps=[batch.steps[i] for i, _, _ in part] if batch.steps else [])


def _piece(t: Tensor, start: int, end: int) -> Tensor:
    if end:
        return torch.as_strided(t, (end - start,), (1,), t.storage_offset() + start)
    if t.is_contiguous() or not is_dense(t):
        return t
    return torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())
