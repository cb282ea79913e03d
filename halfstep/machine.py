"""What this machine is: its device, the class of its processor, what was measured on that class, and versions.

Kernels are chosen by a table of measurements, one row for each class of processors, since a flag of a CPU does not say
that torch is fast with a format. The `source` of a row says if nothing was measured on that class.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from time import get_clock_info, perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.formats import BF16, E4M3, E5M2, FP16, FP32, LOW_FORMATS, TF32, Format
from halfstep.saved import read_saved
from halfstep.torch_internals import onednn_takes_bf16
from halfstep.version import __version__

WideBackward = tuple[tuple[int, int], ...]
"""Pairs (head width, length), widths ascending: the longest attention with a faster backward pass in fp32 than low."""

_SHORT: WideBackward = ((64, 128),)
_LIMITS = "the limits for attention are those measured on AVX512-BF16"
_NOT_MEASURED = f"not measured on this class; {_LIMITS}"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
WORTH = 2.0
"""Products are emulated unless native ones are at least this many times as fast."""


@dataclass(frozen=True)
class Processor:
    """A class of processors and what was measured on it."""

    name: str
    bf16: float | None  # how many times as fast as emulated products native ones are (`gains.weighed`)
    fp16: float | None  # the same; None: `read_processor` measures it
    wide_backward: WideBackward  # pairs of head width and longest sequence where attention's backward is faster in fp32
    source: str  # where this was measured

    def gain(self, fmt: Format) -> float | None:
        """Returns how many times as fast native products of a format are as emulated ones; None if not known."""
        return {BF16: self.bf16, FP16: self.fp16}.get(fmt)


AMX_FP16 = Processor(
    "x86 AMX+AVX512-FP16",
    bf16=2.8,  # matrix products 3.0, convolutions 2.6
    fp16=0.95,  # 1.1 and 0.85; some fp16 convolutions of torch 2.13 take 50 to 130 times the time of fp32
    wide_backward=((32, 512), (64, 256), (128, 128)),
    source="1 thread, Intel with AMX and AVX512-FP16, torch 2.13: products and convolutions, native and emulated, and "
    "attention in bf16",
)
AMX = Processor("x86 AMX", None, None, AMX_FP16.wide_backward, "taken from x86 AMX+AVX512-FP16")
AVX512_FP16 = Processor("x86 AVX512-BF16+FP16", None, None, _SHORT, _NOT_MEASURED)
AVX512_BF16 = Processor(
    "x86 AVX512-BF16",
    bf16=2.0,  # against fp32, which is no slower than emulation: matrix products 2.3, convolutions 1.8
    fp16=0.02,
    wide_backward=_SHORT,
    source="2 cores, AMD EPYC with AVX512-BF16, torch 2.13: native products and convolutions against fp32; attention's "
    "backward pass in fp32 takes 0.4 to 0.7 of bf16's time at length 128, and more at 256",
)
AVX512 = Processor(
    "x86 AVX512",
    bf16=0.3,  # against fp32: matrix products 0.23, convolutions 0.52
    fp16=0.02,  # against fp32: matrix products 0.011, convolutions 0.031
    wide_backward=_SHORT,
    source="2 cores, Intel Xeon with AVX512 but no bf16 units, torch 2.13: native products and convolutions against "
    f"fp32, emulated ones not measured; {_LIMITS}",
)
AVX2 = Processor(
    "x86 AVX2",
    bf16=0.024,  # native matrix products take 50 times the time of emulated ones, convolutions 32 times
    fp16=0.027,  # 47 and 26 times
    wide_backward=_SHORT,
    source=f"1 thread, AMD EPYC with AVX2, torch 2.13: products and convolutions, native and emulated; {_LIMITS}",
)
X86 = Processor("x86", None, None, _SHORT, _NOT_MEASURED)
ARM_BF16 = Processor("Arm BF16", None, None, _SHORT, _NOT_MEASURED)
ARM = Processor("Arm", None, None, _SHORT, _NOT_MEASURED)
OTHER = Processor("other", None, None, _SHORT, _NOT_MEASURED)

# The first row whose flags (of `torch.cpu.get_capabilities()`) a processor has is its class.
_X86: tuple[tuple[frozenset[str], Processor], ...] = (
    (frozenset({"avx512_f", "amx_tile", "amx_bf16", "avx512_fp16"}), AMX_FP16),
    (frozenset({"avx512_f", "amx_tile", "amx_bf16"}), AMX),
    (frozenset({"avx512_f", "avx512_bf16", "avx512_fp16"}), AVX512_FP16),
    (frozenset({"avx512_f", "avx512_bf16"}), AVX512_BF16),
    (frozenset({"avx512_f"}), AVX512),
    (frozenset({"avx2"}), AVX2),
    (frozenset(), X86),
)
_ARM: tuple[tuple[frozenset[str], Processor], ...] = (
    (frozenset({"bf16"}), ARM_BF16),
    (frozenset({"sve_bf16"}), ARM_BF16),
    (frozenset(), ARM),
)
_ARCHITECTURES = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
PROCESSORS: tuple[Processor, ...] = tuple(dict.fromkeys([*(row for _, row in (*_X86, *_ARM)), OTHER]))

# The first compute capability of CUDA devices with matrix units for a format (CUDA C++ Programming Guide, 17).
FIRST_CAPABILITY: Mapping[Format, tuple[int, int]] = {
    FP16: (7, 0),
    TF32: (8, 0),
    BF16: (8, 0),
    E4M3: (8, 9),
    E5M2: (8, 9),
}


@dataclass(frozen=True)
class DeviceFacts:
    """What halfstep's choices for a device depend on: its kind, its CUDA capability, and the class of the processor."""

    kind: str
    capability: tuple[int, int] | None = None
    processor: Processor = OTHER

    def __str__(self) -> str:
        """Returns the kind of device, with its CUDA capability or the class of its processor."""
        if self.capability is not None:
            return "{} sm{}{}".format(self.kind, *self.capability)
        return f"{self.kind} {self.processor.name}" if self.kind == "cpu" else self.kind


