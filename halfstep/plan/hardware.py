"""What a device computes fast, and so which low format to take where none was named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.formats import BF16, E4M3, E5M2, FP16, FP32, TF32, Format

# CPU flags, as torch.cpu.get_capabilities() names them, that stand for matrix products of a format in hardware.
CPU_UNITS: Mapping[Format, Mapping[str, str]] = {
    BF16: {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm BF16", "sve_bf16": "SVE BF16"},
    FP16: {"avx512_fp16": "AVX512-FP16", "amx_fp16": "AMX-FP16", "fp16_arith": "Arm FP16"},
}
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
    """What the choice of a format depends on: the kind of device, its CUDA capability, the flags of a CPU."""

    kind: str
    capability: tuple[int, int] | None = None
    flags: frozenset[str] = frozenset()


def read_facts(device: torch.device) -> DeviceFacts:
    """Returns the facts of a device of this machine."""
    if device.type == "cpu":
        return DeviceFacts("cpu", flags=cpu_flags(torch.cpu.get_capabilities()))
    if device.type == "cuda":
        return DeviceFacts("cuda", capability=torch.cuda.get_device_capability(device))
    return DeviceFacts(device.type)


def cpu_flags(capabilities: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the instruction sets in what `torch.cpu.get_capabilities()` gives; it also holds sizes.

    >>> cpu_flags({"avx512_bf16": True, "amx_bf16": False, "l2_cache_size": 1})
    frozenset({'avx512_bf16'})
    """
    return frozenset(name for name, value in capabilities.items() if value is True)


def units(fmt: Format, facts: DeviceFacts) -> str | None:
    """Returns the name of what computes matrix products of a format in hardware, or None where nothing does.

    >>> units(FP16, DeviceFacts("cuda", capability=(7, 5)))
    'sm75'
    """
    if fmt == FP32:
        return facts.kind
    if facts.kind == "cpu":
        return next((name for flag, name in CPU_UNITS.get(fmt, {}).items() if flag in facts.flags), None)
    if facts.kind == "cuda" and facts.capability is not None:
        first = FIRST_CAPABILITY[fmt]
        return "sm{}{}".format(*facts.capability) if facts.capability >= first else None
    if facts.kind == "mps":
        return "Apple silicon" if fmt in (BF16, FP16) else None
    return None


def choose_low(facts: DeviceFacts) -> tuple[Format, str]:
    """Returns the low format to take on a device, bf16 before fp16, and the notice that says so.

    >>> choose_low(DeviceFacts("cuda", capability=(7, 5)))[0].name
    'fp16'
    """
    for fmt in (BF16, FP16):
        if facts.kind == "cpu" and fmt == FP16:
            break  # halfstep trains fp16 on a CPU by emulation, unless asked; bf16 needs no loss scale
        found = units(fmt, facts)
        if found is not None:
            return fmt, f"low is not given; taking {fmt}, which this device computes in hardware ({found})"
    return BF16, (
        f"low is not given; taking {BF16}, for which this device ({describe(facts)}) has no units: "
        "training at level O0 would be faster"
    )


def describe(facts: DeviceFacts) -> str:
    """Returns the device in a word, with its compute capability."""
    return facts.kind if facts.capability is None else "{} sm{}{}".format(facts.kind, *facts.capability)


def needs_emulation(fmt: Format, facts: DeviceFacts) -> bool:
    """Returns whether a format's products are best computed in a wider one and rounded: fp16 on a CPU without units.

    Such a CPU multiplies fp16 matrices a hundred times slower than fp32, while its bf16 goes through fp32 units.
    """
    return facts.kind == "cpu" and fmt == FP16 and units(fmt, facts) is None


def default_low(device: torch.device) -> tuple[Format, str | None]:
    """Returns the low format for a device of this machine where the user named none, and what to tell the user once."""
    return choose_low(read_facts(device))


def computes_fast(fmt: Format, device: torch.device) -> bool:
    """Returns whether a device of this machine computes matrix products of a format in hardware."""
    return units(fmt, read_facts(device)) is not None


def default_emulate(fmt: Format, device: torch.device) -> bool:
    """Returns whether a format is emulated on a device of this machine where the user did not say."""
    return needs_emulation(fmt, read_facts(device))
