"""Inspects one training step of a session: operations, formats, FLOPs, bytes, casts, and what would save time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from halfstep.explain.diagnose.rehearsal import check_given, rehearsing
from halfstep.formats import as_format
from halfstep.lab.inspection.meter import Call, Meter, Place, Step
from halfstep.lab.inspection.savings import LOOKS, savings
from halfstep.machine import read_machine
from halfstep.measurements import CastRow, Inspection, KernelRow, ModuleRow, OpRow
from halfstep.torch_internals import schema_of
from halfstep.train.session.session import Session
from halfstep.validate import with_near_misses

_PASSES, _SECONDS = 7, 2.0  # that are metered: at most, and two at least


@with_near_misses
def inspect(session: Session, closure: Callable[[], Any]) -> Inspection:
    """Returns where the time and the casts of one step go, forward and backward, and what would save time.

    `closure` must fetch a batch, compute the loss and return it, without calling backward. No optimizer step is made;
    weights, gradients, buffers, random states and the loss scale are restored afterwards. Each operation is timed
    alone, waiting for the device, so the sum of these times is not the time of a real step, in which operations
    overlap.

    Raises:
        SessionError: the session is closed, or the closure does not return a scalar loss.
        SetupError: the model is sharded.
    """
    return inspected(session, closure)


def inspected(
    session: Session, closure: Callable[[], Any], *, told: Callable[[str, int, int], None] = lambda *_: None
) -> Inspection:
    """Returns what `inspect` does; before each part `told` gets what it does, the number of the part and of all."""
    check_given("inspect", session, closure)
    parts = _PASSES + LOOKS
    device = session.runtime.device
    scale = session.last_step().scale if session.plan.scale.active else None  # or it would be one more operation
    with rehearsing(session, closure) as rehearsal:

        def run(recorded: AbstractContextManager[Any] = nullcontext()) -> None:  # noqa: B008  # one that does nothing
            with recorded, rehearsal.gradients(rehearsal.loss(), scale):
                pass
            rehearsal.rewind()  # no part of the step

        run()  # kernels are chosen and memory is taken here

        def metered(low_at: Collection[Place] = ()) -> Meter:
            meter = Meter(rehearsal.roots, device, low_at)
            run(rehearsal.recording(meter))
            return meter

        meter, disturbed = _least(metered, lambda done: told("measuring one step", done, parts))
        formats = dict(zip(session.assignment.names(), session.assignment.modules, strict=True))
        step = Step(meter, session, formats)
        kernels = profiled(run, device) if device.type == "cuda" else ()
        saving = "measuring what would save time"  # by calls that are made again: random states are put back after it
        found = savings(step, metered, lambda done: told(saving, _PASSES + done, parts))
    return Inspection(
        level=session.plan.name,
        low=session.plan.low.name,
        emulated=session.runtime.casting.emulates,
        seconds=step.seconds,
        rows=_rows(meter, step.seconds),
        casts=_casts(meter.calls),
        modules=tuple(
            ModuleRow(name, f.type_name, str(f.param or "-"), str(f.compute or "-"), str(f.output or "-"), f.reason)
            for name, f in formats.items()
        ),
        savings=found,
        machine=read_machine(device),
        kernels=kernels,
        disturbed=disturbed,
    )


def _least(metered: Callable[[], Meter], tell: Callable[[int], None]) -> tuple[Meter, float]:
    """Returns a meter with the least times of operations over passes, and how many times these the median pass took."""
    tell(0)
    meter, start = metered(), perf_counter()
    times = [[call.seconds for call in meter.calls]]
    while len(times) < _PASSES and (len(times) < 2 or perf_counter() - start < _SECONDS):
        tell(len(times))
        again = metered()
        if [call.func for call in again.calls] != [call.func for call in meter.calls]:
            return meter, 1.0
        times.append([call.seconds for call in again.calls])
    least = [min(each) for each in zip(*times, strict=True)]
    meter.calls[:] = [replace(call, seconds=seconds) for call, seconds in zip(meter.calls, least, strict=True)]
    return meter, median(map(sum, times)) / max(sum(least), 1e-9)


def _rows(meter: Meter, seconds: float) -> tuple[OpRow, ...]:
    groups: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in meter.calls:
        operator = call.note.aten if call.func.namespace == "aten" else str(schema_of(call.func).name)
        groups[operator, call.note.phase, f"{_names(call.inputs)} -> {_names(call.outputs)}"].append(call)
    rows = []
    for key, calls in groups.items():
        flops, size, took = (sum(getattr(call, name) for call in calls) for name in ("flops", "bytes", "seconds"))
        rows.append(OpRow(*key, len(calls), flops, size, took, took / seconds))
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _casts(calls: Sequence[Call]) -> tuple[CastRow, ...]:
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        if call.is_cast:
            groups[_name(call.inputs[-1]), _name(call.outputs[0])].append(call)
    return tuple(
        CastRow(
            source,
            target,
            len(found),
            sum(call.bytes for call in found),
            sum(call.seconds for call in found),
            sum(bool(call.parameter) for call in found),
        )
        for (source, target), found in groups.items()
    )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(_name, dtypes)) or "none"


def _name(dtype: torch.dtype) -> str:
    return "fp64" if dtype is torch.float64 else as_format(dtype).name


# ---- the CUDA kernels of the step

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
