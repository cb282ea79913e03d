"""Kernels for devices that need another Python package (Triton for CUDA), which is imported when it is first needed."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch
from torch import Tensor

from halfstep.train.kernels.batch import Scratch
from halfstep.train.kernels.tables import filled

_LOG = logging.getLogger("halfstep")


def triton_can_read(grads: list[Tensor]) -> bool:
    """Returns whether these gradients are on CUDA, Triton works on their device, and its kernels can read them."""
    kernels = triton_on(grads[0].device) if grads else None
    return kernels is not None and bool(kernels.can_read(grads))


def triton_read(grads: list[Tensor], scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the L2 norm of all gradients, whether any is non-finite, and for each whether it is (bool, one each)."""
    kernels = triton_on(grads[0].device)
    assert kernels is not None
    result: tuple[Tensor, Tensor, Tensor] = kernels.read(grads, scratch)
    return result


def triton_casts(device: torch.device) -> ModuleType | None:
    """Returns the module of Triton's casts, or None where Triton does not run."""
    return None if triton_on(device) is None else importlib.import_module("halfstep.train.kernels.casts")


def triton_on(device: torch.device) -> ModuleType | None:
    """Returns the module of Triton kernels, or None if the device is not CUDA or they cannot run on it."""
    return triton_kernels(device) if device.type == "cuda" else None


@functools.cache
def triton_kernels(device: torch.device) -> ModuleType | None:
    """Returns the module of Triton kernels, or None, with one warning that says why, if it cannot run on the device."""
    # Tries a small kernel, since Triton needs a C compiler and a GPU that it supports. Also runs the operations that
    # the capture of a CUDA graph uses, so that they are loaded before a capture begins.
    try:
        kernels = importlib.import_module("halfstep.train.kernels.triton")
        kernels.read([torch.ones(1, dtype=torch.float32, device=device)], Scratch())
        filled([0], device)
    except ImportError as error:
        why = f"Triton cannot be imported ({error}); run: pip install triton"
    except Exception as error:  # whatever a compiler and a driver raise
        why = f"Triton does not run here: {type(error).__name__}: {error}"
    else:
        return kernels
    _LOG.warning("halfstep's loops for %s run as torch operations, in more passes over memory: %s", device, why)
    return None
