"""torch.amp's names put on halfstep's drop-ins, for scripts that stay as they are, and taken off again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from halfstep.cast.autocast import autocast
from halfstep.scale.grad_scaler import GradScaler


class CudaAutocast(autocast):
    """`torch.cuda.amp.autocast`, whose device is fixed."""

    def __new__(cls, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
        """Makes torch's own in code that torch.compile traces."""
        return super().__new__(cls, "cuda", dtype, enabled, cache_enabled)

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class CpuAutocast(autocast):
    """`torch.cpu.amp.autocast`, whose device is fixed."""

    def __new__(cls, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> Any:
        """Makes torch's own in code that torch.compile traces."""
        return super().__new__(cls, "cpu", dtype, enabled, cache_enabled)

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", dtype, enabled, cache_enabled)


class CudaGradScaler(GradScaler):
    """`torch.cuda.amp.GradScaler`, whose device is fixed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class CpuGradScaler(GradScaler):
    """`torch.cpu.amp.GradScaler`, whose device is fixed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


# Every place where torch documents one of these, or had it before it was deprecated. `custom_fwd` and `custom_bwd` stay
# torch's: they ask the thread whether autocast is on, which the drop-ins set as torch's do.
PLACES: tuple[tuple[Any, str, type], ...] = (
    (torch, "autocast", autocast),
    (torch, "GradScaler", GradScaler),
    (torch.amp, "autocast", autocast),
    (torch.amp, "GradScaler", GradScaler),
    (torch.cuda.amp, "autocast", CudaAutocast),
    (torch.cuda.amp, "GradScaler", CudaGradScaler),
    (torch.cuda.amp.autocast_mode, "autocast", CudaAutocast),
    (torch.cuda.amp.grad_scaler, "GradScaler", CudaGradScaler),
    (torch.cpu.amp, "autocast", CpuAutocast),
    (torch.cpu.amp, "GradScaler", CpuGradScaler),
)


def install() -> Callable[[], None]:
    """Replaces torch.amp's classes with halfstep's, and returns a function that undoes it.

    Names imported earlier stay torch's.
    """
    with ExitStack() as stack:
        for module, name, drop_in in PLACES:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, drop_in)
        return stack.pop_all().close