@dataclass(frozen=True)
class Machine:
    """The machine and the versions that a measurement was made with."""

    device: str
    processor: str
    cores: int
    threads: int
    fast: tuple[str, ...]  # formats that the device computes fast
    system: str
    python: str
    torch: str
    halfstep: str
    commit: str | None  # of halfstep's repository; "-dirty" if files of the package differ from it


def read_facts(device: torch.device) -> DeviceFacts:
    """Returns the `DeviceFacts` of a device of this machine."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return DeviceFacts(device.type, capability, read_processor())


def free_bytes(device: torch.device) -> int | None:
    """Returns how many bytes of memory are free on a device; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")  # of Linux; the kernel's own estimate, which counts what it would give up
    lines = known.read_text(encoding="utf-8").splitlines() if device.type == "cpu" and known.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def read_processor() -> Processor:
    """Returns the class of this machine's processor, which is decided by the instruction sets that torch uses."""
    row = table_row()
    saved = read_saved(row.name, model_name(), str(torch.__version__))
    if saved is None:
        return _measured(row) if None in (row.bf16, row.fp16) else row
    return replace(
        row, bf16=saved.bf16, fp16=saved.fp16, wide_backward=saved.wide_backward, source=f"saved on {saved.date}"
    )


@functools.cache
def _measured(row: Processor) -> Processor:
    """Returns a row with figures of this machine in place of those that it lacks."""
    lacking = {fmt.name: fmt.dtype for fmt in (BF16, FP16) if row.gain(fmt) is None}
    found = dict(zip(lacking, measure_gains(list(lacking.values())), strict=True))
    named = " and ".join(lacking)
    source = f"products in {named} measured on this machine when a session first asked; {row.source}"
    return replace(row, **found, source=source)  # type: ignore[arg-type]


