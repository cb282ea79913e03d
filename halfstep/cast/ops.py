"""The op engine: makes torch run each op in the format that an op table says, forward, backward and when compiled.

`torch.autocast` does the work for the rows on which its own op lists for the device agree with the table. For the other
rows, opregistry.py puts a kernel into the dispatcher, which acts inside the regions of this engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in

from halfstep.cast.opregistry import REGISTRY, Table
from halfstep.errors import SessionError
from halfstep.machine import WideBackward
from halfstep.plan.optable import Action

Token = tuple[bool, torch.dtype, str, bool, tuple[str, ...]]
Switched = list[tuple[str, bool]]


@dataclass(frozen=True)
class Switch:
    """Tells whether a table casts the ops of a thread to `low`; does not keep the table's engine alive."""

    marker: str
    device_type: str
    low: torch.dtype

    def is_on(self) -> bool:
        """Tells whether this thread is in a region that casts."""
        return torch.is_autocast_enabled(self.marker) and torch.is_autocast_enabled(self.device_type)


class OpEngine:
    """Casts ops by a table inside its regions; one per session, and engines with equal tables share their kernels.

    `actions` maps aten overloads to actions, `low` is bf16 or fp16, and `device_type` is where the tensors are.
    `wide_backward` gives the limits within which attention on a CPU runs its backward pass in fp32.
    """

    def __init__(
        self, actions: Mapping[str, Action], low: torch.dtype, device_type: str, wide_backward: WideBackward = ()
    ) -> None:
        self.low = low
        self.device_type = device_type
        self._table = Table(device_type, frozenset(actions.items()), wide_backward)
        self._marker = ""

    def open(self) -> None:
        """Registers the kernels of the op table with torch's dispatcher.

        Raises:
            PlanError: too many sessions with different op tables are open.
        """
        if not self._marker:
            self._marker = REGISTRY.acquire(self._table)
            self._finally = weakref.finalize(self, REGISTRY.abandon, self._marker)  # of a session that nobody closes
            self._finally.atexit = False

    def close(self) -> None:
        """Removes from torch's dispatcher the kernels that no other engine needs."""
        if self._marker:
            self._finally.detach()
            REGISTRY.release(self._marker)
            self._marker = ""

    @property
    def switch(self) -> Switch:
        """The switch that tells whether this engine casts; the engine must be open."""
        return Switch(self._open_marker(), self.device_type, self.low)

    @contextmanager
    def region(self, enabled: bool = True) -> Iterator[None]:
        """Returns a context manager that casts ops by the table, and that torch.compile can trace.

        With `enabled=False`, ops inside run as written.
        """
        marker = self._open_marker()
        if not enabled:
            with TorchAutocast(self.device_type, dtype=self.low, enabled=False):
                yield
            return
        with TorchAutocast(marker), TorchAutocast(self.device_type, dtype=self.low):
            others = REGISTRY.others(marker)
            if not others:
                yield
            else:
                with _without(others):
                    yield

    def enter_backward(self) -> Switched:
        """Turns on the table for a backward pass, in which activation checkpoints compute parts of the forward again.

        Returns the token for `leave_backward`. Autocast for the device is not switched on: checkpoints restore it as it
        was in the forward, and gradients need no casts.
        """
        marker = self._open_marker()
        on = torch.is_autocast_enabled
        others = REGISTRY.others(marker)
        switched = [(other, True) for other in others if on(other)] if others else []
        if not on(marker):
            switched.append((marker, False))
        for other, was_on in switched:
            torch.set_autocast_enabled(other, not was_on)
        return switched

    def leave_backward(self, token: Switched) -> None:
        """Undoes the `enter_backward` that returned this token."""
        for marker, was_on in token:
            torch.set_autocast_enabled(marker, was_on)

    def enter(self, enabled: bool = True) -> Token:
        """Does what entering `region` does, faster, in eager code; returns the token for `leave`."""
        marker, device_type = self._open_marker(), self.device_type
        on = torch.is_autocast_enabled
        others = REGISTRY.others(marker) if enabled else ()
        if others:
            others = tuple(other for other in others if on(other))
        was_on, dtype = on(device_type), torch.get_autocast_dtype(device_type)
        token = (was_on, dtype, marker, on(marker), others)
        torch.autocast_increment_nesting()
        if dtype is not self.low:
            if was_on:
                torch.clear_autocast_cache()  # which keeps one cast of a weight, whatever its format
            torch.set_autocast_dtype(device_type, self.low)
        torch.set_autocast_enabled(device_type, enabled)
        if enabled:
            torch.set_autocast_enabled(marker, True)
            for other in others:
                torch.set_autocast_enabled(other, False)
        return token

    def leave(self, token: Token) -> None:
        """Undoes the `enter` that returned this token.

        Also drops the low weights that autocast has cached, if no autocast region is left or the surrounding one has
        another format.
        """
        was_on, dtype, marker, marker_was_on, others = token
        if torch.autocast_decrement_nesting() == 0 or (was_on and dtype is not self.low):
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.device_type, was_on)
        torch.set_autocast_dtype(self.device_type, dtype)
        torch.set_autocast_enabled(marker, marker_was_on)
        for other in others:
            torch.set_autocast_enabled(other, True)

    def _open_marker(self) -> str:
        if not self._marker:
            raise SessionError("the op engine is closed: its session has ended; call halfstep.initialize again")
        return self._marker


@contextmanager
def _without(markers: tuple[str, ...]) -> Iterator[None]:
    with TorchAutocast(markers[0], enabled=False):
        if len(markers) == 1:
            yield
        else:
            with _without(markers[1:]):
                yield
