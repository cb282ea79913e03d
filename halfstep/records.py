"""Frozen records of what steps, sessions, probes and checks find; reports read the records, never the session."""

from __future__ import annotations

import html
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.edits import Edit, Scaling
from halfstep.errors import FormatError, HalfstepError
from halfstep.formats import Format, as_format
from halfstep.kinds import Kind
from halfstep.validate import named


def preformatted(text: str) -> str:
    """Returns text as HTML that keeps its lines."""
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


class InNotebooks:
    """A value that Jupyter shows as it is printed, in place of a `repr`."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))


@dataclass(frozen=True)
class StepRecord:
    """What one `session.step()` did, as tensors on the device; only reading a tensor on the host waits for the device.

    Attributes:
        step: counts calls of `step()` from 1.
        skipped: a 0-dim bool tensor, true if a non-finite gradient or loss prevented the update.
        scale: the loss scale that the gradients of this step carried; 1.0 if scaling is off.
        grad_norm: the global L2 norm of the unscaled gradients before clipping; None at O0 without `max_norm`.
        synced: whether the step waited for the device once, as with optimizers that cannot skip a step on the device.
        loss: the sum of the losses passed to `backward` since the last step, unscaled; None if none was a scalar. If
            there was only one, it is that tensor, detached: copy it to keep it.
        bad_loss: a 0-dim bool tensor, true if a loss was not finite before it was scaled, here or in a process that
            steps with this one; such a step says nothing about the loss scale. None if no loss was looked at, as at O0.
    """

    step: int
    skipped: Tensor
    scale: Tensor
    grad_norm: Tensor | None
    synced: bool = False
    loss: Tensor | None = None
    bad_loss: Tensor | None = None


@dataclass(frozen=True)
class StepValues:
    """The values of a StepRecord, read on the host; `time` is when it was made, in seconds since 1970."""

    step: int
    time: float
    skipped: bool
    scale: float
    grad_norm: float | None
    loss: float | None
    bad_loss: bool | None = None


@dataclass(frozen=True)
class SessionStart:
    """The start of a session: its plan in the form of `plan.io.to_dict`, its device, and its modules.

    `emulated` says that results are rounded to the low format, not computed in it; `modules` has the names in the
    model's order; `process` is the rank of this process if several train together, or else None.
    """

    plan: dict[str, Any]
    device: str
    emulated: bool
    modules: tuple[str, ...] = ()
    process: int | None = None


@dataclass(frozen=True)
class ProductLoss:
    """What rounding one operand of a layer's product by a recipe lost since the session opened, in elements.

    Attributes:
        product: "output", "grad_input" or "grad_weight"; each sums over another dimension.
        operand: what was rounded: "input", "weight" or "gradient".
        saturated: beyond the largest value of the format at the scale of their block.
        flushed: not zero before, and zero after.
        nonfinite: infinite or NaN before.
    """

    layer: str
    product: str
    operand: str
    elements: int
    saturated: int
    flushed: int
    nonfinite: int

    @property
    def share(self) -> float:
        """The share of the elements that became 0 or saturated."""
        return (self.flushed + self.saturated) / self.elements

    def __str__(self) -> str:
        """Returns the shares that were lost, in words."""
        found = {"became 0": self.flushed, "saturated": self.saturated, "were not finite": self.nonfinite}
        shares = (f"{count / self.elements:.2%} {what}" for what, count in found.items() if count)
        return f"of the {self.operand} in {self.product} of {self.layer}, {', '.join(shares) or 'nothing was lost'}"


@dataclass(frozen=True)
class Status(InNotebooks):
    """The state of a session, read on the host: plan, scale, skips, non-finite parameters by name, bytes of memory.

    Attributes:
        scales: the loss scale of each loss id that was used.
        memory: bytes of weights, masters (copies, or the other 16 bits of split masters), gradients, optimizer state.
        nonfinite_gradients: the parameters whose infinite or NaN gradients caused the last step to be skipped.
        spoiled_by: ranks of processes whose own loss (or a gradient of whose own stage of a pipeline) was not finite
            in the last step; empty if one process trains alone, and inside DistributedDataParallel's `join()`.
        bad_losses: how many of the skipped steps had a loss that was not finite before it was scaled.
        products: the linear layers by how they multiply, where the plan has a recipe: by it, or why not.
        lost: what the recipe lost so far, by layer, product and operand.
        moments: bytes of those of the optimizer state that are kept in "bf16" or "8bit".
    """

    level: str
    low: str
    steps: int
    skipped: int
    scales: dict[int, float]
    nonfinite_parameters: tuple[str, ...]
    memory: dict[str, int]
    nonfinite_gradients: tuple[str, ...] = ()
    spoiled_by: tuple[int, ...] = ()
    bad_losses: int = 0
    products: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: tuple[ProductLoss, ...] = ()
    moments: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        scales = ", ".join(
            f"{value:g}" if len(self.scales) == 1 else f"loss {k}: {value:g}" for k, value in self.scales.items()
        )
        bad = ", ".join(self.nonfinite_parameters) or "none"
        skipped = f"\nlast step skipped for the gradients of: {', '.join(self.nonfinite_gradients)}" * bool(
            self.nonfinite_gradients
        )
        memory = ", ".join(f"{name} {amount(size)}" for name, size in self.memory.items())
        kept = ", ".join(f"{name} {amount(size)}" for name, size in self.moments.items())
        memory += f" (moments in {kept})" * bool(kept)
        skips = skips_in_words(f"{self.skipped} skipped", self.bad_losses)
        under = self.level if self.level == "O0" else f"{self.level} in {self.low}"
        return (
            f"{under}: {self.steps} steps, {skips}, scale {scales or 'unused'}\n"
            f"non-finite parameters: {bad}{skipped}\nmemory: {memory}{''.join(self._of_products())}"
        )

    def _of_products(self) -> Iterator[str]:
        if self.products:
            yield f"\nproducts: {'; '.join(f'{how} in {named(names)}' for how, names in self.products.items())}"
        counted = {each.layer for each in self.lost}
        idle = [name for how, names in self.products.items() if ":" not in how for name in names if name not in counted]
        if idle and (counted or self.steps):
            yield f"\nno products counted in {named(idle)}: not called, in fp32 by your code's autocast, or docs/fp8.md"
        worst = sorted(self.lost, key=lambda each: (each.nonfinite > 0, each.share), reverse=True)
        yield from (f"\nlost: {each}" for each in worst[:3] if each.share or each.nonfinite)


def amount(size: int) -> str:
    """Returns a number of bytes in words, such as "3.0 MiB"."""
    if size < 2**10:
        return f"{size} B"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def counted(counts: Mapping[str, Any], record: StepRecord) -> dict[str, Any]:
    """Returns the counts that trainers log of skipped steps, by name, with those of one more step."""
    flags = {"halfstep/skipped": record.skipped, "halfstep/bad_losses": record.bad_loss}
    return {name: counts.get(name, 0.0) + flag.float() for name, flag in flags.items() if flag is not None}


def skips_in_words(skips: str, bad_losses: int) -> str:
    """Returns the words `skips` on skipped steps, with how many of them had a loss that was not finite."""
    return f"{skips} ({bad_losses:,} for a loss that was not finite)" if bad_losses else skips


TENSOR_KINDS = ("weight", "activation", "activation_grad", "weight_grad")
UPDATE = "update"  # a further kind: what a step added to a weight, in units of the weight's last place
PRECISION = "precision"  # another: how far what a module returns is from the same call in fp32, in units of its spread
ABSORBED = "absorbed"  # another: values that overflowed, after which an operation made everything finite again
OPERAND = "operand"  # another: what the cast of a recipe of products did to each element of an operand
ABSORBED_SAMPLE = 10, 500  # the steps of fp16 in which they are looked for unasked
CERTAIN = 0.5  # of its spread: more than rounding alone does
SUSPECT = 0.1  # of its spread in fp32: what a module returns may be off by so much before it is looked at
COMPARED = "precision compared"  # the code of a finding: a step was compared with the same step in fp32
SEVERITIES = ("note", "warning", "error")
AFTER_BACKWARD = "after backward"  # a phase: what code does with gradients between the backward pass and the step
BINS = 256  # entries of a histogram of exponents
BIAS = 127  # entry e, from 1 on, has the magnitudes from 2^(e - BIAS) to twice that
Array = npt.NDArray[np.float64]
Edges = tuple[Array, Array]
# The lower and the upper edge of each entry, as exponents of 2: entry 0 has the subnormals of fp32, the last one also
# what only fp64 reaches.
EDGES: Edges = (np.array([-149.0, *range(-126, 129)]), np.array([*range(-126, 129), 1024.0]))


@dataclass(frozen=True)
class Limits:
    """The limits of a format: values round to zero below `zero`, are subnormal below `normal`, overflow above `top`."""

    zero: float
    normal: float
    top: float

    def times(self, factor: float) -> Limits:
        """Returns these limits times `factor`: the limits of values that are divided by `factor` before rounding."""
        return Limits(self.zero * factor, self.normal * factor, self.top * factor)


UPDATE_LIMITS = Limits(0.5, 0.5, math.inf)  # of an update, in units in the last place of the weight: what it can follow
OPERAND_LIMITS = Limits(0.5, 0.5, 2.0)  # elements count as 1/4 if they became 0, as 4 if they saturated, else as 1
LIMITS = {UPDATE: UPDATE_LIMITS, OPERAND: OPERAND_LIMITS}  # of kinds that no format judges


def limits_of(fmt: Format) -> Limits:
    """Returns the `Limits` of a format."""
    # `zero` is just above half the smallest subnormal, since exactly half of it rounds to zero (ties to even).
    return Limits(math.nextafter(fmt.smallest_subnormal / 2, math.inf), fmt.smallest_normal, fmt.max)


def count_below(histogram: Array, amax: Array, limit: float, edges: Edges = EDGES) -> Array:
    """Returns how many elements in each row of a histogram are smaller than `limit` in magnitude."""
    low, high = edges
    share = np.clip((math.log2(limit) - low) / (high - low), 0.0, 1.0)
    below: Array = np.where(amax < limit, histogram.sum(-1), histogram @ share)
    return below


def count_beyond(histogram: Array, amax: Array, limit: float, edges: Edges = EDGES) -> Array:
    """Returns how many elements in each row of a histogram are larger than `limit` in magnitude."""
    above = histogram.sum(-1) - count_below(histogram, amax, limit, edges)
    beyond: Array = np.where(amax > limit, np.maximum(1.0, above), 0.0)
    return beyond


def _stat(meaning: str, merge: Callable[[Any, Any], Any] = operator.add) -> Any:
    """Returns a dataclass field for `TensorStats`, with its `meaning`; `merge` merges the values of two tensors."""
    return field(metadata={"meaning": meaning, "merge": merge})


@dataclass(frozen=True)
class TensorStats:
    """Counts, sums and an exponent histogram of one tensor, or of several merged; `a + b` merges two.

    Entry e of `exponents` counts the elements with 2**(e - 127) <= |x| < 2**(e - 126): entry 127 has those from 1 to 2,
    entry 0 the subnormals of fp32. `total`, `squares` and `amax` are the sum, the sum of the squares and the largest
    magnitude of the finite elements. The other fields are numbers of elements.
    """

    # These fields decide which statistics exist: the rows of train/kernels/stats.py, the lines of a log and `a + b` are
    # derived from them; train/kernels/stats.cpp repeats them.

    count: int = _stat("elements, finite or not")
    zeros: int = _stat("elements that are zero")
    negatives: int = _stat("elements below zero, minus infinity included")
    infinities: int = _stat("elements that are infinite")
    nans: int = _stat("elements that are NaN")
    exponents: tuple[int, ...] = _stat(
        "256 counts of the finite nonzero elements by exponent", lambda a, b: tuple(map(operator.add, a, b))
    )
    total: float = _stat("sum of the finite elements")
    squares: float = _stat("sum of the squares of the finite elements")
    amax: float = _stat("largest magnitude of the finite elements, 0 if there are none", max)

    def __add__(self, other: TensorStats) -> TensorStats:
        return TensorStats(**{name: merge(getattr(self, name), getattr(other, name)) for name, merge in MERGES.items()})

    @property
    def finite(self) -> int:
        """The number of finite elements, zeros included."""
        return self.count - self.infinities - self.nans

    @property
    def nonzero(self) -> int:
        """The number of elements that are finite and not zero."""
        return sum(self.exponents)

    @property
    def mean(self) -> float:
        """The mean of the finite elements, 0 if there are none."""
        return self.total / self.finite if self.finite else 0.0

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite elements, 0 if there are none."""
        return math.sqrt(self.squares / self.finite) if self.finite else 0.0

    def below(self, limit: float) -> float:
        """Returns the number of finite nonzero elements below `limit` in magnitude, estimated from the histogram."""
        return self._count(count_below, limit) if limit > 0 else 0.0

    def lost(self, fmt: Format | torch.dtype | str, scale: float = 1.0) -> float:
        """Returns the share of finite nonzero elements that, times `scale`, round to zero in `fmt`.

        A value of exactly half the smallest subnormal rounds to zero too (ties to even). The histogram keeps only
        exponents, so it recognises such values only if they are the largest (`amax`), as in the gradient of a mean,
        where all are equal. Otherwise they count as kept.

        >>> from halfstep.train.probe.rows import measure
        >>> gradients = measure(torch.tensor([1.0, 1e-3, 1e-8, 1e-8]))
        >>> gradients.lost("fp16"), gradients.lost("fp16", scale=1024.0)
        (0.5, 0.0)
        """
        return self._of_nonzero(self.below(_limits(fmt, scale).zero))

    def subnormal(self, fmt: Format | torch.dtype | str, scale: float = 1.0) -> float:
        """Returns the share of finite nonzero elements that, times `scale`, are subnormal in `fmt` and not zero."""
        limits = _limits(fmt, scale)
        return self._of_nonzero(self.below(limits.normal) - self.below(limits.zero))

    def saturated(self, fmt: Format | torch.dtype | str, scale: float = 1.0) -> float:
        """Returns the share of all elements that, times `scale`, are beyond the `max` of `fmt`, infinities included."""
        beyond = self._count(count_beyond, _limits(fmt, scale).top)
        return (beyond + self.infinities) / self.count if self.count else 0.0

    def _count(self, count: Callable[[Array, Array, float], Array], limit: float) -> float:
        return float(count(np.array(self.exponents, dtype=np.float64), np.array(self.amax), limit))

    @staticmethod
    def of_operand(loss: ProductLoss) -> TensorStats:
        """Returns the counts of what an operand lost, in the units of `OPERAND_LIMITS`."""
        bins = [0] * BINS
        bins[BIAS - 2], bins[BIAS + 2] = loss.flushed, loss.saturated
        bins[BIAS] = loss.elements - loss.flushed - loss.saturated - loss.nonfinite
        return TensorStats(
            loss.elements, 0, 0, 0, loss.nonfinite, tuple(bins), 0.0, 0.0, 4.0 if loss.saturated else 1.0
        )

    def _of_nonzero(self, count: float) -> float:
        return count / self.nonzero if self.nonzero else 0.0


