"""Finds host syncs on a CPU: `.item()`, `bool(tensor)` and `float(tensor)` all read a scalar through one operation."""

import contextlib
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):
    """Fails where a tensor is read on the host, or where an operation has a result whose size depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
        ), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_cuda_sync():
    """Raises where the host waits for a CUDA device."""
    with warnings.catch_warnings():  # that the mode is a prototype: said once, when it is set already
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
