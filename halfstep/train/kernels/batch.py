"""The input of one update: a batch of parameters that are stored alike, and the options of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from halfstep.torch_internals import is_zero_tensor, same_kinds, unflatten

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


GROUP = 64  # neighbours in a slice of dimension 0 that share a base
Width = Literal["full", "bf16", "8bit"]


class Place(NamedTuple):
    """Where a parameter's shard lies in the whole tensor; slices are those of dimension 0."""

    number: int  # of the parameter in its optimizer
    first: int  # index in the whole tensor of the shard's first element
    row: int  # elements of a slice in the shard
    stride: int  # elements of a slice in the whole tensor

    def cut(self, start: int, end: int) -> Place:
        """Returns the place of a part that holds whole slices or lies inside one; (0, 0) is all of it."""
        at, inside = divmod(start, self.row)
        row, stride = (self.row, self.stride) if not inside and (end - start) % self.row == 0 else 2 * (end - start,)
        return self._replace(first=self.first + at * self.stride + inside, row=row, stride=stride)

    def ends(self, numel: int, limit: int) -> Iterator[int]:
        """Yields where a tensor can be cut so that no part is much larger than `limit` (a multiple of `GROUP`)."""
        if self.row <= limit:
            yield from range(limit // self.row * self.row, numel, limit // self.row * self.row)
        else:
            for start in range(0, numel, self.row):
                yield from range(start or limit, start + self.row, limit)
        yield numel


class Code(NamedTuple):
    """How a state is kept in 8 bits: with a sign or as a square, rounded stochastically or to nearest."""

    signed: bool
    stochastic: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its codes."""
        return torch.int8 if self.signed else torch.uint8


class Kept(NamedTuple):
    """How a batch is kept between updates where that takes random bits or codes (`train/optim/moments.py`)."""

    kind: Width  # of the states
    rounds: bool  # whether weights of layout `low` are rounded stochastically
    codes: tuple[Code, ...]  # of each state
    places: list[Place]
    bases: Mapping[str, list[Tensor]]  # in 8 bits, of each group, slice by slice (int16)

    def cut(self, pieces: list[tuple[int, int, int]]) -> Kept:
        """Returns that of parts of tensors, each an index and the first and last element (0, 0: all of it)."""
        bases = {
            name: [_groups(held[i], self.places[i].row, *ends) for i, *ends in pieces]
            for name, held in self.bases.items()
        }
        return self._replace(places=[self.places[i].cut(*ends) for i, *ends in pieces], bases=bases)


@dataclass
class Batch:
    """Parameters of one device, layout and dtype, and what their update needs: lists with one tensor per parameter.

    `weights` are the stored weights. `extras` are the fp32 masters in layout `copy` and the int16 remainders in layout
    `split`, otherwise empty. `grads` are dense, in low or full precision, and still multiplied by the loss scale.
    `states` maps names to the optimizer's state tensors, in the order in which its kernels take them, in the dtype of
    the full weight. An optimizer that counts its updates has the counts in `steps` (0-dim fp32); an update increments
    them before it uses them. With `whole`, weights are not cut into parts, as the update needs their norms. With
    `kept`, `states` are codes unless its kind is "full", and all parameters have `steps`. A law of whole matrices gets
    the parameters as `owners`, since weights may be shards of them, and computes low products in fp32 with `emulate`.

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
    kept: Kept | None = None
    owners: list[Tensor] = field(default_factory=list)
    emulate: bool = False
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the batch."""
        return self.weights[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the update is computed."""
        return self.weights[0].dtype if self.layout == "full" else torch.float32


class Gradients(list[Tensor]):
    """The gradients of a step, and what is derived from the kinds of its tensors: `memory` is for that."""

    memory: dict[str, Any]
    starts: list[int] | None = None  # their addresses, as far as they are known
    norm: Tensor | None = None  # L2, over all elements (0-dim fp64), once a kernel has read them


class Alike:
    """Gives the gradients of a step the memory of the last step's if all tensors are of the same kinds."""

    def __init__(self) -> None:
        self._same: Callable[[Sequence[Tensor]], list[int] | None] = lambda tensors: None
        self._memory: dict[str, Any] = {}

    def of(self, grads: Sequence[Tensor]) -> Gradients:
        """Returns the gradients with their memory."""
        found = Gradients(grads)
        found.starts = self._same(found)
        if found.starts is None:
            self._same, self._memory = same_kinds(found), {}
        found.memory = self._memory
        return found


class Wanted(NamedTuple):
    """What a step makes of the norm of its gradients, where one kernel may do it."""

    scale: Tensor | None = None  # that they carry (0-dim fp32); None: 1
    noted: Tensor | None = None  # whether the backward pass has overflowed (0-dim bool)
    most: float | None = None  # the norm to which true gradients are clipped


NOTHING = Wanted()
Judged = tuple[Tensor, Tensor, Tensor | None]
"""The norm of the true gradients (0-dim fp32), whether to skip the step (bool), and the factor of the update."""


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
            place, numel = (role, device, dtype.itemsize), sum(t.numel() for t in like)
            buffer = self._buffers.get(place)
            if buffer is None or buffer.numel() < numel or len(self._views) >= _MOST_VIEWS:
                self._views.clear()  # they would keep a smaller buffer
            if buffer is None or buffer.numel() < numel:
                buffer = self._buffers[place] = torch.empty(numel, dtype=dtype, device=device)
            flat = buffer[:numel].view(dtype)
            made = self._views[key] = flat, list(unflatten(flat, like))
        return made


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
        ends = batch.kept.places[i].ends(numel, limit) if batch.kept else (*range(limit, numel, limit), numel)
        start = 0
        for end in ends:
            if end < numel:
                yield _part(batch, [(i, start, end)])
            else:
                part, size = [(i, start, end)], end - start
            start = end
    if part:
        yield _part(batch, part)


def is_dense(t: Tensor) -> bool:
    """Returns whether `t` fills one block of memory without gaps or overlaps, in whatever order."""
    return t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t)


def resolved(t: Tensor) -> Tensor:
    """Returns `t` without torch's lazy negative and conjugate bits, which kernels do not read, and with memory."""
    t = t.clone() if is_zero_tensor(t) else t
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
    kept = batch.kept.cut(part) if batch.kept else None
    steps, owners = ([of[i] for i, _, _ in part] if of else [] for of in (batch.steps, batch.owners))
    return replace(cut, steps=steps, kept=kept, owners=owners)


def _piece(t: Tensor, start: int, end: int) -> Tensor:
    if end:
        return torch.as_strided(t, (end - start,), (1,), t.storage_offset() + start)
    if t.is_contiguous() or not is_dense(t):
        return t
    return torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())


def _groups(bases: Tensor, row: int, start: int, end: int) -> Tensor:
    """Returns the bases of a part of a tensor with slices of `row` elements; (0, 0) is all of it."""
    if not end:
        return bases
    each = -(-row // GROUP)
    first, last = (at // row * each + -(-(at % row) // GROUP) for at in (start, end))
    return bases.view(-1)[first:last]
