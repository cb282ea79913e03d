"""The lines of a run log: each a JSON object with its `type`; the first is a `start` with the schema version.

JSON has no NaN and no infinity: such a number is the text "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from halfstep.errors import LogError
from halfstep.records import Finding, Kind, Machine, Observation, OpCall, StepValues, TensorStats, Verdict

SCHEMA = 1
START_BYTES = 4096  # more than the first line of a log has: what is none may be one line of any length
BINS = 256
_NAMED = ("step", "module", "kind", "name", "format", "sampled")
_COUNTED = ("count", "zeros", "negatives", "infinities", "nans")
_SUMMED = ("total", "squares", "amax")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=253402300800)]  # seconds since 1970; a date ends with the year 9999
Number = float | Literal["nan", "inf", "-inf"]
Range = tuple[Number, Number] | None


class Start(Struct, frozen=True, tag_field="type", tag="start"):
    """A process opens the log: the first line of a log, and again where a later process goes on with it."""

    schema: int
    time: Time
    halfstep: str
    torch: str


class SessionLine(Struct, frozen=True, tag_field="type", tag="session"):
    """A session begins: its plan, whether the low format is emulated, its modules, and where it runs."""

    time: Time
    plan: dict[str, Any]
    emulated: bool
    modules: tuple[str, ...]
    machine: Machine


class StepLine(Struct, frozen=True, tag_field="type", tag="step"):
    """A `StepValues`."""

    step: Count
    time: Time
    skipped: bool
    scale: Number
    grad_norm: Number | None
    loss: Number | None

    @classmethod
    def of(cls, values: StepValues) -> StepLine:
        """Returns the line of a step."""
        norm, loss = (None if v is None else number(v) for v in (values.grad_norm, values.loss))
        return cls(values.step, round(values.time, 3), values.skipped, number(values.scale), norm, loss)

    def values(self) -> StepValues:
        """Returns the step of a line."""
        norm, loss = (None if v is None else float(v) for v in (self.grad_norm, self.loss))
        return StepValues(self.step, self.time, self.skipped, float(self.scale), norm, loss)


class ObservationLine(Struct, frozen=True, tag_field="type", tag="observation"):
    """An `Observation`; `exponents` are the counts of the bins from `first` on, without the zeros at both ends."""

    step: Count
    module: str
    kind: str
    name: str
    format: str
    scale: Number
    sampled: bool
    count: Count
    zeros: Count
    negatives: Count
    infinities: Count
    nans: Count
    total: Number
    squares: Number
    amax: Number
    first: Count
    exponents: tuple[Count, ...]

    @classmethod
    def of(cls, seen: Observation) -> ObservationLine:
        """Returns the line of an observation."""
        stats = seen.stats
        used = [at for at, count in enumerate(stats.exponents) if count]
        first, end = (used[0], used[-1] + 1) if used else (0, 0)
        fields = {name: getattr(seen, name) for name in _NAMED} | {name: getattr(stats, name) for name in _COUNTED}
        fields |= {name: number(getattr(stats, name)) for name in _SUMMED}
        return cls(**fields, scale=number(seen.scale), first=first, exponents=stats.exponents[first:end])

    def check(self) -> None:
        """Raises a ValidationError where there are bins beyond those of a histogram."""
        if not 0 <= self.first <= self.first + len(self.exponents) <= BINS:
            raise msgspec.ValidationError(f"bins {self.first} to {self.first + len(self.exponents)} of {BINS}")

    def observation(self) -> Observation:
        """Returns the observation of a line."""
        after = BINS - self.first - len(self.exponents)
        counted: dict[str, Any] = {name: getattr(self, name) for name in _COUNTED}
        counted |= {name: float(getattr(self, name)) for name in _SUMMED}
        stats = TensorStats(**counted, exponents=(0,) * self.first + self.exponents + (0,) * after)
        return Observation(**{name: getattr(self, name) for name in _NAMED}, scale=float(self.scale), stats=stats)


class CallLine(Struct, frozen=True):
    """An `OpCall`."""

    module: str
    operator: str
    phase: str
    input_formats: tuple[str, ...]
    output_formats: tuple[str, ...]
    input_ranges: tuple[Range, ...]
    output_ranges: tuple[Range, ...]
    line: str | None

    @classmethod
    def of(cls, call: OpCall) -> CallLine:
        """Returns what a line says of an operation."""
        fields = {name: getattr(call, name) for name in cls.__struct_fields__}
        for name in ("input_ranges", "output_ranges"):
            fields[name] = tuple(None if r is None else (number(r[0]), number(r[1])) for r in fields[name])
        return cls(**fields)

    def call(self) -> OpCall:
        """Returns the operation that a line speaks of."""
        fields = msgspec.structs.asdict(self)
        for name in ("input_ranges", "output_ranges"):
            fields[name] = tuple(None if r is None else (float(r[0]), float(r[1])) for r in fields[name])
        return OpCall(**fields)


class VerdictLine(Struct, frozen=True, tag_field="type", tag="verdict"):
    """A `Verdict` that came after step `after`; `cure` has the edits as Python code."""

    after: Count
    module: str
    operator: str
    phase: str
    kind: Kind
    where: str | None
    cure: tuple[str, ...]
    evidence: str
    advice: str
    call: CallLine | None

    @classmethod
    def of(cls, verdict: Verdict, after: int) -> VerdictLine:
        """Returns the line of a verdict that came after step `after`."""
        call = None if verdict.call is None else CallLine.of(verdict.call)
        fields = {
            name: getattr(verdict, name) for name in cls.__struct_fields__ if name not in ("after", "cure", "call")
        }
        return cls(after=after, cure=tuple(map(repr, verdict.cure)), call=call, **fields)

    def verdict(self) -> Verdict:
        """Returns the verdict of a line, its cure as text."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("after", "call")}
        return Verdict(**fields, call=None if self.call is None else self.call.call())


