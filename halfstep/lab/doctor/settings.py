"""Settings of torch and of the machine that cost speed or accuracy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

from halfstep.measurements import Setting
from halfstep.timing import speedup, take_turns
from halfstep.train.kernels import library

_SLOWER = 1.1  # what costs less is not spoken of
_TINY = 1e-39  # subnormal in fp32


def read_settings(device: torch.device, *, seconds: float) -> tuple[Setting, ...]:
    """Returns the settings that matter on a device, with their measured costs; takes about `seconds` in total."""
    found = [_deterministic()]
    if device.type == "cuda":
        found += _cuda_settings()
    else:
        found += [_threads(seconds / 2), _subnormals(seconds / 2), _onednn()]
    return tuple(found)


def _threads(seconds: float) -> Setting:
    taken, cores = torch.get_num_threads(), _cores()
    name, value = "threads", f"{taken} of {cores} cores"
    if taken == cores:
        return Setting(name, value)
    operand = torch.ones(512, 512, dtype=torch.float32, device="cpu")

    def on(threads: int) -> object:
        torch.set_num_threads(threads)
        return operand @ operand

    advice = f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}"
    costs = f"speed: a matrix product takes {{:.1f}} times as long as on {cores} threads"
    try:
        return _timed(lambda: on(taken), lambda: on(cores), seconds, Setting(name, value), costs, advice)
    finally:
        torch.set_num_threads(taken)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # to the cores that this process may use; not on every system
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _timed(
    now: Callable[[], object], other: Callable[[], object], seconds: float, setting: Setting, costs: str, advice: str
) -> Setting:
    """Adds how many times as long a call takes `now`, and the advice, to a setting if that is worth telling."""
    times = take_turns({"now": now, "other": other}, device=torch.device("cpu"), seconds=seconds)
    gain = speedup(times["now"], times["other"]) or 0.0
    return replace(setting, costs=costs.format(gain), advice=advice) if gain >= _SLOWER else setting


def _subnormals(seconds: float) -> Setting:
    tiny = torch.full((512, 512), _TINY, dtype=torch.float32, device="cpu")
    flushed = bool((tiny * 0.5 == 0).all())
    name, value = "subnormal numbers", "flushed to 0" if flushed else "kept"
    if flushed:
        return Setting(name, value, "accuracy: values below 1.2e-38 become 0", "torch.set_flush_denormal(False)")
    plain = torch.ones_like(tiny)
    costs = "speed: subnormal numbers take {:.1f} times as long"
    advice = "torch.set_flush_denormal(True)"
    return _timed(lambda: tiny * 0.5, lambda: plain * 0.5, seconds, Setting(name, value), costs, advice)


def _onednn() -> Setting:
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if there and torch.backends.mkldnn.enabled:
        return Setting("oneDNN", "on")
    return Setting("oneDNN", "off", "speed: low products run on slow kernels", "torch.backends.mkldnn.enabled = True")


def _deterministic() -> Setting:
    name, costs = "deterministic algorithms", "speed: the deterministic forms of some kernels are slower"
    on = Setting(name, "on", costs, "torch.use_deterministic_algorithms(False)")
    return on if torch.are_deterministic_algorithms_enabled() else Setting(name, "off")


def _cuda_settings() -> Iterator[Setting]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for name, backend, advice in (
        ("TF32 in matrix products", matmul, "torch.backends.cuda.matmul.fp32_precision = 'tf32'"),
        ("TF32 in convolutions", cudnn.conv, "torch.backends.cudnn.conv.fp32_precision = 'tf32'"),  # type: ignore[attr-defined]
    ):
        costs = "accuracy of what runs in fp32: operands keep 10 bits of 23"
        on = Setting(name, "on", costs, advice.replace("tf32'", "ieee'"))
        off = Setting(name, "off", "speed of what runs in fp32; the TF32 rows show how much", advice)
        yield on if backend.fp32_precision == "tf32" else off
    name, costs = "cuDNN benchmark", "speed of convolutions whose sizes repeat"
    off = Setting(name, "off", costs, "torch.backends.cudnn.benchmark = True")
    yield Setting(name, "on") if cudnn.benchmark else off
    costs = "accuracy: parts of a split sum are rounded, and may overflow in fp16"
    for low in ("bf16", "fp16"):
        option, name = f"allow_{low}_reduced_precision_reduction", f"sums of {low} products in {low}"
        on = Setting(name, "allowed", costs, f"torch.backends.cuda.matmul.{option} = False")
        yield on if getattr(matmul, option) else Setting(name, "not allowed")


def read_tools(device: torch.device) -> dict[str, str]:
    """Returns a dict from the name of each tool that halfstep's fast kernels need to a text on what was found."""
    # The compiled loops and Triton; for a CUDA device the dict also has its driver.
    loops, driver = library.find(), {}
    if device.type == "cuda":
        found = get_nvidia_driver_version(run) or "unknown, as nvidia-smi did not report it"  # type: ignore[no-untyped-call]
        driver = {"CUDA driver": f"{found}; torch is built with CUDA {torch.version.cuda}"}
    return driver | {
        "compiled loops": loops.name if loops is not None else f"none: {library.SLOWER}; {library.MEND}",
        "Triton": "found" if find_spec("triton") else "none: the update on CUDA runs as torch operations",
    }
