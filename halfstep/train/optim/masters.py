"""The fp32 values of weights that are stored in low precision: kept as a copy, split, or not at all."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.errors import SessionError
from halfstep.formats import bits_of, is_narrow
from halfstep.plan.plan import Master
from halfstep.torch_internals import swap_contents, version_of
from halfstep.train.kernels.batch import Layout

# ---- the split form: a bf16 weight and a 16-bit remainder, which together are exactly one fp32 value
#
# All works on the bits, so that infinities and NaNs survive, and reads no value on the host. The bf16 weight of a NaN
# must be a NaN too: rounding adds to the bits, which would turn the NaNs with the smallest bits, just above those of
# infinity, into infinity, and those with the largest bits into a zero of the other sign. `storable` replaces these.

_HALF = 0x8000  # half of the last place of the high half
_INFINITY = 0x7F800000
_FIRST_NAN, _LAST_NAN = 0x7F808000, 0x7FFF7FFF  # of those whose rounded high half is a NaN


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bf16 weight and the int16 remainder that `join` turns back into `full`, bit for bit.

    `full` is fp32. The weight is `full` rounded to nearest, ties away from zero; the remainder is the low 16 bits of
    `full`, as a signed number. With ties rounded to even this would be impossible: a tie above an even weight would
    need the remainder +32768. NaNs that `storable` replaces come back as their replacements.

    >>> weight, remainder = split(torch.tensor([1.0, 1.0 + 2.0**-8]))
    >>> weight.tolist(), remainder.tolist()
    ([1.0, 1.0078125], [0, -32768])
    """
    bits = storable(full.view(torch.int32))
    return _high_half(bits).view(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 value of a bf16 `weight` and its int16 `remainder`.

    `split` returns no negative remainder with a zero. Where code has written a zero past a remainder (through
    `p.data`, such as a mask), the sum of the two would be a NaN: the value is the zero.

    >>> join(*split(torch.tensor([3.14159274]))), join(torch.zeros(1).bfloat16(), torch.tensor([-1], dtype=torch.int16))
    (tensor([3.1416]), tensor([0.]))
    """
    bits = weight.view(torch.int16)  # a comparison of numbers would take subnormals for zeros where they are flushed
    least = (bits & 0x7FFF).neg_().clamp_(min=-1).bitwise_left_shift_(15)  # 0 beside a zero; a third of `where`'s time
    written = torch.maximum(remainder, least)
    return bits.to(torch.int32).bitwise_left_shift_(16).add_(written).view(torch.float32)


def round_half_away(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the fp32 tensor `full` rounded to the low `dtype`: ties away from zero in bf16, to even in fp16.

    In bf16 this is the weight that `split` returns, so that both kinds of master train alike. It differs from torch's
    cast only on exact ties above an even weight (1 value in 131,072), by one unit in the last place.

    >>> tie = torch.tensor([1.0 + 2.0**-8])
    >>> round_half_away(tie, torch.bfloat16).item(), tie.bfloat16().item()
    (1.0078125, 1.0)
    """
    if dtype is not torch.bfloat16:
        return full.to(dtype)
    return _high_half(storable(full.view(torch.int32))).view(torch.bfloat16)


def storable(bits: Tensor) -> Tensor:
    """Returns the int32 `bits` of fp32 values, with some NaNs replaced so that every NaN rounds to a NaN in bf16."""
    # Fewer are not possible, since there are 131,070 more fp32 NaNs than pairs of a NaN weight and a remainder.
    magnitude = bits & 0x7FFFFFFF
    is_nan = (magnitude - _INFINITY).clamp_(0, 1)
    held = magnitude.clamp(max=_LAST_NAN).clamp_(min=is_nan.mul_(_FIRST_NAN))
    return held.sub_(magnitude).add_(bits)  # with the sign of before


def _high_half(bits: Tensor) -> Tensor:
    return (bits + _HALF).bitwise_right_shift_(16).to(torch.int16)


# ---- what a session keeps

_LAYOUTS: dict[Master, Layout] = {"none": "low", "copy": "copy", "split": "split"}


class Fit(NamedTuple):
    """How many elements of an fp32 weight are not 0, become 0 or infinite in a low format, and are not finite in fp32.

    >>> MasterStore("none", torch.float16).fit(Parameter(torch.tensor([0.0, 1.0, 1e-9, 1e5, float("inf")])))
    Fit(nonzero=4, lost=1, beyond=1, nonfinite=1)
    """

    nonzero: int
    lost: int
    beyond: int
    nonfinite: int


def _counts(full: Tensor, stored: Tensor) -> Tensor:
    """Returns the counts of a `Fit` as a tensor, without waiting for the device."""
    nonzero, nonfinite = full.count_nonzero(), (full - full).count_nonzero()  # inf - inf is NaN
    return torch.stack(
        [nonzero, nonzero - stored.count_nonzero(), (stored - stored).count_nonzero() - nonfinite, nonfinite]
    )


@dataclass
class _Entry:
    param: Parameter
    extra: Tensor | None
    kind: Master
    stored: Tensor  # the memory of the weight as it was stored last
    rounded: Tensor | None = None  # without a master: the counts of the fp32 value that was rounded


COPIED, PICKLED = "__deepcopy__", "__reduce_ex__"
"""The names in a tracked parameter's `__dict__` by which its copies and pickles have its fp32 value."""


class MasterStore:
    """Keeps the masters of one session's parameters.

    A tracked parameter is stored in the dtype `low`, in bf16 rounded half away from zero; its `extra` is the fp32
    master (`copy`), the int16 remainder (`split`), or nothing (`none`). A parameter that is not tracked is its own
    master. `joins` is called with an untracked fp32 parameter that will be updated, and tells whether to track it from
    then on. Deep copies and pickles of a tracked parameter, alone or inside any object, are ordinary fp32 Parameters.
    """

    def __init__(self, kind: Master, low: torch.dtype, joins: Callable[[Parameter], bool] | None = None) -> None:
        self.kind = kind
        self.low = low
        self._joins = joins
        self._versions: dict[int, int] = {}  # of `note`, by id
        self._entries: dict[int, _Entry] = {}  # by id: the hash of a Tensor is a Python call; entries keep theirs alive

    def __contains__(self, p: object) -> bool:
        return id(p) in self._entries

    def __iter__(self) -> Iterator[Parameter]:
        return iter([entry.param for entry in self._entries.values()])

    def tracked(self, params: Sequence[Parameter]) -> list[Parameter]:
        """Returns those of `params` that are tracked; a look at the optimizers of others costs them little."""
        if self._entries.keys().isdisjoint(map(id, params)):
            return []
        return [p for p in params if p in self]

    @torch.no_grad()
    def track(self, p: Parameter, *, master: bool = True) -> None:
        """Keeps the fp32 value of `p` as its master and stores `p` in low precision; a tracked `p` is not changed."""
        if p in self:
            return
        kind: Master = self.kind if master else "none"
        full = torch.empty_like(p, dtype=torch.float32).copy_(p)  # dense, in the memory format of p
        weight, extra = self._stored(full, kind)
        _set_data(p, weight)
        self._entries[id(p)] = _Entry(p, extra, kind, weight, _counts(full, weight) if kind == "none" else None)
        self.note([p])
        mine = weakref.ref(self), weakref.ref(p)
        vars(p).update({COPIED: partial(_copied, *mine), PICKLED: partial(_pickled, *mine)})

    def keeps(self, p: Parameter) -> bool:
        """Returns whether there is a master or a remainder of `p`."""
        entry = self._entries.get(id(p))
        return entry is not None and entry.extra is not None

    def layout(self, p: Parameter) -> Layout:
        """Returns how the value of `p` is kept, after storing it low again if code gave it fp32 memory."""
        if id(p) not in self._entries:
            return "low" if is_narrow(p.dtype) else "full"
        if p.dtype is torch.float32:
            self._take_back(self._entries[id(p)])
        if p.dtype is not self.low:
            raise SessionError(
                f"a parameter of shape {tuple(p.shape)} that the session stores as {self.low} was cast to {p.dtype}; "
                "call session.close(), which gives the fp32 values of such parameters back (what else was cast stays "
                "rounded), and then halfstep.initialize again"
            )
        return _LAYOUTS[self._entries[id(p)].kind]

    def trained_layout(self, p: Parameter, name: Callable[[], str]) -> Layout:
        """Returns the layout of a parameter that will be updated; `name` returns its name for an error."""
        layout = self.layout(p)
        if layout == "full" and self._joins is not None and p.dtype is torch.float32 and self._joins(p):
            self.track(p)
            layout = self.layout(p)
        if layout == "low" and (p not in self or self.kind != "none"):
            came = (
                "not trained, and to be stored low, at halfstep.initialize"
                if p in self
                else f"cast to {p.dtype} after halfstep.initialize (model.bfloat16() or model.half()), or frozen and "
                f"in {p.dtype} before"
            )
            raise SessionError(
                f"{name()} trains now but has no fp32 value, because it was {came}: its updates would be rounded. "
                "Unfreeze it, or call model.float(), before halfstep.initialize (inside a trainer: before training "
                "begins), and cast nothing after it"
            )
        return layout

    def extra(self, p: Parameter) -> Tensor:
        """Returns the fp32 master (`copy`) or the int16 remainder (`split`) of a tracked `p`, on the device of `p`."""
        entry = self._entries[id(p)]
        assert entry.extra is not None
        if entry.extra.device != p.device or entry.extra.stride() != p.stride():  # moved, or in another memory format
            entry.extra = torch.empty_like(p, dtype=entry.extra.dtype, requires_grad=False).copy_(entry.extra)
            entry.stored = p.detach() if p.dtype is self.low else entry.stored.to(p.device)
        return entry.extra

    @torch.no_grad()
    def full(self, p: Parameter) -> Tensor:
        """Returns the value of `p` in fp32; an untracked float64 or complex `p` keeps its dtype."""
        entry = self._entries.get(id(p))
        if entry is not None:
            if p.dtype is not self.low or (entry.extra is not None and entry.extra.shape != p.shape):
                return self._recovered(entry)
            if entry.kind != "copy" and version_of(p) != self._versions[id(p)]:
                self.adopt(p)
            elif entry.kind == "split" and _is_elsewhere(entry):
                # maybe for a while: what was stored keeps its remainder
                return join(p.detach(), torch.where(_has_none(p), 0, self.extra(p)))
        layout = self.layout(p)
        if layout == "copy":
            return self._reconciled(self.extra(p), p.detach())
        if layout == "split":
            return join(p.detach(), self.extra(p))
        return p.detach().float() if layout == "low" else p.detach()

    @torch.no_grad()
    def fit(self, p: Parameter) -> Fit:
        """Returns how the fp32 value of `p` fits the low format."""
        stored = p.detach() if p.dtype is self.low else p.detach().to(self.low)
        least, most = torch.stack(stored.abs().aminmax()).tolist()
        if least > 0 and most < math.inf:  # as mostly, which takes a tenth of the time
            return Fit(p.numel(), 0, 0, 0)
        full, entry = self.full(p), self._entries.get(id(p))
        now = Fit(*_counts(full, full.to(self.low)).tolist())
        if entry is None or entry.rounded is None:
            return now
        nonzero, lost, beyond, _ = entry.rounded.tolist()
        lost, beyond = min(lost, p.numel() - now.nonzero), min(beyond, now.nonfinite)
        return Fit(nonzero, lost, beyond, now.nonfinite - beyond)

    @torch.no_grad()
    def write(self, p: Parameter, value: Tensor) -> None:
        """Sets the value of `p` in place: the weight, and the master or remainder beside it."""
        if p not in self:
            p.copy_(value)
            return
        weight, extra = self._stored(value.detach().to(p.device, torch.float32), self._entries[id(p)].kind)
        p.copy_(weight)
        if p.dtype is not self.low:
            self._entries[id(p)].stored = weight
        if extra is not None and extra.data_ptr() != self.extra(p).data_ptr():
            self.extra(p).copy_(extra)
        self.note([p])

    @torch.no_grad()
    def adopt(self, p: Parameter) -> None:
        """Makes the present weight the value of `p`, after other code has changed it."""
        if p not in self or p.dtype is torch.float32:  # by `p.data = value`, until the next step
            return
        layout = self.layout(p)
        weight = self._entries[id(p)].stored = p.detach()
        if layout == "copy":
            master = self.extra(p)
            master.copy_(self._reconciled(master, weight))
        elif layout == "split":  # zeros by their bits: on a CPU that flushes subnormals these compare equal to zero
            self.extra(p).masked_fill_(_has_none(weight), 0)
        self.note([p])

    def adopt_changed(self, params: Sequence[Parameter]) -> None:
        """Adopts the weights that an in-place operation has changed since the store last wrote them."""
        if self._entries and list(map(self._versions.get, map(id, params))) != list(map(version_of, params)):
            for p in params:
                if p in self and version_of(p) != self._versions[id(p)]:
                    self.adopt(p)

    def adopt_replaced(self, params: Sequence[Parameter]) -> None:
        """Adopts the weights whose memory other code has replaced, as `prune.remove` does (`p.data = value`)."""
        for p in params:
            if p in self and p.dtype is self.low and _is_elsewhere(self._entries[id(p)]):
                self.adopt(p)

    @torch.no_grad()
    def load(self, p: Parameter, value: Tensor) -> Tensor:
        """Makes `value`, an entry of a checkpoint, the value of `p`; returns the stored weight, in the dtype of `p`."""
        # A `value` in the low format lacks the bits that were rounded away when it was saved. So each element of the
        # present fp32 value is kept if it rounds to the same low element as in `value`, and is replaced otherwise.
        # torch then copies the returned weight into `p`, although `p` has these values already. Because of this copy,
        # `p` looks as if other code had changed it. Adopting the change would lose the remainders of values that round
        # to zero or infinity.
        if p in self and value.dtype is self.low:
            value = self._reconciled(self.full(p), value.to(p.device))
        self.write(p, value)
        if p in self:
            entry = self._entries[id(p)]
            entry.rounded = _counts(value.to(p.device), p) if entry.kind == "none" else None
        return p.detach()

    def loaded(self, p: Parameter) -> None:
        """Notes that torch has copied what `load` returned into `p`, so that this write does not count as a change."""
        # If `p` was written more than once since `load`, it counts as changed.
        if p in self and version_of(p) == self._versions[id(p)] + 1:
            self.note([p])

    @torch.no_grad()
    def restore(self, p: Parameter) -> None:
        """Stores a tracked `p` as its trained fp32 value and stops tracking it; its gradient becomes fp32 too."""
        if p in self:
            for name in (COPIED, PICKLED):
                vars(p).pop(name, None)
            _set_data(p, self.full(p))
            del self._entries[id(p)]

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Stores tracked parameters in fp32 within a `with` block; the values that they have at its end are kept."""
        # Other code holds the old storage's address, and DistributedDataParallel has hooks on the node that accumulates
        # the gradient, which `p.data = value` would replace.
        twins = [(p, Parameter(self.full(p).detach(), p.requires_grad)) for p in self]
        for p, twin in twins:
            swap_contents(p, twin)
        try:
            yield
        finally:
            for p, twin in twins:
                swap_contents(p, twin)
                p.requires_grad_(twin.requires_grad)
                self.write(p, twin.detach())

    def note(self, params: Sequence[Parameter], *, writes_to_come: int = 0) -> None:
        """Records that the store or an update, not other code, has written the present values of tracked weights."""
        if self._entries:
            versions = [version + writes_to_come for version in map(version_of, params)]
            self._versions.update(zip(map(id, params), versions, strict=True))

    def bytes(self) -> int:
        """Returns how many bytes the masters or remainders take."""
        return sum(entry.extra.nbytes for entry in self._entries.values() if entry.extra is not None)

    def _stored(self, full: Tensor, kind: Master) -> tuple[Tensor, Tensor | None]:
        if kind == "split":
            return split(full)
        return round_half_away(full, self.low), full if kind == "copy" else None

    @torch.no_grad()
    def _take_back(self, entry: _Entry) -> None:
        """Stores a weight low again whose memory other code has replaced by fp32 values (`p.data = value`)."""
        entry.stored, entry.extra = self._stored(self._recovered(entry).clone(), entry.kind)
        _set_data(entry.param, entry.stored, grad_too=False)
        self.note([entry.param])

    def _recovered(self, entry: _Entry) -> Tensor:
        """Returns the fp32 value of a weight that was cast to another dtype: what was stored, if it casts to that."""
        weight = entry.param.detach()
        current = weight.to(torch.float32)
        if entry.extra is None or entry.extra.shape != weight.shape:
            return current
        extra, low = self.extra(entry.param), entry.stored
        full = self._reconciled(extra, low) if entry.kind == "copy" else join(low, extra)
        cast = low.to(weight.dtype)
        return torch.where((cast == weight) | (cast.isnan() & weight.isnan()), full, current)

    def _reconciled(self, full: Tensor, weight: Tensor) -> Tensor:
        same = bits_of(round_half_away(full, self.low)) == bits_of(weight)
        return torch.where(same, full, weight.float())


def _is_elsewhere(entry: _Entry) -> bool:
    p, stored = entry.param, entry.stored
    return type(p) is Parameter and p.shape == stored.shape and p.data_ptr() != stored.data_ptr()


def _has_none(weight: Tensor) -> Tensor:
    """Returns which bf16 elements have no remainder."""
    return (bits_of(weight) << 1 == 0) | ~weight.isfinite()


def _copied(store: weakref.ref[MasterStore], of: weakref.ref[Parameter], memo: dict[int, Any]) -> Parameter:
    """Returns a deep copy of a parameter, with its fp32 value."""
    twin: Parameter = memo.setdefault(id(of()), _twin(store, of))
    return twin


def _pickled(store: weakref.ref[MasterStore], of: weakref.ref[Parameter], protocol: Any) -> Any:
    """Pickles a parameter with its fp32 value."""
    return _twin(store, of).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _twin(store: weakref.ref[MasterStore], of: weakref.ref[Parameter]) -> Parameter:
    p = of()
    assert p is not None  # it is being copied
    values = store() or MasterStore("none", p.dtype)  # of a session that is gone
    full = values.full(p).detach()
    return Parameter(full.clone() if full.dtype is p.dtype else full, p.requires_grad)


def full_state(cast: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts a value that any optimizer loads as torch does, but to fp32 where the parameter is tracked by a store."""
    (p, given), value = args[:2], cast(*args, **kwargs)
    return given.to(p.device, torch.float32) if COPIED in vars(p) and value.dtype is p.dtype else value


def full_originals(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes a list of parametrizations of the fp32 value: torch passes over an inverse that has no low kernel."""
    given = {**dict(zip(("modules", "original"), args[1:], strict=False)), **kwargs}
    modules, p = given["modules"], given["original"]
    own = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    if COPIED in vars(p) and not any(is_narrow(t.dtype) for t in own):  # else they were made for the low value
        p.data = copy.deepcopy(p).data  # the next step stores it low again
    make(*args, **kwargs)


def average_full(update: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lets torch's AveragedModel average fp32 values; of a model, wrapped or not, it reads parameters and buffers."""
    owner, model = args if len(args) > 1 else (args[0], kwargs["model"])
    values = (copy.deepcopy(p) if COPIED in vars(p) else p for p in model.parameters())
    return update(owner, SimpleNamespace(parameters=lambda: values, buffers=model.buffers))


@torch.no_grad()
def give_dtype(p: Parameter, dtype: torch.dtype) -> None:
    """Converts `p` and its gradient to `dtype`; `p` stays the same object."""
    if p.dtype is not dtype:
        _set_data(p, p.detach().to(dtype))


def _set_data(p: Parameter, data: Tensor, *, grad_too: bool = True) -> None:
    grad = p.grad
    p.grad = None
    p.data = data
    if p.grad_dtype is not data.dtype or not grad_too:
        p.grad_dtype = None
    if grad is not None:
        p.grad = grad.to(data.dtype) if grad_too else grad
