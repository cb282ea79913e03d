"""The moments of one optimizer as a session keeps them between steps: in bf16 or 8 bits, not in `optimizer.state`.

Whoever reads the optimizer's state dict, or copies or pickles the optimizer, gets them in fp32 under torch's names.
States that are found in `optimizer.state`, as after `load_state_dict`, are taken over in the next step. A parameter
whose step count is no longer there, as after `optimizer.state.clear()`, starts afresh.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from halfstep.formats import mix_bits
from halfstep.sharded import is_sharded
from halfstep.torch_internals import shard_offset
from halfstep.train.kernels.batch import GROUP, Batch, Code, Kept, Place, Width, chunks, in_layout_of, is_dense
from halfstep.train.optim.hooks import put_over, updated_by
from halfstep.train.processes.shards import like, local

# ---- the codes, in plain tensor operations, which the compiled loops (`codes.h`, `groups.h`, `triton.py`) equal
#
# All is integer arithmetic on the bits of fp32 values. What was decoded encodes to the same value again, whatever the
# random bits, so that a checkpoint in fp32 loses nothing.
# In 8 bits, 64 neighbours in one slice of dimension 0 share a base (int16): the least code of the group's values in
# units of their last place. A square (`uint8`) has 4 exponent and 4 fraction bits if the nonzero values of its group
# lie within 2**15 of the largest, else 5 and 3, with a negative base. A value above 0 is never kept as 0, or an update
# would be divided by 0. A signed moment (`int8`) has one exponent bit less beside its sign; values too small become 0.
# Random bits come from a hash of the element's index in the whole tensor, the number of its parameter, the number of
# the update, and which state it is, so that they are the same however a tensor is sharded, and when training resumes.

_WORD = 0xFFFFFFFF
_FINE, _COARSE = 19, 20  # bits of fp32 that a code drops, with 4 and with 3 bits of the fraction left
_NONE = 1 << 30
_NAN = 0x7FC00000  # every NaN is kept as this one, so that no noise carries it beyond the last
_LAST = (0x846CA68B, 0xC2B2AE3D, 0x85EBCA77)  # last factors of the hash, for the first state, the second and weights


def random_bits(place: Place, count: int, step: Tensor, which: int = 0) -> Tensor:
    """Returns 32 random bits (int64) for each of `count` elements of a tensor at its update number `step` (0-dim).

    The upper are the better ones. `which` is 0 and 1 for the first and the second state and 2 for weights.

    >>> random_bits(Place(0, 2, 8, 8), 2, torch.tensor(1.0)).tolist()
    [4171645019, 3864732321]
    >>> random_bits(Place(0, 0, 8, 8), 4, torch.tensor(1.0)).tolist()[2:]
    [4171645019, 3864732321]
    """
    at = torch.arange(count, dtype=torch.int64, device=step.device)
    index = place.first + at // place.row * place.stride + at % place.row
    key = mix_bits(step.to(torch.int64) * 0x85EBCA77 & _WORD ^ place.number * 0xC2B2AE3D & _WORD)
    x = index * 0x9E3779B1 + key & _WORD
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    return (x ^ x >> 15) * _LAST[which] & _WORD


def to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Rounds fp32 values to bf16, away from zero with a probability of what is cut off, by 32 random bits for each."""
    bits = values.view(torch.int32)
    bits = torch.where(values.isnan(), bits, bits + (random >> 16).to(torch.int32))
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def rounded_weight(values: Tensor, place: Place, step: Tensor) -> Tensor:
    """Returns fp32 values of a weight without a master, rounded to bf16 at its update number `step`."""
    return to_bf16(values, random_bits(place, values.numel(), step, which=2).view(values.shape))


def encode(values: Tensor, random: Tensor | None, code: Code) -> tuple[Tensor, Tensor]:
    """Returns the 8-bit codes of groups of fp32 values (n, 64) and int16 bases (n, 1).

    They are rounded by 32 `random` bits for each value, or to nearest. Where codes have 3 bits of the fraction,
    values are rounded at random to 4, and then all of a group by one bit more.
    """
    most = 127 if code.signed else 255
    bits = values.view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).clamp(max=_NAN)
    if random is None:
        fine, coarse = ((magnitude + (1 << drop - 1)) >> drop for drop in (_FINE, _COARSE))
    else:
        fine = (magnitude + (random >> 32 - _FINE).to(torch.int32)) >> _FINE
        coarse = (fine + (random[:, :1] >> 12 & 1).to(torch.int32)) >> 1
    counts = magnitude >= (1 << 16 if code.signed else 1)  # signed ones below 2**-133 may become 0
    least = torch.where(counts, fine, _NONE).amin(1, keepdim=True)
    near = fine.amax(1, keepdim=True) - least < most
    rounded = torch.where(near, fine, coarse)
    base = (rounded.amax(1, keepdim=True) - most).clamp(min=0)
    codes = torch.where(magnitude > 0, (rounded - base).clamp(min=0 if code.signed else 1), 0)
    if code.signed:
        codes = torch.where(bits < 0, -codes, codes)
    return codes.to(code.dtype), torch.where(near, base, -1 - base).to(torch.int16)