def table_row() -> Processor:
    """Returns the row for this machine's processor in the table of processor classes; ignores saved measurements."""
    known = torch.cpu.get_capabilities()
    return processor_of(
        str(known.get("architecture", "")),
        cpu_flags(known),
        vectors=torch.backends.cpu.get_cpu_capability(),
        low_products=onednn_takes_bf16(),
    )


def processor_of(architecture: str, flags: frozenset[str], *, vectors: str, low_products: bool = True) -> Processor:
    """Returns the class of a processor with these `flags`, as far as the settings of torch and oneDNN let them be used.

    >>> processor_of("x86_64", frozenset({"avx2", "avx512_f", "avx512_bf16"}), vectors="AVX2").name
    'x86 AVX2'
    """
    classes = _ARCHITECTURES.get(architecture.lower(), ((frozenset(), OTHER),))
    used = flags
    if classes is _X86 and not vectors.startswith("AVX512"):
        used = flags & {"avx2"} if vectors.startswith("AVX2") else frozenset()
    elif classes is _X86 and not low_products:
        used = flags & {"avx2", "avx512_f"}
    return next(row for needed, row in classes if needed <= used)


def cpu_flags(capabilities: Mapping[str, Any]) -> frozenset[str]:
    """Returns the instruction sets that are True in `torch.cpu.get_capabilities()`, which also has sizes of caches."""
    return frozenset(name for name, value in capabilities.items() if value is True)


def units(fmt: Format, facts: DeviceFacts) -> str | None:
    """Returns the name of the units that compute products of a format fast, such as "sm75"; None if none are known."""
    if fmt == FP32:
        return facts.kind
    if facts.kind == "cpu":
        return facts.processor.name if (facts.processor.gain(fmt) or 0.0) >= WORTH else None
    if facts.kind == "cuda" and facts.capability is not None:
        first = FIRST_CAPABILITY.get(fmt)
        return "sm{}{}".format(*facts.capability) if first is not None and facts.capability >= first else None
    return "Apple silicon" if facts.kind == "mps" and fmt in LOW_FORMATS else None


def needs_emulation(fmt: Format, facts: DeviceFacts) -> bool:
    """Returns whether products in a format are emulated by default, that is computed in fp32 and then rounded."""
    # They are on a CPU unless native products are known to be twice as fast. Without units for a format, torch's own
    # products and convolutions in it take up to 70 times as long as emulated ones, and some of its operations fail.
    return facts.kind == "cpu" and units(fmt, facts) is None


def emulation_notice(fmt: Format, facts: DeviceFacts) -> str:
    """Returns the line that says why products in a format are emulated on a processor, and how."""
    name = facts.processor.name
    why = "torch makes little of this processor's" if fmt.name.upper() in name else "this processor has no"
    return f"{why} {fmt} units: products are computed in fp32 and rounded, as a GPU's tensor cores do ({name})"


@functools.cache
def keep_freed_memory() -> bool:
    """Has glibc keep what this process frees, unless a variable sets its allocator; returns whether it does."""
    # Else it gives the fp32 copies of emulated products back to the system in each step, and fetches them page by page.
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, 32 * 2**20) and mallopt(_TRIM_THRESHOLD, -1))  # the most that it takes; never


def read_machine(device: torch.device) -> Machine:
    """Returns the `Machine` that describes this machine, `device` on it, and the installed versions."""
    facts = read_facts(device)
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        processor=model_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        fast=tuple(fmt.name for fmt in (FP32, *LOW_FORMATS) if units(fmt, facts) is not None),
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),  # TorchVersion is a kind of str that no JSON writer knows
        halfstep=__version__,
        commit=_own_commit(),
    )


@functools.cache
def _own_commit() -> str | None:
    """Returns the commit of the loaded halfstep; asks git only once, since loaded code does not change."""
    return commit_of(Path(__file__).resolve())


