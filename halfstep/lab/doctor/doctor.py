"""Examines a machine: its speed in each format, what its settings cost, and which level and format to train in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from itertools import count, takewhile
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.collect_env import get_nvidia_driver_version, run

from halfstep.errors import HalfstepError
from halfstep.formats import BF16, FP16
from halfstep.lab.doctor.rates import CONVOLUTION, EMULATED, NATIVE, PRODUCT, by_kind, footprints, measure
from halfstep.machine import WORTH, Processor, model_name, read_facts, read_machine, read_processor, table_row, weighed
from halfstep.measurements import Choice, Examination, Rate, Setting
from halfstep.saved import Saved, check_savable, save
from halfstep.timing import speedup, take_turns
from halfstep.train.kernels import library

RATES_SECONDS, WIDE_SECONDS, SETTINGS_SECONDS = 11.0, 6.0, 1.0
_WORTH = 1.1  # a format that is faster by less is not recommended for speed
_WIDTHS, _LENGTHS, _HEADS = (32, 64, 128), (64, 128, 256, 512), 8
_FASTER = 1.05  # what differs by less is as fast

Rates = Mapping[tuple[str, str, str], Rate]


def examine(
    device: torch.device, *, told: Callable[[str, int, int], None] = lambda *_: None, keep: bool = False
) -> Examination:
    """Measures a device in under 30 seconds; before each part `told` gets its name, those that are done and all."""
    if keep:
        if device.type != "cpu":
            raise HalfstepError(f"--save works only for the CPU, got device {device}; add --device cpu")
        check_savable()
    start, done = perf_counter(), count()

    def tell(what: str) -> None:
        told(what, next(done), 7 if device.type == "cpu" else 6)

    rates = measure(device, seconds=RATES_SECONDS, tell=tell)
    kinds = by_kind(rates)
    tell("settings")
    settings = tuple(read_settings(device))
    choices: tuple[Choice, ...] = ()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    saved = None
    if device.type == "cpu":
        tell("the backward pass of attention")
        bf16, fp16, wide = gain(kinds, "bf16"), gain(kinds, "fp16"), wide_backward(seconds=WIDE_SECONDS)
        if keep:
            saved = str(save(Saved(table_row().name, model_name(), str(torch.__version__), bf16, fp16, wide, date)))
        choices = compare(read_processor(), table_row(), bf16=bf16, fp16=fp16, wide=wide)
    level, low, reason = recommend(kinds)
    facts = read_facts(device)
    return Examination(
        machine=read_machine(device),
        device=str(facts),
        processor=facts.processor.name,
        source=read_processor().source,
        rates=tuple(rates),
        memory=tuple(footprints(device)),
        settings=settings,
        choices=choices,
        tools=read_tools(device),
        level=level,
        low=low,
        reason=reason,
        seconds=perf_counter() - start,
        date=date,
        saved=saved,
    )


def recommend(rates: Rates) -> tuple[str, str, str]:
    """Returns the recommendation as (level, format, reason)."""
    # The format is the one in which matrix products and convolutions gain most; if none gains, the level is O0. bf16
    # is preferred to fp16, since it needs no loss scale, unless fp16 is faster by a factor of more than `_WORTH`.
    gains = {low: _gain(rates, low) for low in ("bf16", "fp16")}
    best = "fp16" if gains["fp16"] > _WORTH * gains["bf16"] else "bf16"
    other = "fp16" if best == "bf16" else "bf16"
    figures = f"{_words(rates, best)}; {_words(rates, other)}"
    if gains[best] < _WORTH:
        partly = [
            f"{low} is faster in {work}s only; a model with few other operations may gain at O1 (try `halfstep bench`)"
            for low in gains
            for work in (PRODUCT, CONVOLUTION)
            if _gain(rates, low, work) >= _WORTH
        ]
        why = partly[0] if partly else f"no low format is faster than fp32 here by {_WORTH - 1:.0%} or more"
        memory = "O2 takes about fp32's time where products are emulated, with 14 bytes a parameter instead of 16"
        return "O0", best, f"{why}: {figures}. {memory}"
    scale = "it is fast and needs no loss scale" if best == "bf16" else "it is the fastest, with a dynamic loss scale"
    return (
        "O1",
        best,
        f"{figures}. {best} is chosen: {scale}. O2 also stores weights in it; `halfstep bench` compares both levels",
    )


def _gain(rates: Rates, low: str, *works: str) -> float:
    """Returns the speed of a low format relative to fp32 in the kind of work that gains least."""
    return min(_vs_fp32(rates, work, low, NATIVE) for work in works or (PRODUCT, CONVOLUTION))


def _vs_fp32(rates: Rates, work: str, fmt: str, how: str) -> float:
    rate = rates.get((work, fmt, how))
    return 0.0 if rate is None or rate.vs_fp32 is None else rate.vs_fp32


def _words(rates: Rates, low: str) -> str:
    gains = {f"{work}s": _gain(rates, low, work) for work in (PRODUCT, CONVOLUTION)}
    timed = " and ".join(f"{works} at {gain:.2g}" for works, gain in gains.items() if gain)
    none = " and ".join(works for works, gain in gains.items() if not gain)
    parts = [f"runs {timed} times fp32's speed"] * bool(timed) + [f"has no kernel for {none}"] * bool(none)
    return f"{low} {' and '.join(parts)}"


# ---- what sessions decide by


def gain(rates: Rates, low: str) -> float:
    """Returns how many times as fast as emulated products native ones are; 0 where torch has no native kernel."""
    found = [
        _vs_fp32(rates, work, low, NATIVE) / (_vs_fp32(rates, work, low, EMULATED) or 1.0)
        for work in (PRODUCT, CONVOLUTION)
    ]
    return weighed(*found) if all(found) else 0.0


def wide_backward(*, seconds: float) -> tuple[tuple[int, int], ...]:
    """Returns pairs of head width and longest sequence for which attention's backward is faster in fp32."""
    share = seconds / (len(_WIDTHS) * len(_LENGTHS))
    found = []
    for width in _WIDTHS:
        gains = ((length, _gain_of_wide(width, length, share)) for length in _LENGTHS)
        faster = [length for length, _ in takewhile(lambda each: each[1] > _FASTER, gains)]
        found += [(width, faster[-1])] if faster else []
    return tuple(found)