MERGES: dict[str, Callable[[Any, Any], Any]] = {each.name: each.metadata["merge"] for each in fields(TensorStats)}
COUNTS = tuple(each.name for each in fields(TensorStats) if each.type == "int")
DOUBLES = tuple(each.name for each in fields(TensorStats) if each.type == "float")


def _limits(fmt: Format | torch.dtype | str, scale: float) -> Limits:
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise FormatError(f"scale is {scale!r}; expected a positive finite number to multiply the values by")
    return limits_of(as_format(fmt)).times(1 / scale)


@dataclass(frozen=True)
class AbsorbedOverflow:
    """An overflow that another operation made finite again, so that no value shows that the result is wrong.

    `operator`, called at the line `where`, is `exact` in fp32 and infinite in `format`. Then `by`, called at the line
    `by_where`, absorbed the infinity: an element of its result is `got`, and would be `want` in fp32. `off` is the
    relative error of the row with that element. Operators have their names in torch; an unknown line is None.
    """

    operator: str
    where: str | None
    exact: float
    format: str
    by: str
    by_where: str | None
    got: float
    want: float
    off: float

    def __str__(self) -> str:
        line_by = f" at {self.by_where}" if self.by_where not in (self.where, None) else ""
        return (
            f"{self.operator} gives {self.exact:,.6g}, which is {'-' if self.exact < 0 else ''}inf in {self.format}, "
            f"whose largest value is {as_format(self.format).max:g}; {self.by}{line_by} turns that into {self.got:g}, "
            f"where fp32 has {self.want:g}: finite, but off by {self.off:.0%}"
        )


