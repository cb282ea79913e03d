"""The op engine: makes torch run each op in the format that an op table says, forward, backward and when compiled.

`torch.autocast` does the work for the rows on which its own op lists for the device agree with the table. For the other
rows, opregistry.py puts a kernel into the dispatcher, which acts inside the regions of this engine. `autocast` is a
drop-in for torch's own.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import autocast as TorchAutocast  # also where torch.autocast is a drop-in

from halfstep.errors import PlanError, SessionError
from halfstep.formats import as_format, is_low
from halfstep.machine import WideBackward, emulation_notice, needs_emulation, read_facts
from halfstep.plan.optable import BY_CALL, ROWS, Action, stock_action
from halfstep.torch_internals import OpenAutocast
from halfstep.train.cast.opregistry import REGISTRY, Table, reach
from halfstep.train.cast.products import EMULATED
from halfstep.train.cast.recipes import Units
from halfstep.validate import check_keywords

Token = tuple[bool, torch.dtype, str, bool, tuple[str, ...], int]
_COUNT: tuple[Any, ...] = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


@dataclass(frozen=True)
class Switch:
    """The autocast settings by which a thread tells that it is inside a plan; keeps no engine alive."""

    # The marker's bit alone is not enough: in a backward pass it is also on outside of forwards. The format is needed
    # where an activation checkpoint restores the caller's own autocast, which may be on for `device_type` in another
    # format.

    marker: str
    device_type: str
    low: torch.dtype

    def is_on(self) -> bool:
        return torch.is_autocast_enabled(self.marker) and torch.is_autocast_enabled(self.device_type)

    def is_inside(self) -> bool:
        """Tells whether this thread is in a region that casts to `low`."""
        return self.is_on() and torch.get_autocast_dtype(self.device_type) is self.low


class OpEngine:
    """Casts ops by a table inside its regions; one per session, and engines with equal tables share their kernels."""

    def __init__(
        self,
        actions: Mapping[str, Action],
        low: torch.dtype,
        device_type: str,
        wide_backward: WideBackward = (),
        *,
        emulate: bool = False,
        products: str = "plan",
        units: Units = "bf16",
    ) -> None:
        self.low = low
        self.device_type = device_type
        self._table = Table(device_type, frozenset(actions.items()), wide_backward, emulate, products, units)
        self._marker = ""

    def open(self) -> None:
        """Registers the kernels of the op table with torch's dispatcher."""
        if not self._marker:
            with suppress(PlanError):
                self._marker = REGISTRY.acquire(self._table)
            if not self._marker:
                gc.collect()  # sessions that nobody closed may hold all places
                self._marker = REGISTRY.acquire(self._table)
            reach(self._marker)  # for a graph of backend="eager", which enters regions by torch's own functions alone
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
        """Returns a context manager that casts ops by the table, and that torch.compile can trace."""
        marker = self._open_marker()
        if not enabled:
            with TorchAutocast(self.device_type, dtype=self.low, enabled=False):
                yield
            return
        reach(marker)
        with TorchAutocast(marker), TorchAutocast(self.device_type, dtype=self.low), _without(REGISTRY.others(marker)):
            yield

    def entered(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context manager that does what `region` does, for eager code; a Ctrl-C leaves nothing switched."""
        return self._kept(partial(self.enter, enabled=enabled))

    def backward(self) -> AbstractContextManager[None]:
        """Returns a context manager for a backward pass, in which checkpoints compute parts of the forward again."""
        # It turns on the table, whose kernels are met only if one of them has run under such a checkpoint: else every
        # operation of the backward pass that has a kernel would pass through it.
        return self._kept(self._turn_on_backward)

    def _turn_on_backward(self, token: Token) -> None:
        _turn_on(token)
        reach(self._marker, REGISTRY.repeats(self._marker))

    @contextmanager
    def _kept(self, switch: Callable[[Token], None]) -> Iterator[None]:
        token = self.read()
        try:
            try:
                switch(token)
                yield
            finally:
                self.leave(token)
        except BaseException:  # a Ctrl-C may have come in the middle of leaving
            self.leave(token)
            raise

    def read(self) -> Token:
        """Returns this thread's autocast settings, as `enter` and `leave` take them; changes nothing."""
        marker, device_type, on = self._open_marker(), self.device_type, torch.is_autocast_enabled
        others = REGISTRY.others(marker)
        if others:
            others = tuple(other for other in others if on(other))
        _, nesting = map(BuiltinFunctionType.__call__, _COUNT)  # one bytecode, so that no Ctrl-C comes between the two
        return on(device_type), torch.get_autocast_dtype(device_type), marker, on(marker), others, nesting

    def enter(self, token: Token, enabled: bool = True) -> None:
        """Does what entering `region` does, faster, in eager code; `token` is what `read` returned just before."""
        was_on, dtype, *_ = token
        torch.autocast_increment_nesting()
        if dtype is not self.low:
            if was_on:
                torch.clear_autocast_cache()  # which keeps one cast of a weight, whatever its format
            torch.set_autocast_dtype(self.device_type, self.low)
        torch.set_autocast_enabled(self.device_type, enabled)
        if enabled:
            reach(token[2])
            _turn_on(token)

    def leave(self, token: Token) -> None:
        """Restores the settings that `read` returned; may be called again, if a Ctrl-C has come in the middle."""
        was_on, dtype, marker, marker_was_on, others, nesting = token
        reach(marker)  # for the rest of a region around a backward pass
        torch.set_autocast_enabled(self.device_type, was_on)
        torch.set_autocast_dtype(self.device_type, dtype)
        torch.set_autocast_enabled(marker, marker_was_on)
        for other in others:
            torch.set_autocast_enabled(other, True)
        now = torch.autocast_decrement_nesting()
        while now > nesting:
            now = torch.autocast_decrement_nesting()
        while now < nesting:  # nothing had been entered, or this is called again
            now = torch.autocast_increment_nesting()
        if nesting == 0 or (was_on and dtype is not self.low):
            torch.clear_autocast_cache()

    def _open_marker(self) -> str:
        if not self._marker:
            raise SessionError("the op engine is closed: its session has ended; call halfstep.initialize again")
        return self._marker


def _turn_on(token: Token) -> None:
    _, _, marker, _, others, _ = token
    torch.set_autocast_enabled(marker, True)
    for other in others:
        torch.set_autocast_enabled(other, False)


@contextmanager
def _without(markers: tuple[str, ...]) -> Iterator[None]:
    if not markers:
        yield
        return
    with TorchAutocast(markers[0], enabled=False), _without(markers[1:]):
        yield


# ---- a drop-in torch.autocast
_LOG = logging.getLogger("halfstep.device")


class Emulators:
    """Emulates products in autocast regions on a CPU without units; keeps its kernels, slow to make."""

    def __init__(self) -> None:
        self._engines: dict[torch.dtype, OpEngine | None] = {}

    def entered(self, region: OpenAutocast) -> AbstractContextManager[None] | None:
        """Returns a context to enter inside a region; None where nothing is emulated, or a plan acts by itself."""
        low = region.fast_dtype
        if region.device != "cpu" or not region.enabled or not is_low(low):
            return None
        if low not in self._engines:
            fmt, facts, engine = as_format(low), read_facts(torch.device("cpu")), None
            if needs_emulation(fmt, facts):
                engine = OpEngine(_as_torch(), low, "cpu", emulate=True)
                try:
                    engine.open()
                    _LOG.warning(emulation_notice(fmt, facts))
                except PlanError:  # there are too many op tables in this process
                    engine = None
            self._engines[low] = engine
        engine = self._engines[low]
        if engine is None or any(map(torch.is_autocast_enabled, REGISTRY.others(engine.switch.marker))):
            return None  # in a region of another engine
        return engine.entered()

    def close(self) -> None:
        for engine in self._engines.values():
            if engine is not None:
                engine.close()
        self._engines.clear()


def _as_torch() -> dict[str, Action]:
    """Returns the actions of torch's own autocast on a CPU; recurrent layers, whose parts it runs low, are low."""
    names = {name for row in ROWS for name in row.overloads}
    stock = {name: stock_action(name, "cpu") for name in names}
    composite = {name for name in names if stock[name] is None and name.partition(".")[0] in EMULATED}
    low: dict[str, Action] = {name: BY_CALL.get(name, "low") for name in composite}
    return {name: action for name, action in stock.items() if action is not None} | low


class autocast(OpenAutocast):
    """`torch.autocast` with the same arguments, op lists and results, but an instance may be entered inside itself.

    With `torch.autocast` itself, autocast stays on after such a nested use has ended. Functions decorated with an
    instance may call themselves, and several threads may use one instance at a time. Code that torch.compile traces
    uses `torch.autocast` itself.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """

    emulators: Emulators | None = None
    """What emulates products in regions on a CPU, while `halfstep.adapters.torch_amp.install` or halfstep run acts."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        try:
            super().__init__(device_type, dtype, enabled, cache_enabled)
        except (RuntimeError, ValueError) as error:
            raise type(error)(
                f"{error}; autocast expected the type of a device, such as 'cuda' or 'cpu', and the format as "
                "dtype=torch.bfloat16"
            ) from None
        self._entered: dict[int, list[ExitStack]] = {}  # by thread
        self.on_made()

    @staticmethod
    def check(given: dict[str, Any]) -> None:  # not in a frame around `__init__`, whose caller is looked at
        check_keywords("autocast()", given, ("device_type", "dtype", "enabled", "cache_enabled"))

    def on_made(self) -> None:
        """For subclasses: called when an instance is made, but not in code that torch.compile traces; does nothing."""

    def __enter__(self) -> Any:
        """Switches autocast in this thread to the settings of this instance."""
        with ExitStack() as stack:
            stack.enter_context(self.again())
            emulating = None if self.emulators is None else self.emulators.entered(self)
            if emulating is not None:
                stack.enter_context(emulating)
            self._entered.setdefault(threading.get_ident(), []).append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> Any:
        thread = threading.get_ident()
        entered = self._entered[thread]
        once = entered.pop()
        if not entered:
            del self._entered[thread]
        return once.__exit__(*error)
