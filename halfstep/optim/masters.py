"""The fp32 values of weights that are stored low: kept as a copy, split, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.errors import SessionError
from halfstep.optim.split import join, round_half_away, split

MasterKind = Literal["none", "copy", "split"]
Layout = Literal["full", "low", "copy", "split"]
_LAYOUTS: dict[MasterKind, Layout] = {"none": "low", "copy": "copy", "split": "split"}
_FULL_DTYPES = (torch.float32, torch.float64)


class MasterStore:
    """The masters of one session, by Parameter.

    A tracked Parameter is stored in `low`, rounded half away from zero in bf16 under every kind, so that `copy` and
    `split` train bit-identically. Beside it stands its `extra`: the fp32 master (`copy`), the int16 remainder
    (`split`), or nothing (`none`). Parameters that are not tracked are their own master.
    """

    def __init__(self, kind: MasterKind, low: torch.dtype) -> None:
        if kind == "split" and low is not torch.bfloat16:
            raise ValueError(f"a split master needs bf16 weights, not {low}; keep a copy instead")
        self.kind = kind
        self.low = low
        self._extras: dict[Parameter, Tensor | None] = {}
        self._versions: dict[Parameter, int] = {}

    def __contains__(self, p: object) -> bool:
        return p in self._extras

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._extras)

    def __len__(self) -> int:
        return len(self._extras)

    @torch.no_grad()
    def track(self, p: Parameter) -> None:
        """Keeps the fp32 value of `p` as its master and stores `p` low; a tracked `p` is left as it is.

        A `p` that is low already gets its own value as master. `p` stays the same object; its storage is new.
        """
        if p in self._extras:
            return
        full = torch.empty_like(p, dtype=torch.float32).copy_(p)  # dense, in the memory format of p
        weight, extra = self._stored(full)
        p.data = weight
        self._extras[p] = extra
        self.note(p)

    def layout(self, p: Parameter) -> Layout:
        """Returns how the value of `p` is kept: `full` in itself, `low` without a master, as `copy` or `split`.

        Raises:
            SessionError: `p` is tracked and something else has changed its dtype.
        """
        if p not in self._extras:
            return "full" if p.dtype in _FULL_DTYPES else "low"
        if p.dtype is not self.low:
            raise SessionError(
                f"a parameter of shape {tuple(p.shape)} that the session stores as {self.low} was cast to {p.dtype}; "
                "call session.close() before casting the model"
            )
        return _LAYOUTS[self.kind]

    def extra(self, p: Parameter) -> Tensor:
        """Returns the fp32 master (`copy`) or the int16 remainder (`split`) of a tracked `p`, on the device of `p`."""
        extra = self._extras[p]
        if extra is None:
            raise KeyError(f"masters of kind {self.kind!r} keep nothing beside the weight")
        if extra.device != p.device:  # the model was moved after initialize
            extra = extra.to(p.device)
            self._extras[p] = extra
        return extra

    @torch.no_grad()
    def full(self, p: Parameter) -> Tensor:
        """Returns the value of `p` in fp32, an untracked float64 or complex one as it is; maybe the master itself."""
        layout = self.layout(p)
        if layout == "copy":
            return self.extra(p)
        if layout == "split":
            return join(p.detach(), self.extra(p))
        return p.detach().float() if p.is_floating_point() and p.dtype.itemsize < 4 else p.detach()

    @torch.no_grad()
    def write(self, p: Parameter, value: Tensor) -> None:
        """Sets the value of `p` in place: the weight, and the master or remainder beside it."""
        if p not in self._extras:
            p.copy_(value)
            return
        weight, extra = self._stored(value.detach().to(p.device, torch.float32))
        p.copy_(weight)
        if extra is not None and extra.data_ptr() != self.extra(p).data_ptr():
            self.extra(p).copy_(extra)
        self.note(p)

    @torch.no_grad()
    def adopt(self, p: Parameter) -> None:
        """Accepts a stored weight that was changed from outside as the value of `p`.

        Elements of a `copy` whose master still rounds to the weight keep it; the others take the weight. Of a `split`
        the remainders stay, half a place of the weight at most, but for zeros and infinities, which are exact.
        """
        if p not in self._extras:
            return
        layout = self.layout(p)
        if layout == "copy":
            master = self.extra(p)
            master.copy_(self._reconciled(master, p.detach()))
        elif layout == "split":
            weight = p.detach()
            exact = (weight == 0) | ~weight.isfinite()
            self.extra(p).masked_fill_(exact, 0)
        self.note(p)

    def adopt_changed(self, params: Iterable[Parameter]) -> None:
        """Adopts the weights that an in-place operation has changed since the store last wrote them.

        Sees what moved the version counter (`p.copy_()` under `no_grad`, `nn.init`), not writes through `p.data`.
        """
        for p in params:
            if p in self._extras and p._version != self._versions[p]:
                self.adopt(p)

    @torch.no_grad()
    def load(self, p: Parameter, entry: Tensor) -> Tensor:
        """Takes a checkpoint's `entry` as the value of `p` and returns the stored weight, in the dtype of `p`.

        An fp32 entry is the truth. A low entry says nothing about the low bits: elements of `p` that round to it keep
        their master, the others take the entry.
        """
        if p in self._extras and entry.dtype is self.low:
            entry = entry.to(p.device)
            entry = self._reconciled(self.full(p), entry)
        self.write(p, entry)
        return p.detach()

    @torch.no_grad()
    def restore(self, p: Parameter) -> None:
        """Gives a tracked `p` its trained fp32 value as its own storage and forgets it; a gradient becomes fp32 too."""
        if p not in self._extras:
            return
        grad = p.grad
        p.grad = None
        p.data = self.full(p)
        del self._extras[p], self._versions[p]
        if grad is not None:
            p.grad = grad.to(p.dtype)

    def note(self, p: Parameter) -> None:
        """Remembers that the stored weight of `p` is as the store wrote it."""
        self._versions[p] = p._version

    def bytes(self) -> int:
        """Returns how many bytes the masters or remainders take."""
        return sum(extra.numel() * extra.element_size() for extra in self._extras.values() if extra is not None)

    def _stored(self, full: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.kind == "split":
            return split(full)
        return round_half_away(full, self.low), full if self.kind == "copy" else None

    def _reconciled(self, full: Tensor, weight: Tensor) -> Tensor:
        same = round_half_away(full, self.low).view(torch.int16) == weight.view(torch.int16)
        return torch.where(same, full, weight.float())
