"""Times matrix products, convolutions, attention, copies and casts in each format, and counts memory by level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.formats import FP32, LOW_FORMATS, TF32, as_format
from halfstep.initialize import initialize
from halfstep.machine import FIRST_CAPABILITY, read_facts
from halfstep.measurements import Footprint, Rate
from halfstep.plan.levels import LEVELS, level
from halfstep.timing import STEADY, speedup, spread, take_turns
from halfstep.train.cast.products import Emulation

NATIVE, EMULATED = "native", "emulated"
PRODUCT, CONVOLUTION, ATTENTION, COPY = "matrix product", "convolution", "attention", "copy"
CAST_DOWN, CAST_UP = "cast from fp32", "cast to fp32"
_DTYPES = {"fp64": torch.float64, "fp32": FP32.dtype, **{fmt.name: fmt.dtype for fmt in LOW_FORMATS}}
_LOW = tuple(fmt.name for fmt in LOW_FORMATS)
GIGA = 1e9


@dataclass(frozen=True)
class Work:
    """One kind of work to time."""

    name: str
    size: str  # as text
    operands: tuple[Tensor, ...]  # fp32
    call: Callable[..., object]
    operations: float = 0.0  # of floating point in a call; 0: the rate is in bytes per second
    numbers: int = 0  # that a call reads; it writes as many


def works(device: torch.device) -> list[Work]:
    """Returns the work to time on a device, just large enough to use the whole device."""
    large = device.type != "cpu"
    n = 8192 if large else 512
    images, channels, side = (64, 256, 56) if large else (4, 64, 28)
    heads, length, width = (128, 2048, 64) if large else (16, 256, 64)
    numbers = 2**28 if large else 2**24
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)

    convolved = (normal(images, channels, side, side), normal(channels, channels, 3, 3) / (3 * channels**0.5))
    attended = tuple(normal(1, heads, length, width) for _ in range(3))
    return [
        Work(PRODUCT, f"{n} x {n} x {n}", (normal(n, n), normal(n, n)), torch.mm, 2.0 * n**3),
        Work(
            CONVOLUTION,
            f"3 x 3, {channels} channels, {images} images of {side} x {side}",
            convolved,
            lambda images, weight: F.conv2d(images, weight, padding=1),
            2.0 * images * side**2 * channels**2 * 9,
        ),
        Work(
            ATTENTION,
            f"{heads} heads, {length} x {width}",
            attended,
            F.scaled_dot_product_attention,
            4.0 * heads * length**2 * width,
        ),
        Work(COPY, f"{numbers:,} numbers", (normal(numbers), normal(numbers)), Tensor.copy_, numbers=numbers),
    ]


def measure(device: torch.device, *, seconds: float, tell: Callable[[str], None] = lambda _: None) -> list[Rate]:
    """Returns how fast a device does each kind of work in each format; takes about `seconds` in total."""
    todo, rates = works(device), list[Rate]()
    share = seconds / (len(todo) + 1)
    for work in todo:
        tell(work.name)
        rates += _measure_work(work, device, share)
    tell("casts")
    return rates + _measure_casts(todo[-1].operands[0], device, share)


def _measure_work(work: Work, device: torch.device, seconds: float) -> list[Rate]:
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    errors: dict[tuple[str, str], str] = {}
    for key in _ways(work, device):
        call = _call(work, *key)
        try:
            call()
            calls[key] = call
        except (RuntimeError, NotImplementedError) as error:  # no kernel for this format
            errors[key] = str(error).splitlines()[0]
    named = {f"{fmt}/{how}": call for (fmt, how), call in calls.items()}
    times = take_turns(named, device=device, seconds=seconds, turn=STEADY)
    base = times.get(f"fp32/{NATIVE}", [])
    unit = "GFLOP/s" if work.operations else "GB/s"
    found = []
    for fmt, how in calls:
        amount = work.operations or 2.0 * work.numbers * _DTYPES[fmt].itemsize
        against = None if (fmt, how) == ("fp32", NATIVE) else base
        found.append(_rate(f"{work.name}, {work.size}", fmt, how, unit, times[f"{fmt}/{how}"], amount, against))
    return found + [Rate(work.name, fmt, how, None, None, unit, None, text) for (fmt, how), text in errors.items()]


def _ways(work: Work, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yields each (format, way) in which to time `work`; ways are native, emulated, TF32. Native fp32 comes first."""
    yield "fp32", NATIVE
    yield "fp64", NATIVE
    for low in _LOW:
        yield low, NATIVE
    if not work.operations:
        return
    if device.type == "cpu":
        for low in _LOW:
            yield low, EMULATED
    capability = read_facts(device).capability
    if capability is not None and capability >= FIRST_CAPABILITY[TF32] and work.name != ATTENTION:
        yield "fp32", "TF32"


def _call(work: Work, fmt: str, how: str) -> Callable[[], object]:
    operands = tuple(operand.to(_DTYPES[fmt]) for operand in work.operands)
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    if how == EMULATED:
        around = partial(Emulation, as_format(fmt))
    elif work.operations and fmt == "fp32" and operands[0].device.type == "cuda":
        around = partial(_tf32, how == "TF32")

    def call() -> object:
        with around(), torch.no_grad():
            return work.call(*operands)

    return call


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    kept = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        for backend, value in zip(backends, kept, strict=True):
            backend.fp32_precision = value


def _rate(
    work: str, fmt: str, how: str, unit: str, times: list[float], amount: float, base: list[float] | None
) -> Rate:
    vs_fp32 = None if base is None else speedup(base, times)
    return Rate(work, fmt, how, spread(times), amount / median(times) / GIGA, unit, vs_fp32)


def _copied(source: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    target = torch.empty_like(source, dtype=dtype)
    return lambda: target.copy_(source)


def _measure_casts(numbers: Tensor, device: torch.device, seconds: float) -> list[Rate]:
    calls = {"copy": _copied(numbers, FP32.dtype)}
    for low in _LOW:
        calls[f"{CAST_DOWN}/{low}"] = _copied(numbers, _DTYPES[low])
        calls[f"{CAST_UP}/{low}"] = _copied(numbers.to(_DTYPES[low]), FP32.dtype)
    times = take_turns(calls, device=device, seconds=seconds, turn=STEADY)
    name, size = f"{numbers.numel():,} numbers", 6.0 * numbers.numel()  # 4 bytes of the fp32 number and 2 of the low
    return [
        _rate(f"{work}, {name}", low, NATIVE, "GB/s", times[f"{work}/{low}"], size, times["copy"])
        for work in (CAST_DOWN, CAST_UP)
        for low in _LOW
    ]


def by_kind(rates: list[Rate]) -> Mapping[tuple[str, str, str], Rate]:
    """Returns the rates by kind of work (without its size), format and way (native, emulated or TF32)."""
    return {(rate.work.partition(",")[0], rate.format, rate.how): rate for rate in rates}


def footprints(device: torch.device) -> Iterator[Footprint]:
    """Yields what AdamW holds for a parameter between two steps, at each level and low format."""
    for name, low in product(LEVELS, _LOW):
        weights = torch.nn.Linear(64, 64, bias=False, dtype=torch.float32, device=device)
        optimizer = torch.optim.AdamW(weights.parameters())
        with initialize(
            weights, optimizer, level(name, low), emulate=None if device.type == "cpu" else False
        ) as session:
            session.backward(weights(torch.ones(1, 64, dtype=torch.float32, device=device)).sum())
            session.step()
            held = session.status().memory
        yield Footprint(name, low, {use: size / 64**2 for use, size in held.items()})