class FindingLine(Struct, frozen=True, tag_field="type", tag="finding"):
    """A `Finding` that came after step `after`; `cure` has the edits as Python code."""

    after: Count
    severity: str
    code: str
    place: str
    evidence: str
    advice: str
    cure: tuple[str, ...]

    @classmethod
    def of(cls, finding: Finding, after: int) -> FindingLine:
        """Returns the line of a finding that came after step `after`."""
        fields = {name: getattr(finding, name) for name in cls.__struct_fields__ if name not in ("after", "cure")}
        return cls(after=after, cure=tuple(map(repr, finding.cure)), **fields)

    def finding(self) -> Finding:
        """Returns the finding of a line, its cure as text."""
        return Finding(**{name: getattr(self, name) for name in self.__struct_fields__ if name != "after"})


Line = Start | SessionLine | StepLine | ObservationLine | VerdictLine | FindingLine


def number(value: float) -> Number:
    """Returns the value as JSON can have it.

    >>> number(0.5), number(float("-inf"))
    (0.5, '-inf')
    """
    return value if math.isfinite(value) else str(float(value))  # type: ignore[return-value]


def encode(line: Line) -> bytes:
    """Returns a line as it stands in the file, with its end."""
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: Python has them in names of files that are not UTF-8
        return json.dumps(msgspec.to_builtins(line), ensure_ascii=False).encode(errors="replace") + b"\n"


def check_start(line: bytes, path: object) -> None:
    """Refuses a file whose first line is not the first line of a log that this halfstep reads.

    Raises:
        LogError: the file is empty, its first line was cut or is damaged, or it is no run log or of another schema.
    """
    if not line.strip(b"\0 \r\n\t"):
        raise LogError(f"{path} is empty: nothing was logged; RunLog(path) in sinks=[...] of a session writes a log")
    try:
        found = msgspec.json.decode(line)
    except ValueError:  # of msgspec, and of text that is not UTF-8
        what = "was cut within its first line: nothing was logged" if line[:8] == b'{"type":' else "is no run log"
        raise LogError(f"{path} {what}; a run log is what RunLog(path) in sinks=[...] of a session writes") from None
    if not isinstance(found, dict) or found.get("type") != "start" or "schema" not in found:
        raise LogError(f"{path} is no run log: its first line is not one; name the file that RunLog(path) wrote")
    if found["schema"] != SCHEMA:
        raise LogError(
            f"{path} is of schema {found['schema']!r}, this halfstep writes and reads {SCHEMA}; "
            "use the halfstep that wrote it, or another file"
        )
    try:
        msgspec.convert(found, Start)
    except msgspec.ValidationError as error:
        raise LogError(f"{path} is damaged in its first line ({error}); mend that line, or name another file") from None
