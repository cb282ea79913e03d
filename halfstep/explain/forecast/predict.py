"""Predicts what training in other formats would do, by exact rounding of what fp32 training steps compute."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from halfstep.edits import LARGEST_SCALE, SMALLEST_SCALE, Scaling
from halfstep.errors import SessionError
from halfstep.explain.diagnose.rehearsal import compute_loss, leaves_kept
from halfstep.explain.forecast.backward import (
    CallsSeen,
    Nodes,
    ProductsSeen,
    Recast,
    RoundedBackward,
    TensorName,
    noting_nodes,
    rounded,
    show_weight_grads,
    watching,
)
from halfstep.formats import FP32, Format, count_overflows, saturate
from halfstep.records import Rounded, ScaleRange, TensorStats
from halfstep.torch_internals import next_sequence_number
from halfstep.train.probe.rows import measure

GRADIENTS = ("activation_grad", "weight_grad")
LEAST_SNR_DB = 20.0  # below that, rounding errors have more than a hundredth of the signal's energy
HEADROOM = 64.0  # the recommended scale leaves room for gradients this much larger; within 100 steps they grew 24-fold
_FLAT = 1e-6  # of the largest value: values that vary less count as constant
Group = tuple[str, str]  # a module's name and a tensor kind


@dataclass(frozen=True)
class Scouted:
    """What one step under the plan shows before the fp32 steps are measured."""

    low: Mapping[TensorName, bool] = field(default_factory=dict)  # others count as low
    full_modules: frozenset[str] = frozenset()  # those that compute full
    largest_gradient: float = 0.0  # of all low ones
    inside: float = 1.0  # `largest_gradient` over the largest at the outputs and weights of modules
    ceiling: float = LARGEST_SCALE  # the largest loss scale that the format of the loss can hold


Prediction = tuple[tuple[Rounded, ...], tuple[ScaleRange, ...], Mapping[str, float]]
"""The rows and scales of a `WhatIf`, and the largest magnitude of a product in each module that computes low."""


def predict(  # noqa: PLR0913  # what a prediction is made from
    closure: Callable[[], Any],
    model: nn.Module,
    formats: Sequence[Format],
    *,
    steps: int,
    optimizer: Optimizer | None,
    scouted: Scouted,
    loss_scale: float | None = None,
    recasts: Sequence[Recast] = (),
) -> Prediction:
    """Runs training steps in fp32, and returns what rounding all their results to each format would do."""
    suited = {fmt: _recommended(fmt, _limit(fmt, scouted.largest_gradient), scouted.ceiling) for fmt in formats}
    given = suited if loss_scale is None else dict.fromkeys(formats, loss_scale)
    tally = RoundingTotals(given, scouted, fixed=loss_scale is not None)
    for number in range(1, steps + 1):
        for parameter in model.parameters():
            parameter.grad = None
        _step(closure, model, tally, number, recasts)
        if optimizer is not None:
            optimizer.step()
    return tally.prediction()


def _step(
    closure: Callable[[], Any], model: nn.Module, tally: RoundingTotals, number: int, recasts: Sequence[Recast]
) -> None:
    """Runs one step in fp32, then repeats its backward pass in each format; `p.grad` keeps the fp32 gradients."""
    params, calls = list(model.parameters()), CallsSeen(recasts, model)
    looking = calls if recasts else nullcontext()
    with ExitStack() as undo:
        undo.enter_context(watching(model, tally.see))
        nodes = undo.enter_context(noting_nodes(model, tally.full_modules))
        with ProductsSeen(model, tally.see_product), looking:
            loss = compute_loss(closure, params)
        if not bool(loss.isfinite()):
            raise SessionError(
                f"the loss of step {number} is {float(loss.detach())} even in fp32, so no format cures it; check "
                "the data, the learning rate and the loss function first"
            )
        undo.enter_context(leaves_kept(loss, params))
        nodes.model.append(range(next_sequence_number(), sys.maxsize))  # checkpoints repeat the forward later
        with looking:  # also where a checkpoint repeats its forward: a function of a tensor would leave the mode
            torch.autograd.backward(get_gradient_edge(loss), retain_graph=True)
        calls.end_step()
        show_weight_grads(model, tally.see)
        if tally.end_step():  # at loss scales that the gradients of this step need
            for parameter in params:
                parameter.grad = None
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            show_weight_grads(model, tally.see)
            tally.lowered.clear()
        held = [(parameter, parameter.grad) for parameter in params]
        for fmt in tally.formats:
            for parameter in params:
                parameter.grad = None
            with tally.backward_in(fmt, nodes) as scale:
                _backward_again(loss, scale)
                show_weight_grads(model, tally.see)
        for parameter, grad in held:
            parameter.grad = grad


def _backward_again(loss: Tensor, scale: float) -> None:
    try:
        loss.backward(torch.full_like(loss, scale), retain_graph=True)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a user's own autograd function raises
        raise SessionError(
            f"the backward pass cannot run twice over one forward: {type(error).__name__}: {error}; what-if runs it "
            "once for each format, so the model's autograd functions must keep the tensors that they saved"
        ) from error


class RoundingTotals:
    """Adds up the effects of rounding, tensor by tensor, on the device; `scales` maps each format to its loss scale.

    A scale that is not `fixed` comes down where gradients grow beyond it: gradients are judged from that step on.
    """

    def __init__(self, scales: Mapping[Format, float], scouted: Scouted, *, fixed: bool) -> None:
        self.formats = tuple(scales)
        self.full_modules = scouted.full_modules
        self._scales = dict(scales)
        self._scouted = scouted
        self._fixed = fixed
        self.lowered: set[Format] = set()  # whose scale this step lowered: its gradients are seen once more
        self._counts: dict[Group, tuple[int, int, int]] = {}  # zeros, nonzero and all values, before this step
        self._left_out: dict[Format, dict[Group, tuple[int, int, int]]] = {}  # those before the scale was lowered
        self._low_groups = {place[:2] for place, low in scouted.low.items() if low}
        self._sums: dict[tuple[Format, Group], _Sum] = {}
        self._stats: dict[Group, TensorStats] = {}
        self._low: dict[Group, bool] = {}
        self._products: dict[str, float] = {}
        self._largest: list[tuple[float, str]] = []  # largest gradient of each step, and its module
        self._now: tuple[float, str] = (0.0, "")
        self._backward_in: RoundedBackward | None = None

    @contextmanager
    def backward_in(self, fmt: Format, nodes: Nodes) -> Iterator[float]:
        """Rounds a backward pass that runs inside the context to `fmt`; yields the loss scale of `fmt`."""
        self._backward_in = RoundedBackward(nodes, fmt)
        try:
            with self._backward_in:
                yield self._scales[fmt]
        finally:
            self._backward_in = None

    def see(self, place: TensorName, tensor: Tensor) -> Tensor | None:
        """Counts the effects of rounding one tensor to each format and returns None."""
        group: Group = place[:2]
        low = self._scouted.low.get(place, True)  # a tensor that the scout has not seen counts as low
        if tensor.numel() == 0 or (not low and group in self._low_groups):
            return None
        values = tensor.detach().float()
        if self._backward_in is not None:
            fmt = self._backward_in.fmt
            total = self._sum(fmt, group, values.device)
            return total.count(values, fmt if low else None, arrived=True).to(tensor.dtype)
        gradient = place.kind in GRADIENTS
        for fmt in self.lowered if gradient else ():
            self._sum(fmt, group, values.device).weigh(values * self._scales[fmt], fmt if low else None)
        if self.lowered:
            return None
        stats = measure(values)
        self._stats[group] = self._stats[group] + stats if group in self._stats else stats
        self._low[group] = low
        if gradient:
            if stats.infinities or stats.nans:
                raise SessionError(
                    f"the {place.kind} of module {place.module!r} is not finite even in fp32 ({stats.infinities} inf, "
                    f"{stats.nans} NaN), so no format cures it; find the operation at level O0 with "
                    "halfstep.blame(session, closure)"
                )
            if low:
                self._now = max(self._now, (stats.amax, place.module))
        for fmt, scale in self._scales.items():
            total, used = self._sum(fmt, group, values.device), fmt if low else None
            varying = place.kind == "activation"
            total.weigh(values * scale if gradient and scale != 1 else values, used, about_mean=varying)
            if not gradient:
                total.count(values, used)
        return None

    def see_product(self, module: str, result: Tensor) -> None:
        """Notes the largest magnitude in the result of a product, if its module computes low."""
        if module not in self.full_modules and result.numel():
            self._products[module] = max(self._products.get(module, 0.0), _largest(result.nan_to_num(0.0, 0.0, 0.0)))

    def _sum(self, fmt: Format, group: Group, device: torch.device) -> _Sum:
        return self._sums.setdefault((fmt, group), _Sum(device))

    def end_step(self) -> bool:
        """Notes the largest gradient of the step that has ended; returns whether a loss scale is lower from here on."""
        amax, place = self._now
        self._largest.append((amax * self._scouted.inside, place))
        self._now = (0.0, "")
        for fmt, scale in self._scales.items():
            limit = _limit(fmt, self._largest[-1][0])
            if scale > limit and not self._fixed:
                self._scales[fmt] = _recommended(fmt, limit, self._scouted.ceiling)
                self.lowered.add(fmt)
                self._left_out[fmt] = dict(self._counts)
                for key in [key for key in self._sums if key[0] is fmt and key[1][1] in GRADIENTS]:
                    del self._sums[key]
        self._counts = {group: (each.zeros, each.nonzero, each.count) for group, each in self._stats.items()}
        return bool(self.lowered)

    def prediction(self) -> Prediction:
        if not any(amax for amax, _ in self._largest):
            raise SessionError(
                "no tensor that the plan stores low has a nonzero gradient: all gradients are zero, or the model is "
                "frozen or in float64; the closure must return the loss of a training step"
            )
        rows = tuple(
            self._row(group, fmt, self._sums[fmt, group])
            for fmt in self.formats
            for group in self._stats
            if (fmt, group) in self._sums
        )
        return rows, tuple(self._range(fmt) for fmt in self.formats), self._products

    def _row(self, group: Group, fmt: Format, total: _Sum) -> Rounded:
        module, kind = group
        stats = self._stats[group]
        zeros, saturated = int(total.zeros), int(total.saturated)
        before = (self._left_out.get(fmt, {}) if kind in GRADIENTS else {}).get(group, (0, 0, 0))
        nonzero, count = stats.nonzero - before[1], stats.count - before[2]
        return Rounded(
            module=module,
            kind=kind,
            format=fmt.name,
            low=self._low[group],
            scale=self._scales[fmt] if kind in GRADIENTS else 1.0,
            lost=max(zeros - (stats.zeros - before[0]), 0) / nonzero if nonzero else 0.0,
            saturated=saturated / count if count else 0.0,
            snr_db=decibels(float(total.signal), float(total.noise)),
            stats=stats,
        )

    def _range(self, fmt: Format) -> ScaleRange:
        gradients = [
            stats for group, stats in self._stats.items() if group[1] in GRADIENTS and self._low[group] and stats.amax
        ]
        limits = [_limit(fmt, amax) for amax, _ in self._largest if amax]
        largest = min(limits)
        recommended = _recommended(fmt, _limit(fmt, self._scouted.largest_gradient), self._scouted.ceiling)
        if recommended >= largest:  # later gradients were larger than the scouted ones
            recommended = _recommended(fmt, largest, self._scouted.ceiling)
        amax, place = max(self._largest)
        dynamic = Scaling("dynamic")
        settles = [min(max(_power_below(limit), dynamic.min), dynamic.max) for limit in (largest, max(limits))]
        return ScaleRange(
            format=fmt.name,
            smallest=smallest_scale(gradients, fmt, largest),
            largest=largest,
            recommended=recommended,
            settles=(settles[0], settles[1]),
            largest_gradient=amax,
            place=place,
            edit=Scaling("none") if recommended == 1 else Scaling("static", init=recommended),
        )


class _Sum:
    """The effects of rounding one group of tensors to one format, summed on the device."""

    def __init__(self, device: torch.device) -> None:
        self.zeros, self.saturated = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.signal, self.noise = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))

    def count(self, values: Tensor, fmt: Format | None, *, arrived: bool = False) -> Tensor:
        """Rounds fp32 values to `fmt`, if one is given, and counts zeros and, with those that `arrived`, overflows."""
        result = values if fmt is None else rounded(values, fmt)
        self.zeros += values.numel() - result.count_nonzero()
        if not _largest(values) <= (fmt or FP32).max:  # NaN too
            self.saturated += count_overflows(values, result, fmt or FP32)
            if arrived:
                self.saturated += values.numel() - values.isfinite().sum()
        return result

    def weigh(self, values: Tensor, fmt: Format | None, *, about_mean: bool = False) -> None:
        """Adds up the energy (sum of squares) of the values, or of what varies in them, and of rounding errors."""
        largest = _largest(values)
        if not math.isfinite(largest):
            values = torch.where(values.isfinite(), values, 0.0)  # infinities of masks do not count as loss
        signal = torch.linalg.vector_norm(values, dtype=torch.float64).square()
        if about_mean and values.dim() > 1:  # over all but the last dimension: an offset would hide the errors
            varying = values.double() - values.flatten(0, -2).double().mean(0)
            spread = varying.square().sum()
            signal = spread if float(spread) > (_FLAT * largest) ** 2 * values.numel() else signal
        self.signal += signal
        if fmt is not None:
            error = saturate(rounded(values, fmt), fmt) - values
            self.noise += torch.linalg.vector_norm(error, dtype=torch.float64).square()


def _largest(values: Tensor) -> float:
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def decibels(signal: float, noise: float) -> float:
    """Returns a ratio of energies in decibels; infinite if there is no noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def smallest_scale(gradients: Sequence[TensorStats], fmt: Format, largest: float) -> float | None:
    """Returns the smallest power of two up to `largest` that gives each gradient an SNR of 20 dB or more, or None."""
    needed = SMALLEST_SCALE
    for stats in gradients:
        scale = needed
        while scale <= largest and expected_snr_db(stats, fmt, scale) < LEAST_SNR_DB:
            scale *= 2
        if scale > largest:
            return None
        needed = scale
    return needed


