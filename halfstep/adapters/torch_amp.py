"""Puts halfstep's drop-ins in place of torch.amp's names, so that scripts need no change; this can be undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, partialmethod, wraps
from typing import Any

import torch
from torch import Tensor

from halfstep.train.cast.ops import Emulators, autocast
from halfstep.train.scale.grad_scaler import GradScaler


class CudaAutocast(autocast):
    """The drop-in for `torch.cuda.amp.autocast`, which has no argument for the device."""

    def __new__(cls, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
        return super().__new__(cls, "cuda", dtype, enabled, cache_enabled)

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class CpuAutocast(autocast):
    """The drop-in for `torch.cpu.amp.autocast`, which has no argument for the device."""

    def __new__(cls, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> Any:
        return super().__new__(cls, "cpu", dtype, enabled, cache_enabled)

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", dtype, enabled, cache_enabled)


class CudaGradScaler(GradScaler):
    """The drop-in for `torch.cuda.amp.GradScaler`, which has no argument for the device."""

    __init__ = partialmethod(GradScaler.__init__, "cuda")


class CpuGradScaler(GradScaler):
    """The drop-in for `torch.cpu.amp.GradScaler`, which has no argument for the device."""

    __init__ = partialmethod(GradScaler.__init__, "cpu")


_TORCHS_FWD, _TORCHS_BWD = torch.amp.custom_fwd, torch.amp.custom_bwd


def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Works like `torch.amp.custom_fwd`, but uses the CPU's autocast if a function for CUDA gets only CPU tensors."""
    return _where_tensors_are(fwd, device_type, partial(_TORCHS_FWD, cast_inputs=cast_inputs))


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Works like `torch.amp.custom_bwd`, but uses the CPU's autocast if a function for CUDA gets only CPU tensors."""
    return _where_tensors_are(bwd, device_type, _TORCHS_BWD)


def _where_tensors_are(function: Any, device_type: str, torchs: Callable[..., Any]) -> Any:
    """Decorates a function with `torchs`, which is torch's own `custom_fwd` or `custom_bwd`."""
    # In calls with CPU tensors only, a function for CUDA follows the CPU's autocast.
    asked, on_cpu = torchs(device_type=device_type), torchs(device_type="cpu")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        as_asked = asked(function)
        if device_type != "cuda":
            return as_asked  # type: ignore[no-any-return]
        as_on_cpu = on_cpu(function)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            devices = {each.device.type for each in (*args, *kwargs.values()) if isinstance(each, Tensor)}
            return (as_on_cpu if devices == {"cpu"} else as_asked)(*args, **kwargs)

        return run

    return decorate if function is None else decorate(function)


# Every place where torch documents one of these, or had it before it was deprecated. `torch.cuda.amp.custom_fwd` and
# `custom_bwd` call those of `torch.amp`.
PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch, "autocast", autocast),
    (torch, "GradScaler", GradScaler),
    (torch.amp, "autocast", autocast),
    (torch.amp, "GradScaler", GradScaler),
    (torch.amp, "custom_fwd", custom_fwd),
    (torch.amp, "custom_bwd", custom_bwd),
    (torch.cuda.amp, "autocast", CudaAutocast),
    (torch.cuda.amp, "GradScaler", CudaGradScaler),
    (torch.cuda.amp.autocast_mode, "autocast", CudaAutocast),
    (torch.cuda.amp.grad_scaler, "GradScaler", CudaGradScaler),
    (torch.cpu.amp, "autocast", CpuAutocast),
    (torch.cpu.amp, "GradScaler", CpuGradScaler),
)


def install() -> Callable[[], None]:
    """Replaces autocast and GradScaler in torch's modules with halfstep's; returns a function that undoes it.

    `custom_fwd` and `custom_bwd` are replaced too. Names that a script imported earlier are not affected. On a CPU
    without units for the format of a region, products in it are emulated, as in a session; not in compiled code.
    """
    with ExitStack() as stack:
        emulators = Emulators()
        stack.callback(emulators.close)
        stack.callback(setattr, autocast, "emulators", autocast.emulators)
        autocast.emulators = emulators
        for module, name, drop_in in PLACES:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, drop_in)
        return stack.pop_all().close