def _gain_of_wide(width: int, length: int, seconds: float) -> float:
    """Returns the time of attention's backward pass in bf16 divided by its time in fp32 with casts from and to bf16."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = (1, _HEADS, length, width)
    made = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16() for _ in range(4)]
    *operands, grad = made
    low = _backward(operands, grad)
    wide_pass = _backward([each.float() for each in operands], grad.float())

    def wide() -> object:
        for each in (*operands, grad):
            each.float()
        return [each.to(torch.bfloat16) for each in wide_pass()]

    times = take_turns({"low": low, "wide": wide}, device=torch.device("cpu"), seconds=seconds)
    return speedup(times["low"], times["wide"]) or 0.0


def _backward(operands: list[Tensor], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaves = query, key, value = [each.detach().requires_grad_() for each in operands]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def compare(
    used: Processor, table: Processor, *, bf16: float, fp16: float, wide: tuple[tuple[int, int], ...]
) -> tuple[Choice, ...]:
    """Returns for each choice of formats the value that sessions use, the one in the table, and the measured one."""
    said = zip(*map(_said, (used, table, replace(used, bf16=bf16, fp16=fp16, wide_backward=wide))), strict=True)
    return tuple(Choice(what, now, by_table, here, now == here) for (what, now), (_, by_table), (_, here) in said)


def _said(row: Processor) -> list[tuple[str, str]]:
    gains = {f"{low} products": row.gain(low) for low in (BF16, FP16)}
    lengths = (f"{length} at head width {width}" for width, length in row.wide_backward)
    return [
        *((what, "not measured" if g is None else "native" if g >= WORTH else "emulated") for what, g in gains.items()),
        ("attention's backward pass in fp32 up to length", ", ".join(lengths) or "never"),
    ]


# ---- settings of torch and of the machine that cost speed or accuracy

_SLOWER = 1.1  # what costs less is not spoken of
_TINY = 1e-39  # subnormal in fp32


def read_settings(device: torch.device) -> Iterator[Setting]:
    """Yields the settings that matter on a device, with their measured costs."""
    name, costs = "deterministic algorithms", "speed: the deterministic forms of some kernels are slower"
    on = Setting(name, "on", costs, "torch.use_deterministic_algorithms(False)")
    yield on if torch.are_deterministic_algorithms_enabled() else Setting(name, "off")
    if device.type == "cuda":
        yield from _cuda_settings()
        return
    yield _threads(SETTINGS_SECONDS / 2)
    yield _subnormals(SETTINGS_SECONDS / 2)
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[no-untyped-call]
    off = Setting("oneDNN", "off", "speed: low products run on slow kernels", "torch.backends.mkldnn.enabled = True")
    yield Setting("oneDNN", "on") if there else off


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
