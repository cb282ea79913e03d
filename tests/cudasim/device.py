"""What a CPU build of torch lacks for the simulated CUDA device: functions of `torch.cuda`, and Triton's launches.

`taken` says what was done since it was last called: operations ("op: ..."), and what made the host wait ("wait: ...").
"""

from __future__ import annotations

import os
import time
import types
import warnings
from collections import Counter

import numpy as np
import torch

LAUNCHES: Counter[str] = Counter()  # of Triton kernels, by name
EMPTY = (
    "manual_seed", "manual_seed_all", "init", "_lazy_init", "set_rng_state_all", "empty_cache", "ipc_collect", "_sleep",
    "reset_peak_memory_stats", "set_per_process_memory_fraction",
)  # fmt: skip
MODES = {"default": 0, "warn": 1, "error": 2}


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device=None, priority=0, **options):
        return super().__new__(cls, device=device_of(device), priority=priority)

    @property
    def cuda_stream(self):
        return self.stream_id


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def record(self, *stream):
        self.recorded = time.perf_counter()
        super().record(*stream)

    def elapsed_time(self, other):  # torch's takes no subclasses
        return 1e3 * max(other.recorded - self.recorded, 1e-6)


class Settings:
    """What a test may set: the capability of the devices, and whether a graph is being captured."""

    capability = tuple(int(n) for n in os.environ.get("CUDASIM_CAPABILITY", "9,0").split(","))
    capturing = False
    mode = 0
    warned = False


def device_of(given=None):
    index = given if isinstance(given, int) else torch.device("cuda" if given is None else given).index
    return torch.device("cuda", torch.ops.cudasim.device(-1) if index is None else index)


def exchange(index):
    return torch.ops.cudasim.device(-1) if index < 0 else torch.ops.cudasim.device(index)


def taken():
    """Returns how often each operation and each wait happened since the last call, and forgets it."""
    return dict(torch.ops.cudasim.taken())


def launches(counts):
    """Returns how many operations and Triton kernels `counts` of `taken` and `LAUNCHES` have."""
    return sum(count for what, count in counts.items() if what.startswith("op: ")) + LAUNCHES.total()


def waits(counts):
    return {what: count for what, count in counts.items() if what.startswith("wait: ")}


def set_sync_debug_mode(mode):
    Settings.mode = MODES.get(mode, mode)
    torch.ops.cudasim.strict(int(Settings.mode == 2))
    if not Settings.warned:  # as torch does, once it has set the mode
        Settings.warned = True
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)


def properties(device=None):
    major, minor = Settings.capability
    return types.SimpleNamespace(
        name="Simulated GPU", major=major, minor=minor, total_memory=16 * 2**30, multi_processor_count=132, uuid="0"
    )


def giving(value):
    """Returns a new function: torch.compile tells functions apart by their identity."""
    return lambda *args, **options: value


def install():
    """Patches torch once for the process; `build.load` calls it."""
    current = torch.accelerator.current_stream
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: exchange(-1),
        "set_device": lambda device: exchange(device_of(device).index),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: current(device_of(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(device_of(device)),
        "is_current_stream_capturing": lambda: Settings.capturing,
        "get_device_capability": lambda device=None: Settings.capability,
        "get_device_name": lambda device=None: "Simulated GPU",
        "get_device_properties": properties,
        "is_bf16_supported": lambda *args: True,
        "mem_get_info": lambda device=None: (8 * 2**30, 16 * 2**30),
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: Settings.mode,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": list,
        "_is_in_bad_fork": lambda: False,
    }
    functions |= {name: giving(0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")}
    functions |= {name: giving(None) for name in EMPTY}
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.version.cuda = "13.0"
    torch._C._cuda_getDeviceCount = lambda: 2
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret()
    library = torch.library.Library("aten", "IMPL")
    for name, function in WIDER.items():
        library.impl(name, function, "CUDA")
    install.library = library


def interpret():
    """Has Triton's interpreter work on the memory of the simulated device, in place, and patch its language once."""
    from triton.runtime import interpreter

    np.seterr(all="ignore")  # as a GPU does
    patch, seen = interpreter._patch_lang, set()

    def patch_once(function):
        if id(function.__globals__) not in seen:
            patch(function)
            seen.add(id(function.__globals__))
        return types.SimpleNamespace(restore=giving(None))

    def near(value):
        return torch.ops.cudasim.host(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

    def given(self, args, kwargs):
        LAUNCHES[self.fn.__name__] += 1
        return [near(value) for value in args], {name: near(value) for name, value in kwargs.items()}

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor._init_args_hst = given
    interpreter.GridExecutor._restore_args_dev = giving(None)


def histc(self, bins=100, min=0, max=0):
    counted = torch.histc(torch.ops.cudasim.host(self).float(), bins, float(min), float(max))
    return counted.to(self.dtype).to(self.device, non_blocking=True)


def wider(function):
    def softmax(self, dim, half_to_float):
        x = torch.ops.cudasim.host(self)
        out = function(x.float() if half_to_float else x, dim)
        return torch.empty_like(out, device=self.device).copy_(out, non_blocking=True)

    return softmax


def backward(function):
    def softmax(grad, output, dim, input_dtype):
        out = function(*map(torch.ops.cudasim.host, (grad, output)), dim, grad.dtype).to(input_dtype)
        return torch.empty_like(out, device=grad.device).copy_(out, non_blocking=True)

    return softmax


def foreach_norm(tensors, order=2, dtype=None):
    """One launch for tensors of one format, as on CUDA, where others have one each."""
    LAUNCHES["foreach_norm"] += 1 if len({t.dtype for t in tensors}) == 1 else len(tensors)
    made = torch.empty(len(tensors), dtype=dtype or tensors[0].dtype, device=tensors[0].device)
    near = [torch.linalg.vector_norm(torch.ops.cudasim.host(t), order, dtype=dtype) for t in tensors]
    torch.ops.cudasim.host(made).copy_(torch.stack(near))
    return list(made.unbind())


WIDER = {  # what the CPU has not in all formats of CUDA
    "histc": histc,
    "_foreach_norm.Scalar": foreach_norm,
    "_softmax": wider(torch.softmax),
    "_log_softmax": wider(torch.log_softmax),
    "_softmax_backward_data": backward(torch.ops.aten._softmax_backward_data),
    "_log_softmax_backward_data": backward(torch.ops.aten._log_softmax_backward_data),
}
