"""Frozen results of measurements: benchmarks, the speed of a machine, and where the time of a step goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfstep.edits import Edit, spell
from halfstep.machine import Machine


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of `count` measurements."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class BenchRun:
    """One workload under one plan, or under torch.amp (`peer`), over all seeds; what was not measured is None.

    `times_ms` has the milliseconds of each step after the warm-up, seed after seed. `vs_o0` and `vs_amp` are the
    medians over all steps of the other run's time (O0's, torch.amp's in the same format) divided by this run's.
    `peak_bytes` is the most memory that one training step holds, weights included; `bytes_per_parameter` has what is
    held between two steps, by use. `train_loss` (the mean of the last tenth of the steps), `validation` (by figure,
    such as accuracy), `skipped` (steps) and `scale` (the final one) have one entry per seed; `losses`, in a sweep only,
    has the loss of each step. `error` says why the run did not start or what ended it. `slow` says how many times O0's
    step one of its steps takes, if it was therefore timed over a few steps and not trained.
    """

    name: str
    level: str
    low: str
    peer: bool
    emulated: bool
    times_ms: tuple[float, ...] = ()
    step_ms: Spread | None = None
    vs_o0: float | None = None
    vs_amp: float | None = None
    peak_bytes: int | None = None
    bytes_per_parameter: dict[str, float] = field(default_factory=dict)
    train_loss: tuple[float, ...] = ()
    validation: dict[str, tuple[float, ...]] = field(default_factory=dict)
    skipped: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    error: str | None = None
    compiled: bool = False
    losses: tuple[float, ...] = ()
    slow: float | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether the run ended because memory ran out."""
        return self.error is not None and "out of memory" in self.error


@dataclass(frozen=True)
class BenchResult:
    """One workload under several plans, side by side: its settings, the machine, and the result of each run.

    The first `warmup` steps of a seed are not timed, nor is the first fifth of a turn, in which each run makes `turn`
    steps. `complete` is false if the benchmark was interrupted; `peak_method` says how peak memory was counted.
    """

    workload: str
    settings: dict[str, str]
    parameters: int
    steps: int
    warmup: int
    seeds: tuple[int, ...]
    runs: tuple[BenchRun, ...]
    peak_method: str
    notes: tuple[str, ...]
    complete: bool
    machine: Machine
    command: str
    date: str
    turn: int = 1


@dataclass(frozen=True)
class Point:
    """One model and batch size of a sweep, and the results; `examples` is the number of examples in an epoch."""

    model: str
    batch: int
    examples: int | None
    result: BenchResult


@dataclass(frozen=True)
class Sweep:
    """A benchmark over models and batch sizes, asked for as `asked` says; `total` is how many points there will be."""

    schema: int
    asked: dict[str, str]
    total: int
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Largest:
    """The largest batch with which a model in one configuration trains within `limit` bytes; 0 if not even one fits.

    If it is None, `error` says why. `tried` has each batch size that was tried, and whether it fitted.
    """

    model: str
    name: str
    limit: int
    batch: int | None = None
    tried: tuple[tuple[int, bool], ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Rate:
    """How fast a device does one kind of work in one format.

    `how` is "native", "TF32" (fp32 operands on TF32 units) or "emulated" (fp32 products, rounded). `seconds` is the
    time of one call; `unit` is GFLOP/s, or GB/s read and written. `vs_fp32` is the median of fp32's time divided by
    this format's, in turns. `error` says why there is no figure.
    """

    work: str
    format: str
    how: str
    seconds: Spread | None
    rate: float | None
    unit: str
    vs_fp32: float | None
    error: str | None = None


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
    """A choice that sessions base on the class of the processor, and what a measurement says of it.

    `used` is the value that sessions use now, `table` that of halfstep's table for the class of this processor.
    """

    what: str
    used: str
    table: str
    measured: str
    agrees: bool


@dataclass(frozen=True)
class Examination:
    """What a machine is, how fast it computes, and which level and format to train in, with the reason.

    `processor` is the class of the processor, and `source` says where the choices for it come from. `tools` says what
    was found of the tools that fast kernels need, such as "Triton". `saved` is the file that `--save` wrote.
    """

    machine: Machine
    device: str
    processor: str
    source: str
    rates: tuple[Rate, ...]
    memory: tuple[Footprint, ...]
    settings: tuple[Setting, ...]
    choices: tuple[Choice, ...]
    tools: dict[str, str]
    level: str
    low: str
    reason: str
    seconds: float
    date: str
    saved: str | None = None


@dataclass(frozen=True)
class OpRow:
    """The calls of one operation on the same formats, added up over one step.

    `formats` are those of its inputs and output, as "bf16, bf16 -> bf16". `flops` counts products only, a multiply-add
    as two. `bytes` counts reads and writes. `share` is the row's share of the total time.
    """

    operator: str
    phase: str
    formats: str
    calls: int
    flops: int
    bytes: int
    seconds: float
    share: float


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
    """The formats that the plan gives a module, and the reason, such as the rule that decided them.

    `param` is the format of its own weights, "-" if it has none, `compute` that of operations for which the op table
    leaves a choice, `output` that of its results: "-" if they are not cast, "input" if it is that of the first input.
    """

    name: str
    type: str
    param: str
    compute: str
    output: str
    reason: str


@dataclass(frozen=True)
class Saving:
    """A way to save time in a step: the place, what was seen, what to do, the edits, and the seconds that it saves.

    `seconds` was measured, in most cases by running the operations of that place alone, in their present and in their
    later formats; None if they could not be measured, and `evidence` says why.
    """

    code: str
    place: str
    evidence: str
    advice: str
    seconds: float | None
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
class Inspection:
    """Where the time and the casts of one training step go, forward and backward.

    `seconds` is the time in operations, each timed alone. `savings` has the largest first. If products are `emulated`,
    their time says nothing about a device with units for them. `kernels` (on CUDA) are those that compute products.
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
        return "\n".join(lines if self.savings else [*lines, "nothing was found that would save time"])
