"""Measures what formats cost without training: matrix products by format and size, and memory by format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from halfstep.bench.memory import counting
from halfstep.measurements import Footprint, Rate
from halfstep.timing import STEADY, speedup, spread, take_turns
from halfstep.workloads.cifar_resnet import CifarResNet

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
TENSOR, IMAGES, WIDTH = (1000, 1000), 8, 64
GIGA = 1e9


def matrix_products(
    device: torch.device,
    sizes: Sequence[int] = (),
    *,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Rate, ...]:
    """Times the product of two square matrices for each size and format; the formats of one size are timed in turn.

    Takes about `seconds` for each size. Returns rates in GFLOP/s, where a multiply-add counts as two operations.
    """
    found: list[Rate] = []
    for size in sizes or SIZES[device.type]:
        progress(f"matrix product {size} x {size}")
        generator = torch.Generator(device=device).manual_seed(0)
        a, b = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
        calls = {name: partial(torch.mm, a.to(dtype), b.to(dtype)) for name, dtype in DTYPES.items()}
        times = take_turns(calls, device=device, seconds=seconds, turn=STEADY)
        for name, taken in times.items():
            vs_fp32 = None if name == "fp32" else speedup(times["fp32"], taken)
            rate = 2.0 * size**3 / median(taken) / GIGA
            found.append(Rate(str(size), name, "native", spread(taken), rate, "GFLOP/s", vs_fp32))
    return tuple(found)


def memory_by_format(
    device: torch.device, *, progress: Callable[[str], None] = lambda what: None
) -> tuple[Footprint, ...]:
    """Returns for each format the bytes of a matrix, of ResNet-18's weights and of its forward pass over 8 images."""
    found = []
    for name, dtype in DTYPES.items():
        progress(f"memory in {name}")
        found.append(_footprint(name, dtype, device))
    return tuple(found)


def _footprint(name: str, dtype: torch.dtype, device: torch.device) -> Footprint:
    of_matrix = torch.zeros(TENSOR, dtype=dtype, device=device).nbytes
    with torch.no_grad(), counting(device) as count:
        model = CifarResNet(width=WIDTH).build(0).to(device, dtype).eval()
        images = torch.zeros(IMAGES, 3, 32, 32, dtype=dtype, device=device)
        weights = sum(each.nbytes for each in model.parameters())
        count.restart()
        model(images)
    return Footprint(name, of_matrix, weights, count.peak)
