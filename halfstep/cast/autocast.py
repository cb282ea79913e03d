"""A drop-in `torch.autocast` that may be entered again inside itself."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch

from halfstep.torch_internals import OpenAutocast


class autocast(OpenAutocast):
    """`torch.autocast` with the same arguments, op lists and results, but an instance may be entered inside itself.

    With `torch.autocast` itself, autocast stays on after such a nested use has ended. Functions decorated with an
    instance may call themselves, and several threads may use one instance at a time. Code that torch.compile traces
    uses `torch.autocast` itself.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """

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
        self._entered: dict[int, list[torch.autocast]] = {}  # by thread
        self.on_made()

    def on_made(self) -> None:
        """For subclasses: called when an instance is made, but not in code that torch.compile traces; does nothing."""

    def __enter__(self) -> Any:
        """Switches autocast in this thread to the settings of this instance."""
        once = self.again()
        once.__enter__()  # type: ignore[no-untyped-call]
        self._entered.setdefault(threading.get_ident(), []).append(once)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        """Restores the settings that this thread had before."""
        thread = threading.get_ident()
        entered = self._entered[thread]
        once = entered.pop()
        if not entered:
            del self._entered[thread]
        return once.__exit__(kind, error, trace)