@dataclass(frozen=True)
class Observation:
    """The statistics of one tensor of one module at one step.

    Attributes:
        kind: one of `TENSOR_KINDS`, `UPDATE`, `ABSORBED` or `PRECISION`. The elements of an `UPDATE` are what the step
            added to each weight, over the distance from the stored weight to the next larger value of its format: below
            one half it does not change the stored weight. Those of an `ABSORBED` overflow are the fp32 values that
            overflowed, those of `PRECISION` what the outputs of a module are off by, over their spread in fp32. Those
            of an `OPERAND` of a product by a recipe are 1/4 if they became 0, 4 if they saturated, and 1 if neither.
        name: tells several tensors of one kind apart: the name of the parameter, the place in the module's output, or
            the product and the operand.
        format: the format that the tensor was stored in.
        scale: the counted values are the true ones times this loss scale (1 for weights and activations).
        sampled: whether only some elements were read; `stats.count` is then their number.
        absorbed: which operation overflowed and what it led to; None for other kinds.
    """

    step: int
    module: str
    kind: str
    name: str
    format: str
    scale: float
    stats: TensorStats
    sampled: bool = False
    absorbed: AbsorbedOverflow | None = None

    @property
    def lost_updates(self) -> float | None:
        """The share of updates that were smaller than half a unit in the last place; None if `kind` is not `UPDATE`.

        Updates of exactly zero (no gradient, a skipped step) are not counted. Small updates add up in a master; without
        one (O3) they are lost for good, unless the plan's rounding is "stochastic", which adds them on average. For
        optimizers whose own step runs, and for Lamb, Muon and NovoGrad, only the change of the fp32 value is seen: an
        update that fp32 rounds away counts as zero.
        """
        return self.stats._of_nonzero(self.stats.below(UPDATE_LIMITS.zero)) if self.kind == UPDATE else None