def expected_snr_db(stats: TensorStats, fmt: Format, scale: float) -> float:
    """Returns the expected signal-to-noise ratio, in dB, of rounding values times `scale` to a format.

    >>> from halfstep.formats import FP16
    >>> stats = measure(torch.rand(10_000) + 1.0)
    >>> [round(expected_snr_db(stats, FP16, scale)) for scale in (1.0, 2.0**-26)]
    [75, 0]
    """
    signal = noise = 0.0  # if values are uniform within an octave, and rounding errors within a rounding step
    for exponent, count in enumerate(stats.exponents):
        if not count:
            continue
        octave = 2.0 ** (exponent - 127) * scale
        energy = count * octave * octave * 7 / 3  # the mean square of values uniform between 1 and 2
        signal += energy
        if octave >= fmt.smallest_normal:
            noise += count * (octave * fmt.eps) ** 2 / 12
        elif octave >= fmt.smallest_subnormal / 2:
            noise += count * fmt.smallest_subnormal**2 / 12
        else:
            noise += energy
    return decibels(signal, noise)


def _limit(fmt: Format, amax: float) -> float:
    """Returns the loss scale at which a gradient of magnitude `amax` reaches the largest value of a format."""
    return fmt.max / amax if amax else math.inf


def _power_below(value: float) -> float:
    return 2.0 ** math.floor(math.log2(min(max(value, SMALLEST_SCALE), LARGEST_SCALE)))


def _recommended(fmt: Format, limit: float, ceiling: float) -> float:
    """Returns the loss scale to use: a power of two that leaves headroom below `limit`, at most `ceiling`."""
    if fmt.exponent_bits == FP32.exponent_bits and limit >= HEADROOM:
        return 1.0
    return max(min(_power_below(limit / HEADROOM), ceiling), SMALLEST_SCALE)