def commit_of(file: Path) -> str | None:
    """Returns the commit that a file is part of, followed by "-dirty" if files of its folder differ from it."""
    if not any((folder / ".git").exists() for folder in file.parents):
        return None
    # One process tells all three: the commit, what is not tracked, what differs.
    wanted = ("--porcelain=v2", "--branch", "--untracked-files=normal", "--ignored=traditional")
    lines = _git(file.parent, "-c", "status.relativePaths=true", "status", *wanted, "--", ".")
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    untracked = {Path(os.path.normpath(file.parent / line[2:])) for line in lines if line[:2] in ("? ", "! ")}
    if commit == "(initial)" or not untracked.isdisjoint((file, *file.parents)):
        return None
    dirty = any(line[:2] in ("1 ", "2 ", "u ") for line in lines)
    return f"{commit[:12]}-dirty" if dirty else commit[:12]


def _git(folder: Path, *arguments: str) -> list[str]:
    """Returns the lines that git prints, or [] if it fails; takes no lock that another git process would wait for."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return run.stdout.splitlines()


@functools.cache
def model_name() -> str:
    """Returns the processor's name as the operating system reports it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


_REPEATS = 3
_CLEAR = 4.0  # a native call that takes this many times as long is not made again, nor a larger one
# The thread's own time, which other processes of a busy machine do not lengthen; Windows counts it too coarsely.
_CLOCK = thread_time if get_clock_info("thread_time").resolution < 1e-6 else perf_counter

Call = Callable[[Tensor, Tensor], Tensor]
_convolve = partial(F.conv2d, padding=1)


def weighed(product: float, convolution: float) -> float:
    """Returns the speed-up of a product and a convolution together, which take the same time before."""
    return 2.0 / (1.0 / product + 1.0 / convolution) if product and convolution else 0.0


def measure_gains(dtypes: Sequence[torch.dtype]) -> list[float]:
    """Returns for each low format how many times as fast native products are as emulated ones (`weighed`)."""
    # A format without a kernel has the gain 0. It runs in a thread of its own, where no autocast or mode of the caller
    # acts, on one core, since what several cores do together is slow in chance where others use them too.
    found: list[float] = []

    def measure() -> None:
        cores = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for dtype in dtypes:
                    found.append(weighed(_gain(torch.mm, _matrices, dtype), _gain(_convolve, _images, dtype)))
        finally:
            torch.set_num_threads(cores)

    thread = Thread(target=measure, name="halfstep-gains")
    thread.start()
    thread.join()
    return found


def _gain(call: Call, operands: Callable[[bool], tuple[Tensor, Tensor]], dtype: torch.dtype) -> float:
    small = _ratio(call, operands(False), dtype)
    return small if small < 1 / _CLEAR else _ratio(call, operands(True), dtype)


def _ratio(call: Call, operands: tuple[Tensor, Tensor], dtype: torch.dtype) -> float:
    first, second = (operand.to(dtype) for operand in operands)

    def native() -> object:
        return call(first, second)

    def emulated() -> object:
        return call(first.float(), second.float()).to(dtype)

    try:
        native()  # what is compiled or looked up at first
    except (RuntimeError, NotImplementedError):  # no kernel
        return 0.0
    emulated()
    least = [float("inf"), float("inf")]
    for _ in range(_REPEATS):
        for index, timed in enumerate((emulated, native)):
            start = _CLOCK()
            timed()
            least[index] = min(least[index], _CLOCK() - start)
        if least[1] > _CLEAR * least[0]:
            break
    return least[0] / least[1]


def _matrices(large: bool) -> tuple[Tensor, Tensor]:
    size = 256 if large else 96
    return _ones(size, size), _ones(size, size)


def _images(large: bool) -> tuple[Tensor, Tensor]:
    channels, side = (64, 32) if large else (16, 16)  # 14 x 14 is so little that oneDNN's own cost decides
    return _ones(1, channels, side, side), _ones(channels, channels, 3, 3)


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")