@dataclass(frozen=True)
class OpCall:
    """One operation as it ran: `operator` is its aten name; the formats and ranges are those of its inputs and outputs.

    A range is (smallest, largest) of the finite elements, None if there are none. `line` is the line of the user's code
    that called it, such as "file.py:12 in forward", None if it is not known.
    """

    module: str
    operator: str
    phase: str
    input_formats: tuple[str, ...]
    output_formats: tuple[str, ...]
    input_ranges: tuple[tuple[float, float] | None, ...]
    output_ranges: tuple[tuple[float, float] | None, ...]
    line: str | None


@dataclass(frozen=True)
class Verdict(InNotebooks):
    """Which operation made the first non-finite value that reached the loss or a gradient, and what cures it.

    Attributes:
        module: the dotted name of the module; "" is the model itself, or code outside of it if `outside` is true.
        operator: the name of the op in torch.
        phase: "forward", "backward" or "after backward" (user code that changes gradients).
        kind: the kind of failure.
        where: the line of the user's code.
        cure: the edits for `plan.edit(*verdict.cure)`; empty if no edit cures the fault.
        evidence: which values were seen.
        advice: what to do, in words.
        call: the operation; None if no operation is at fault (bad input data, bad weights).
    """

    module: str
    operator: str
    phase: str
    kind: Kind
    where: str | None
    cure: tuple[Edit, ...]
    evidence: str
    advice: str
    call: OpCall | None = None
    outside: bool = False

    @property
    def place(self) -> str:
        """The name of the module, or a description if it has none."""
        if not self.module:
            return "code outside the model" if self.outside else "the model itself"
        return module_words(self.module)

    def __str__(self) -> str:
        place = f"in {self.place}" + (f", {self.where}" if self.where else "")
        phase = "after the backward pass" if self.phase == AFTER_BACKWARD else f"{self.phase} pass"
        return f"{self.kind}: {called(self.operator)} {place}, {phase}\n  seen: {self.evidence}\n  do: {self.advice}"


class NumericsError(HalfstepError, ArithmeticError):
    """Training that keeps skipping steps, and so does not learn; `verdict` says what broke and what to do.

    Raised by `session.step()` after the step, which changed nothing: a caller that catches it can go on training.
    """

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message, verdict)
        self.verdict = verdict

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Finding(InNotebooks):
    """Something that a check found: `severity` is one of `SEVERITIES`, `code` is a short fixed name of its kind.

    `place` names the module, parameter or operation, `evidence` says what was seen there, and `advice` what to do.
    `cure` has the edits for `plan.edit(*finding.cure)`, empty if no edit cures it.
    """

    severity: str
    code: str
    place: str
    evidence: str
    advice: str
    cure: tuple[Edit, ...] = ()

    def __str__(self) -> str:
        return f"{self.severity}: {self.code} at {self.place}\n  seen: {self.evidence}\n  do: {self.advice}"


def called(operator: str) -> str:
    """Returns how sentences name an operation: by its name in torch, except for "to", which is "a cast"."""
    return "a cast" if operator == "to" else operator


def module_words(module: str) -> str:
    """Returns how sentences name a module: by its dotted name, after "module" if the name begins with a digit."""
    return f"module {module}" if module[:1].isdigit() else module


def absorbed_finding(seen: Observation) -> Finding:
    """Returns the finding for an observation of an absorbed overflow."""
    said = seen.absorbed
    assert said is not None
    place = (seen.module or "(model)") + (f", {said.where}" if said.where else "")
    advice = (
        "compute this in fp32, or scale the values down first; halfstep.check(session, closure) tries edits of the "
        "plan and names one that cures it"
    )
    return Finding("warning", "overflow absorbed", place, str(said), advice)


@runtime_checkable
class Recorder(Protocol):
    """The protocol of sinks that get all records of a session, not only those of its steps.

    A session calls any sink with each StepRecord. If the sink also has a method `record`, the session passes all other
    records to it.
    """

    def __call__(self, record: StepRecord, /) -> None:
        """Takes the record of a step; it is called during the step, so it must not wait for the device."""

    def record(self, record: SessionStart | Observation | Verdict | Finding, /) -> None:
        """Takes a record that is already on the host."""


@dataclass(frozen=True)
class Rounded:
    """What rounding to a format would do to the tensors of one kind of one module, over all steps.

    Attributes:
        kind: one of `TENSOR_KINDS`; gradients are multiplied by `scale` first.
        low: false if the plan keeps these tensors in fp32, so that losses come only from the rounding of earlier ones.
        lost: the share of nonzero elements that become zero; of gradients also those lost earlier in the backward pass.
        saturated: the share of all elements beyond the format's largest value; of gradients likewise.
        snr_db: the signal-to-noise ratio in decibels: the sum of the squared fp32 values over that of their squared
            errors, infinite if all values are exact.
        stats: counts of the fp32 values, without the scale.
    """

    module: str
    kind: str
    format: str
    low: bool
    scale: float
    lost: float
    saturated: float
    snr_db: float
    stats: TensorStats


@dataclass(frozen=True)
class Foreseen:
    """What a recipe of products would lose in one operand of a layer's product, over all steps.

    Attributes:
        recipe: a value of `Plan.products`.
        loss: which operand it is, and how many of its elements would be lost.
        error: the norm of its rounding errors over its own.
        product_error: likewise of the product, with both operands rounded and the result in bf16.
    """

    recipe: str
    loss: ProductLoss
    error: float
    product_error: float

    def __str__(self) -> str:
        """Returns how far the product is off, in words."""
        return f"{self.loss.product} of {self.loss.layer} is off by {self.product_error:.1%} of its norm"


