"""Measures how many times as fast a CPU's native low-precision products are as emulated ones, in a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from time import get_clock_info, perf_counter, thread_time

import torch
from torch import Tensor
from torch.nn import functional as F

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
