"""A drop-in `torch.autocast` that may be entered again inside itself."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from halfstep.errors import PlanError
from halfstep.formats import as_format, is_low
from halfstep.machine import emulation_notice, needs_emulation, read_facts
from halfstep.plan.optable import BY_CALL, ROWS, Action, stock_action
from halfstep.torch_internals import OpenAutocast
from halfstep.train.cast.ops import OpEngine
from halfstep.train.cast.products import EMULATED

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
        return None if engine is None or engine.is_inside_another() else engine.entered()

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
