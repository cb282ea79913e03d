"""Lists the CUDA kernels that a step ran, and tells from their names whether tensor cores did the work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from halfstep.measurements import KernelRow

_BESIDE = re.compile(
    r"splitkreduce|offsets|nchwtonhwc|nhwctonchw|convert_dq|dot_do_o|combine|winograd\w*(data|filter|output)"
)
_WORK = {  # the first that fits: a convolution is an implicit product
    "attention": re.compile(r"flash_?(fwd|bwd|fprop|bprop|attn)|fmha|sdpa"),
    "convolution": re.compile(r"[fd]prop|[dw]grad|cudnn_\d+x|convolve|conv2d|conv_depthwise|winograd"),
    "matrix product": re.compile(r"gemm|gemv|nvjet|xmma|cutlass"),
}
_TENSOR_CORES = re.compile(
    r"tensorop|wmma|wgmma|nvjet|xmma(?!.*[fh]fma)|(884|1688|16816|16832|161616)(gemm|cudnn|fprop|dgrad|wgrad)"
    r"|flash_?(fwd|bwd|fprop|bprop|attn)|fmha\w*_sm(8|9|1\d)\d|fmha\w*_f16_\w*_sm7\d"
)


def work_of(kernel: str) -> tuple[str, bool] | None:
    """Returns what a kernel computes and whether it uses tensor cores; None if its name shows no kind of product.

    It knows the names of cuBLAS, cuDNN, CUTLASS and FlashAttention; names of kernels that Triton compiled show neither.

    >>> work_of("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"), work_of("ampere_sgemm_128x64_tn")
    (('matrix product', True), ('matrix product', False))
    """
    name = kernel.lower()
    if _BESIDE.search(name):
        return None
    work = next((each for each, known in _WORK.items() if known.search(name)), None)
    return None if work is None else (work, bool(_TENSOR_CORES.search(name)))


def kernel_rows(ran: Iterable[tuple[str, float]]) -> tuple[KernelRow, ...]:
    """Returns a row for each kernel that computes matrix products, slowest first."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, took in ran:
        seconds[name].append(took)
    known = ((name, work_of(name), times) for name, times in seconds.items())
    rows = [KernelRow(name, *work, len(times), sum(times)) for name, work, times in known if work is not None]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def profiled(step: Callable[[], None], device: torch.device) -> tuple[KernelRow, ...]:
    """Runs a step under torch's profiler and returns the kernels that computed products on the CUDA device."""
    from torch.profiler import ProfilerActivity, profile  # slow to import, and for CUDA alone

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    on_device = (event for event in profiler.events() or () if event.device_type.name == "CUDA")
    return kernel_rows((event.name, event.time_range.elapsed_us() / 1e6) for event in on_device)