def decode(codes: Tensor, bases: Tensor) -> Tensor:
    """Returns the fp32 values of groups of 8-bit codes (n, 64) and their bases (n, 1)."""
    number, base = codes.to(torch.int32), bases.to(torch.int32)
    magnitude = number.abs()
    bits = torch.where(base >= 0, (magnitude + base) << _FINE, (magnitude - 1 - base) << _COARSE)
    values = torch.where(magnitude > 0, bits, 0).view(torch.float32)
    return torch.where(number < 0, -values, values)


def grouped(flat: Tensor, row: int) -> Tensor:
    """Returns the elements of slices of `row` elements as groups (n, 64), the last of a slice filled up with zeros."""
    short = -row % GROUP
    slices = flat.view(-1, row)
    return (torch.nn.functional.pad(slices, (0, short)) if short else slices).reshape(-1, GROUP)


def ungrouped(groups: Tensor, row: int) -> Tensor:
    """Returns the elements of groups, as `grouped` took them."""
    return groups.view(-1, -(-row // GROUP) * GROUP)[:, :row].reshape(-1).contiguous()


def opened(batch: Batch) -> dict[str, list[Tensor]]:
    """Returns the states of a batch in fp32; its tensors must be contiguous."""
    kept = batch.kept
    assert kept is not None
    if kept.kind == "bf16":
        return {name: [t.float() for t in tensors] for name, tensors in batch.states.items()}
    return {
        name: [
            ungrouped(decode(grouped(t.view(-1), place.row), base.view(-1, 1)), place.row).view(t.shape)
            for t, base, place in zip(tensors, kept.bases[name], kept.places, strict=True)
        ]
        for name, tensors in batch.states.items()
    }


def close(batch: Batch, states: Mapping[str, list[Tensor]], found: Tensor | None) -> None:
    """Keeps fp32 `states` as the states of a batch; changes nothing if `found` is true."""
    kept = batch.kept
    assert kept is not None
    for i, (place, step) in enumerate(zip(kept.places, batch.steps, strict=True)):
        for k, (name, values) in enumerate(states.items()):
            new = _kept_as(values[i].reshape(-1), kept, k, place, step)
            old = [batch.states[name][i], *([kept.bases[name][i]] if kept.kind == "8bit" else [])]
            for held, value in zip(old, new, strict=True):
                value = value.view(held.shape)
                held.copy_(value if found is None else torch.where(found, held, value))


def _kept_as(values: Tensor, kept: Kept, state: int, place: Place, step: Tensor) -> tuple[Tensor, ...]:
    code = kept.codes[state]
    random = random_bits(place, values.numel(), step, state) if kept.kind == "bf16" or code.stochastic else None
    if random is not None and kept.kind == "bf16":
        return (to_bf16(values, random),)
    given = None if random is None else grouped(random, place.row)
    codes, bases = encode(grouped(values, place.row), given, code)
    return ungrouped(codes, place.row), bases


# ---- what a session keeps

LEAST = 4096  # elements of a weight whose moments have 8 bits; its dimensions are 2 or more
_PART = 2**19  # elements that are converted at a time
_LOG = logging.getLogger("halfstep")


class Moments:
    """Keeps the moments of an optimizer's weights in codes of `width`, small ones in bf16, but for those in `full`."""

    def __init__(
        self,
        optimizer: Optimizer,
        width: Width,
        full: Collection[Parameter],
        name_of: Callable[[Parameter], str],
        *,
        rounds: bool = False,  # whether weights without a master are rounded stochastically, which needs no codes
    ) -> None:
        self.codes = width != "full"
        self._optimizer, self._width, self._full = optimizer, width, {id(p) for p in full}
        self._rounds = rounds
        self._held: dict[int, tuple[Parameter, Batch]] = {}  # of each, a batch with its codes
        self._kinds: dict[Parameter, Width] = {}
        self._undo = [
            optimizer.register_state_dict_post_hook(self._widen).remove,
            put_over(optimizer, "__getstate__", self._pickled),
        ]
        large = [p for p in updated_by(self._optimizer) if not _is_small(p)]
        cut = [name_of(p) for p in large if self.kind(p) not in ("full", width)]
        if cut:
            _LOG.warning(
                "moments of %d weights are kept in bf16, 2 bytes each, as their shards or their memory order cut the "
                "groups of %d neighbours that 8-bit moments share a base in: %s", len(cut), GROUP, ", ".join(cut[:5])
            )  # fmt: skip

    def kind(self, p: Parameter) -> Width:
        """Returns how the moments of a parameter are kept; "full": in fp32, in `optimizer.state`."""
        if p not in self._kinds:
            full = id(p) in self._full or p.dtype not in (torch.float32, torch.bfloat16, torch.float16)
            grouped = not _is_small(p) and _keeps_groups(p)
            self._kinds[p] = "full" if full or not self.codes else self._width if grouped else "bf16"
        return self._kinds[p]

    def empty(self, p: Parameter, low: bool, codes: Mapping[str, Code]) -> Kept | None:
        """Returns how a batch of parameters like `p` is kept, still empty; None if it needs no codes or random bits."""
        kind, rounds = self.kind(p) if codes else "full", low and self._rounds
        if kind == "full" and not rounds:
            return None
        return Kept(kind, rounds, tuple(codes.values()), [], {name: [] for name in codes if kind == "8bit"})

    def place(self, p: Parameter) -> Place:
        """Returns where this process's shard of `p` lies in the whole tensor."""
        number = next(i for i, member in enumerate(updated_by(self._optimizer)) if member is p)
        own = local(p)
        row, strides = max(1, own.numel() // max(1, own.shape[0] if own.dim() else 1)), _strides(p.shape)
        first = sum(o * s for o, s in zip(shard_offset(p), strides, strict=True)) if is_sharded(p) else 0
        return Place(number, first, row, strides[0]) if _rows_first(own) else Place(number, first, own.numel(), 0)

    def add(self, p: Parameter, into: Batch, codes: Mapping[str, Code], fresh: Batch) -> None:
        """Adds the codes of `p` to a batch; they take over the states of `fresh`, fp32, and its step count."""
        given = {name: t for name, (t,) in fresh.states.items()}
        own = local(p).detach()
        _, batch = self._held.get(id(p), (p, None))
        if batch is None or not _fits(batch, own, codes):
            before = {name: in_layout_of(t.to(own.device), own) for name, t in self.full(p).items()}
            given = {**before, **given}
            batch = _new(own, self.place(p), self.kind(p), codes)
            self._held[id(p)] = p, batch
        assert batch.kept is not None
        assert into.kept is not None
        batch.steps[:] = fresh.steps
        batch.kept = batch.kept._replace(codes=tuple(codes.values()))
        if given:
            values = {name: [given[name] if name in given else self.full(p)[name]] for name in codes}
            for part, new in zip(chunks(batch, _PART), chunks(replace(batch, states=values), _PART), strict=True):
                close(part, new.states, None)
        into.kept.places.extend(batch.kept.places)
        for all_held, held in ((into.states, batch.states), (into.kept.bases, batch.kept.bases)):
            for name, tensors in held.items():
                all_held[name].extend(tensors)

    def full(self, p: Parameter) -> dict[str, Tensor]:
        """Returns the moments of `p` in fp32, of its shard in this process; empty if none are held."""
        if id(p) not in self._held:
            return {}
        _, batch = self._held[id(p)]
        values = {name: [torch.empty_like(t, dtype=torch.float32)] for name, (t,) in batch.states.items()}
        for part, out in zip(chunks(batch, _PART), chunks(replace(batch, states=values), _PART), strict=True):
            for name, tensors in opened(part).items():
                out.states[name][0].copy_(tensors[0])
        return {name: t for name, (t,) in values.items()}

    def bytes(self) -> dict[str, int]:
        """Returns how many bytes the codes and their bases take in this process, by how they are kept."""
        self.forget_removed()
        found: Counter[str] = Counter()
        for p, batch in self._held.values():
            found[self.kind(p)] += sum(t.nbytes for t in _tensors(batch))
        return dict(found)

    def forget_removed(self) -> None:
        """Drops the codes of parameters whose state was taken out of `optimizer.state`."""
        state = self._optimizer.state
        for p in [p for p, _ in self._held.values() if "step" not in state.get(p, ())]:
            self.forget(p)

    def forget(self, p: Parameter) -> None:
        """Drops the codes of one parameter."""
        self._held.pop(id(p), None)

    def close(self, counts: bool) -> None:
        """Gives the moments back to `optimizer.state` in fp32; `counts` tells whether it had a step count by itself."""
        for undo in self._undo:
            undo()
        self.forget_removed()
        for p, _ in list(self._held.values()):
            self._optimizer.state[p].update(self._of(p, self._optimizer.state[p]))
            self.forget(p)
        state = self._optimizer.state
        for p in [] if counts else [p for p in updated_by(self._optimizer) if p in state]:
            state[p] = {name: value for name, value in state[p].items() if name != "step"}

    def _of(self, p: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the moments of `p` in fp32 that are not in its state already."""
        return {name: like(p, t) for name, t in self.full(p).items() if state.get(name) is None}

    def _widen(self, _: Optimizer, saved: dict[str, Any]) -> None:
        """Puts moments in fp32 into a state dict."""
        self.forget_removed()
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        for p, number in zip(updated_by(self._optimizer), numbers, strict=True):
            if id(p) in self._held:
                entry = saved["state"][number]
                saved["state"][number] = {**entry, **self._of(p, entry)}

    def _pickled(self) -> dict[str, Any]:
        """Returns what a copy or a pickle of the optimizer holds."""
        self.forget_removed()
        kept: dict[str, Any] = type(self._optimizer).__getstate__(self._optimizer)
        state = kept["state"].copy()
        for p, _ in self._held.values():
            state[p] = {**state[p], **self._of(p, state[p])}
        return {**kept, "state": state}


def _tensors(batch: Batch) -> Iterator[Tensor]:
    assert batch.kept is not None
    for tensors in (*batch.states.values(), *batch.kept.bases.values()):
        yield from tensors


def _new(own: Tensor, place: Place, kind: Width, codes: Mapping[str, Code]) -> Batch:
    dtypes = {name: torch.bfloat16 if kind == "bf16" else code.dtype for name, code in codes.items()}
    states = {name: [torch.zeros_like(own, dtype=dtype, requires_grad=False)] for name, dtype in dtypes.items()}
    slices, groups = own.numel() // max(1, place.row), -(-place.row // GROUP)
    bases = {
        name: [torch.zeros(slices, groups, dtype=torch.int16, device=own.device)] for name in codes if kind == "8bit"
    }
    return Batch("full", [own], [], [], states, kept=Kept(kind, False, tuple(codes.values()), [place], bases))


def _fits(batch: Batch, own: Tensor, codes: Mapping[str, Code]) -> bool:
    """Tells whether codes are of the states that are asked for, and lie as the weight does."""
    (first,) = next(iter(batch.states.values()))
    same = (first.device, first.shape, first.stride()) == (own.device, own.shape, own.stride())
    return same and list(batch.states) == list(codes)


def _is_small(p: Parameter) -> bool:
    """Tells whether 8 bits with bases save nothing worth it: few elements, or slices of two, with 4 bytes of bases."""
    return p.dim() < 2 or p.numel() < LEAST or p.numel() <= 2 * p.shape[0]


def _keeps_groups(p: Parameter) -> bool:
    """Tells whether the shards of a tensor hold whole groups of its neighbours; the same in all processes."""
    if not is_sharded(p):
        return _rows_first(p)
    pieces = [1] * p.dim()
    for placement, size in zip(p.placements, p.device_mesh.shape, strict=True):
        if placement.is_partial():
            return False
        if not placement.is_replicate():
            pieces[placement.dim] *= size  # type: ignore[attr-defined]  # of shards alone
    width = -(-p.shape[1] // pieces[1]) * _strides(p.shape)[1]  # of a slice, but for the last shard's
    return _rows_first(local(p)) and all(n == 1 for n in pieces[2:]) and (pieces[1] == 1 or width % GROUP == 0)


def _rows_first(t: Tensor) -> bool:
    """Tells whether the slices of dimension 0 lie one after the other in memory."""
    return t.is_contiguous() or (is_dense(t) and t.stride(0) * t.shape[0] == t.numel())


def _strides(shape: torch.Size) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides
