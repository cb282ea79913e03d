"""Frozen results of measurements: benchmarks, the speed of a machine, and where the time of a step goes."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

from halfstep.edits import Edit, spell
from halfstep.machine import Machine
from halfstep.records import InNotebooks, preformatted


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of `count` measurements."""

    median: float
    low: float
    high: float
    count: int

    @property
    def disturbed(self) -> bool:
        """Whether the quartiles lie so far apart that other work must have run on the machine."""
        return self.high - self.low > self.median / 3


DISTURBED = (
    "Other work ran on this machine: {what}. Measure again when it is quiet; ratios are more reliable than times."
)
_STEADY = 1.5  # times the least that the median of an operation's times is on a quiet machine, at most
INTERRUPTED = "Interrupted: the table shows what was measured so far, and losses after the steps made so far."


def disturbed(measured: Iterable[tuple[str, Spread | None]]) -> Iterator[str]:
    """Yields a line if some of what was measured, by name, varies as it does only beside other work."""
    names = list(dict.fromkeys(name for name, seconds in measured if seconds is not None and seconds.disturbed))
    if names:
        yield DISTURBED.format(what=f"the quartiles of {', '.join(names)} lie more than a third of the median apart")


@dataclass(frozen=True)
class BenchRun(InNotebooks):
    """One workload under one plan over all seeds; what was not measured is None."""

    name: str
    level: str
    low: str
    peer: bool  # under torch.amp
    emulated: bool
    times_ms: tuple[float, ...] = ()  # of each step after the warm-up, seed after seed
    step_ms: Spread | None = None
    vs_o0: float | None = None  # the median over all steps of O0's time / this run's
    vs_amp: float | None = None  # the same of torch.amp's in the same format
    peak_bytes: int | None = None  # the most that one step holds, weights included
    bytes_per_parameter: dict[str, float] = field(default_factory=dict)  # between two steps, by use
    train_loss: tuple[float, ...] = ()  # of each seed, the mean of the last tenth of the steps
    validation: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by figure, such as accuracy
    skipped: tuple[int, ...] = ()  # steps of each seed
    scale: tuple[float, ...] = ()  # of each seed, the final one
    error: str | None = None  # why it did not start, or what ended it
    compiled: bool = False
    losses: tuple[float, ...] = ()  # of each step, in a sweep only
    slow: float | None = None  # how many times O0's step its own takes, if it was timed and not trained
    gradient_error: float | None = None  # of a first batch, over how far two batches' gradients are apart

    @property
    def out_of_memory(self) -> bool:
        """Whether the run ended because memory ran out."""
        return self.error is not None and "out of memory" in self.error

    def figures(self) -> list[str]:
        """Returns the figures that compare runs, in words, each at its place; "" where one was not measured."""
        milliseconds, peak = self.step_ms and self.step_ms.median, self.peak_bytes and self.peak_bytes / 2**20
        figures = {"{:.1f} ms a step": milliseconds, "{:.2f} x O0": self.vs_o0, "{:.2f} x torch.amp": self.vs_amp}
        figures |= {"peak {:,.1f} MiB": peak, "gradient error {:.1%}": self.gradient_error}
        figures |= {"train loss {:.4f}": fmean(self.train_loss) if self.train_loss else None}
        return ["" if figure is None else form.format(figure) for form, figure in figures.items()]

    def __str__(self) -> str:
        """Returns a line with the figures that compare runs; `bench_table` and `sweep_sheet` show all."""
        return f"{self.name}: {self.error or ', '.join(filter(None, self.figures()))}"


@dataclass(frozen=True)
class BenchResult(InNotebooks):
    """One workload under several plans, side by side."""

    workload: str
    settings: dict[str, str]
    parameters: int
    steps: int
    warmup: int  # steps of a seed that are not timed
    seeds: tuple[int, ...]
    runs: tuple[BenchRun, ...]
    peak_method: str  # how peak memory was counted
    notes: tuple[str, ...]
    complete: bool  # False if it was interrupted
    machine: Machine
    command: str
    date: str
    turn: int = 1  # steps of a run in a row, of which the first fifth is not timed
    within: float | None = None  # what `gradient_error` of the cheapest run that is named may be

    def remarks(self) -> list[str]:
        """Returns what to know of the figures: an interruption, notes, and whether the machine was busy."""
        measured = ((run.name, run.step_ms) for run in self.runs)
        return [*[INTERRUPTED] * (not self.complete), *self.notes, *disturbed(measured)]

    def __str__(self) -> str:
        title = f"{self.workload}, {self.steps} steps on {self.machine.device}"
        return "\n".join([title, *map(str, self.runs), *self.remarks()])

    def _repr_html_(self) -> str:
        rows = [[run.name, *([run.error] if run.error else run.figures())] for run in self.runs]
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        title = preformatted(str(self).partition("\n")[0])
        table = f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>"
        return title + table + "".join(map(preformatted, self.remarks()))


@dataclass(frozen=True)
class Point:
    """One model and batch size of a sweep, and the results; `examples` is the number of examples in an epoch."""

    model: str
    batch: int
    examples: int | None
    result: BenchResult


@dataclass(frozen=True)
class Sweep(InNotebooks):
    """A benchmark over models and batch sizes, asked for as `asked` says; `total` is how many points there will be."""

    schema: int
    asked: dict[str, str]
    total: int
    points: tuple[Point, ...]

    def __str__(self) -> str:
        return "\n".join(f"{each.model}, batch {each.batch}: {run}" for each in self.points for run in each.result.runs)