@dataclass(frozen=True)
class ScaleRange:
    """Which constant loss scales are safe in a format, and where a dynamic one settles.

    Attributes:
        largest: the scale at which the largest gradient reaches the format's largest value.
        largest_gradient: the magnitude of that gradient, which may be one between operations inside a module.
        place: the module with the largest gradient at its output or weights.
        smallest: the smallest power of two at which the gradients of every module have a signal-to-noise ratio of at
            least 20 dB; None if no scale reaches that.
        recommended: a power of two with room for gradients 64 times as large; `edit` is this scale as an edit.
        settles: a dynamic scale settles between these two values.
    """

    format: str
    smallest: float | None
    largest: float
    recommended: float
    settles: tuple[float, float]
    largest_gradient: float
    place: str
    edit: Scaling


ONE_SCALE = (
    "one static scale for all tensors is assumed, the loss scale; products='fp8' gives each operand its own, and loses "
    "far less: predict that too, by products='fp8' or --products fp8 (docs/fp8.md)"
)


@dataclass(frozen=True)
class WhatIf(InNotebooks):
    """What training in other formats would do, predicted from `steps` steps in fp32.

    `plan` names the plan that decides which tensors are low. `rows` has an entry per format, module and kind, `scales`
    one per format. `stay_full` has, by format, findings on modules that should be fp32, whose `cure` is the edit that
    does so. For fp16 it also has findings on overflows that would be absorbed. `products` has an entry per recipe,
    layer, product and operand; by recipe, `stay_full` has findings on layers that lose much, to be kept in bf16.
    """

    plan: str
    steps: int
    formats: tuple[str, ...]
    rows: tuple[Rounded, ...]
    scales: tuple[ScaleRange, ...]
    stay_full: dict[str, tuple[Finding, ...]]
    products: tuple[Foreseen, ...] = ()

    def scale(self, fmt: Format | torch.dtype | str) -> ScaleRange:
        """Returns the safe loss scales of a format.

        Raises:
            FormatError: an unknown format, or one that was not predicted.
        """
        name = as_format(fmt).name
        found = next((entry for entry in self.scales if entry.format == name), None)
        if found is None:
            raise FormatError(
                f"{name} was not predicted, only {', '.join(self.formats)}; name {name} in whatif(..., formats=...)"
            )
        return found

    def edits(self, fmt: Format | torch.dtype | str) -> tuple[Edit, ...]:
        """Returns the edits for `plan.edit(...)` that this prediction recommends for a format: the scale and the rules.

        Raises:
            FormatError: an unknown format, or one that was not predicted.
        """
        scale = self.scale(fmt)
        return (scale.edit, *(edit for finding in self.stay_full[scale.format] for edit in finding.cure))

    def __str__(self) -> str:
        """Returns the loss scales and findings of each format; `rows` has the figures of each module."""
        lines = [f"predicted from {self.steps} steps in fp32, for what plan {self.plan} stores low"]
        for scale in self.scales:
            safe = f"{scale.smallest:g} to {scale.largest:g}" if scale.smallest is not None else "none"
            lines.append(f"{scale.format}: safe loss scales {safe}")
            lines += ["  " + str(finding).replace("\n", "\n  ") for finding in self.stay_full[scale.format]]
            lines += [f"  {ONE_SCALE}"] if scale.format in ("e4m3", "e5m2") else []
        for recipe in dict.fromkeys(row.recipe for row in self.products):
            rows = [row for row in self.products if row.recipe == recipe]
            lines.append(f"products {recipe}: at worst {max(rows, key=lambda row: row.product_error)}")
            lines.append(f"  most is lost {max(rows, key=lambda row: row.loss.share).loss}")
            lines += ["  " + str(finding).replace("\n", "\n  ") for finding in self.stay_full[recipe]]
        return "\n".join(lines)
