"""The lines of a run log: each a JSON object with its `type`; the first is a `start` with the schema version.

A record is written by its fields, which stand in `records.py` alone: the types of the lines are made of them. JSON has
no NaN and no infinity: such a number is the text "nan", "inf" or "-inf". Edits are written as in plan files.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Union, get_type_hints

import msgspec
from msgspec import Struct

from halfstep.edits import Edit
from halfstep.errors import LogError, PlanError
from halfstep.machine import Machine
from halfstep.plan.io import edit_from_dict, edit_to_dict
from halfstep.records import (
    BINS,
    COUNTS,
    DOUBLES,
    Finding,
    Observation,
    StepValues,
    TensorStats,
    Verdict,
)

SCHEMA = 2
START_BYTES = 4096  # more than the first line of a log has: a file that is not a log may be one line of any length

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=253402300800)]  # seconds since 1970; a date ends with the year 9999


class Start(Struct, frozen=True, tag_field="type", tag="start"):
    """A process opens the log: the first line of a log, and again where a later process goes on with it."""

    schema: int
    time: Time
    halfstep: str
    torch: str


class SessionLine(Struct, frozen=True, tag_field="type", tag="session"):
    """A session begins: its plan, whether the low format is emulated, its modules, and where it runs.

    `process` is the rank where several processes train together.
    """

    time: Time
    plan: dict[str, Any]
    emulated: bool
    modules: tuple[str, ...]
    machine: Machine
    process: int | None = None


class End(Struct, frozen=True, tag_field="type", tag="end"):
    """The log was closed, by a `with` that an exception left if there is an `error`: its class."""

    time: Time
    error: str | None = None


@dataclass(frozen=True)
class Event:
    """A verdict or finding, and the step after which it came."""

    step: int
    record: Verdict | Finding


def _line_of(record: type, tag: str, changed: dict[str, Any], absent: dict[str, Any] | None = None) -> type[Struct]:
    """Returns the type of the lines that hold a record: its fields, some of another type or left out (None).

    `absent` has the values of fields that a line may lack, besides those that have one in the record.
    """
    types = {name: kind for name, kind in (get_type_hints(record) | changed).items() if kind is not None}
    absent = {each.name: each.default for each in fields(record) if each.default is not MISSING} | (absent or {})
    given = [(name, kind, absent[name]) if name in absent else (name, kind) for name, kind in types.items()]
    return msgspec.defstruct(f"{record.__name__}Line", given, tag_field="type", tag=tag, frozen=True, kw_only=True)


_STATS: dict[str, Any] = dict.fromkeys(COUNTS, Count) | dict.fromkeys(DOUBLES, float)
_BINS = {
    "first": Count,
    "exponents": tuple[Count, ...],
}  # counts from the bin `first` on, without the zeros at the ends
_NOTED = {"after": Count, "cure": tuple[dict[str, Any], ...]}  # the last step before, and edits
StepLine = _line_of(StepValues, "step", {"step": Count, "time": Time})
ObservationLine = _line_of(
    Observation, "observation", {"step": Count, "stats": None} | _STATS | _BINS, dict.fromkeys(_STATS, 0)
)
VerdictLine = _line_of(Verdict, "verdict", _NOTED)
FindingLine = _line_of(Finding, "finding", _NOTED)

_KNOWN = (Start, SessionLine, End, StepLine, ObservationLine, VerdictLine, FindingLine)
# Not strict: a number may be a text, so that those which are not finite are read.
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[_KNOWN], strict=False)  # noqa: UP007
Line = Start | SessionLine | End | StepValues | Observation | Event


def encode(record: Line) -> bytes:
    """Returns a record as it stands in the file, with its end."""
    line = plain(msgspec.to_builtins(_entries(record)))
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: Python has them in names of files that are not UTF-8
        return json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"


def decode(line: bytes) -> Line:
    """Returns what a line of a log holds.

    Raises:
        msgspec.DecodeError: it is cut or damaged, or (a ValidationError) not a line of a log.
        UnicodeDecodeError: it is not UTF-8.
    """
    found = _DECODER.decode(line)
    if isinstance(found, (Start, SessionLine, End)):
        return found
    given = msgspec.structs.asdict(found)
    if isinstance(found, StepLine):
        return StepValues(**given)
    if isinstance(found, ObservationLine):
        return _observation(given)
    after = given.pop("after")
    try:
        given["cure"] = tuple(map(edit_from_dict, given["cure"]))
    except PlanError as error:
        raise msgspec.ValidationError(str(error)) from None
    return Event(after, Verdict(**given) if isinstance(found, VerdictLine) else Finding(**given))


def _entries(record: object) -> object:
    """Returns the entries of the line of a record."""
    match record:
        case StepValues():
            return {"type": "step", **vars(record), "time": round(record.time, 3)}
        case Observation(stats=stats):
            used = [at for at, count in enumerate(stats.exponents) if count]
            first, end = (used[0], used[-1] + 1) if used else (0, 0)
            given = vars(record) | vars(stats) | {"first": first, "exponents": stats.exponents[first:end]}
            del given["stats"]
            if record.absorbed is None:
                del given["absorbed"]
            return {"type": "observation", **given}
        case Event(step, found):
            kind = "verdict" if isinstance(found, Verdict) else "finding"
            return {"type": kind, "after": step, **vars(found), "cure": list(map(edit_to_dict, found.cure))}
    return record


def _observation(given: dict[str, Any]) -> Observation:
    first, used = given.pop("first"), given["exponents"]
    after = BINS - first - len(used)
    if after < 0:
        raise msgspec.ValidationError(f"bins {first} to {first + len(used)} of {BINS}")
    given["exponents"] = (0,) * first + used + (0,) * after
    stats = TensorStats(**{name: given.pop(name) for name in (*COUNTS, "exponents", *DOUBLES)})
    return Observation(**given, stats=stats)


def plain(value: Any) -> Any:
    """Returns a value as JSON can have it: a record as its fields, an edit as it stands in plan files.

    >>> plain({"a": (0.5, float("-inf"))})
    {'a': [0.5, '-inf']}
    """
    if isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, Edit):
        return edit_to_dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return value


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
        what = "was cut within its first line: nothing was logged" if line[:8] == b'{"type":' else "is not a run log"
        raise LogError(f"{path} {what}; a run log is what RunLog(path) in sinks=[...] of a session writes") from None
    if not isinstance(found, dict) or found.get("type") != "start" or "schema" not in found:
        raise LogError(f"{path} is not a run log: its first line is not one; name the file that RunLog(path) wrote")
    if found["schema"] != SCHEMA:
        raise LogError(
            f"{path} is of schema {found['schema']!r}, this halfstep reads {SCHEMA}; "
            "use the halfstep that wrote it, or another file"
        )
    try:
        msgspec.convert(found, Start)
    except msgspec.ValidationError as error:
        raise LogError(f"{path} is damaged in its first line ({error}); fix that line, or name another file") from None