@dataclass(frozen=True)
class Largest:
    """The largest batch with which a model in one configuration trains within `limit` bytes."""

    model: str
    name: str
    limit: int
    batch: int | None = None  # 0 if not even one fits; None: `error` says why
    tried: tuple[tuple[int, bool], ...] = ()  # each size, and whether it fitted
    error: str | None = None


@dataclass(frozen=True)
class Rate:
    """How fast a device does one kind of work in one format."""

    work: str
    format: str
    how: str  # "native", "TF32" (fp32 operands on its units) or "emulated" (fp32 products, rounded)
    seconds: Spread | None  # of one call
    rate: float | None
    unit: str  # GFLOP/s, or GB/s read and written
    vs_fp32: float | None  # the median of fp32's time / this format's, in turns
    error: str | None = None  # why there is no figure


@dataclass(frozen=True)
class Footprint:
    """What AdamW holds at one level: bytes a parameter, by weights, masters, gradients and optimizer."""

    level: str
    low: str
    bytes: dict[str, float]


@dataclass(frozen=True)
class Setting:
    """A setting of torch or the machine: its value, what it costs in speed or accuracy, and what to do about it."""

    name: str
    value: str
    costs: str | None = None
    advice: str | None = None


@dataclass(frozen=True)
class Choice:
    """A choice that sessions base on the class of the processor, and what a measurement says of it."""

    what: str
    used: str  # by sessions now
    table: str  # halfstep's, for the class of this processor
    measured: str
    agrees: bool


@dataclass(frozen=True)
class Examination:
    """What a machine is, how fast it computes, and which level and format to train in, with the reason."""

    machine: Machine
    device: str
    processor: str  # its class
    source: str  # of the choices for that class
    rates: tuple[Rate, ...]
    memory: tuple[Footprint, ...]
    settings: tuple[Setting, ...]
    choices: tuple[Choice, ...]
    tools: dict[str, str]  # that fast kernels need, such as "Triton"
    level: str
    low: str
    reason: str
    seconds: float
    date: str
    saved: str | None = None  # the file that `--save` wrote


@dataclass(frozen=True)
class OpRow:
    """The calls of one operation on the same formats, added up over one step."""

    operator: str
    phase: str
    formats: str  # of inputs and output, as "bf16, bf16 -> bf16"
    calls: int
    flops: int  # of products only, a multiply-add as two
    bytes: int  # read and written
    seconds: float
    share: float  # of the total time


@dataclass(frozen=True)
class CastRow:
    """The casts of a step from one format to another; `of_parameters` is the number of those that read a parameter."""

    source: str
    target: str
    calls: int
    bytes: int
    seconds: float
    of_parameters: int


@dataclass(frozen=True)
class ModuleRow:
    """The formats that the plan gives a module."""

    name: str
    type: str
    param: str  # of its own weights; "-": it has none
    compute: str  # of operations for which the op table leaves a choice
    output: str  # of its results; "-": not cast, "input": that of the first input
    reason: str  # such as the rule that decided


@dataclass(frozen=True)
class Saving:
    """A way to save time in a step."""

    code: str
    place: str
    evidence: str  # what was seen
    advice: str  # what to do
    seconds: float | None  # measured, mostly on the operations alone; None: `evidence` says why not
    cure: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class KernelRow:
    """A CUDA kernel of a step that computes a "matrix product", "convolution" or "attention": its `work`."""

    name: str
    work: str
    tensor_cores: bool
    calls: int
    seconds: float


@dataclass(frozen=True)
class Inspection(InNotebooks):
    """Where the time and the casts of one training step go, forward and backward.

    `seconds` is the time in operations, each timed alone, the least of some passes (CPU time on one thread of a CPU);
    in the median pass they took `disturbed` times as long, which is far above 1 where other work ran on the machine.
    `savings` has the largest first. If products are `emulated`, their time says nothing about a device with units for
    them. `kernels` (on CUDA) are those that compute products.
    """

    level: str
    low: str
    emulated: bool
    seconds: float
    rows: tuple[OpRow, ...]
    casts: tuple[CastRow, ...]
    modules: tuple[ModuleRow, ...]
    savings: tuple[Saving, ...]
    machine: Machine
    kernels: tuple[KernelRow, ...] = ()
    disturbed: float = 1.0

    def __str__(self) -> str:
        """Returns the heaviest operations and the savings; the fields have all that `halfstep inspect` prints."""
        lines = [f"a step at {self.level} in {self.low}: {self.seconds * 1e3:.3g} ms in operations"]
        rows = sorted(self.rows, key=lambda row: row.seconds, reverse=True)[:5]
        lines += [
            f"  {row.seconds * 1e3:.3g} ms in {row.calls} x {row.operator} ({row.phase}, {row.formats})" for row in rows
        ]
        for each in self.savings:
            costs = "" if each.seconds is None else f" costs {each.seconds * 1e3:.3g} ms"
            lines += [f"{each.code} at {each.place}{costs}: {each.evidence}", f"  do: {each.advice}"]
            lines += [f"  edit: {spell(each.cure)}"] if each.cure else []
        lines += [] if self.savings else ["nothing was found that would save time"]
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """Returns whether the machine was busy, in words."""
        what = f"operations took {self.disturbed:.1f} times the figures above, the least of some passes"
        return [DISTURBED.format(what=what)] * (self.disturbed > _STEADY)
