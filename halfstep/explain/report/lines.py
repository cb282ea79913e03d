"""The lines of a run log: each is a JSON object with a `type`; the first is a `start` with the schema version.

The line types are the record classes of `records.py`. JSON has no NaN and no infinity, which become text; edits are
written as in plan files, except in logs of schema 1: Python code, which is shown and not run.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Union, get_type_hints

import msgspec
from msgspec import Struct

from halfstep.edits import Edit
from halfstep.errors import LogError, PlanError
from halfstep.machine import Machine
from halfstep.plan.io import edit_from_dict, edit_to_dict
from halfstep.records import BINS, COUNTS, DOUBLES, Finding, Observation, StepValues, TensorStats, Verdict

SCHEMA = 2
READ = (1, SCHEMA)
START_BYTES = 4096  # more than the first line of a log has: a file that is not a log may be one line of any length

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Time = Annotated[float, msgspec.Meta(ge=0, lt=253402300800)]  # seconds since 1970; a date ends with the year 9999


class Start(Struct, frozen=True, tag_field="type", tag="start"):
    """The line that is written whenever a log is opened: the first line, and one more each time it is continued."""

    schema: int
    time: Time
    halfstep: str
    torch: str


class SessionLine(Struct, frozen=True, tag_field="type", tag="session"):
    """The line for a new session."""

    time: Time
    plan: dict[str, Any]
    emulated: bool
    modules: tuple[str, ...]
    machine: Machine
    process: int | None = None  # its rank if several train together


class End(Struct, frozen=True, tag_field="type", tag="end"):
    """The line for a closed log; `error` is the class of the exception that ended the log's `with` block, or None."""

    time: Time
    error: str | None = None


@dataclass(frozen=True)
class Event:
    """A verdict or finding, and the step after which it came."""

    step: int
    record: Verdict | Finding


def _line_of(record: type, tag: str, changed: dict[str, Any], absent: dict[str, Any] | None = None) -> type[Struct]:
    """Returns the struct for log lines of the `type` `tag` that hold records of a class."""
    # It has the fields of the class. `changed` gives a field another type, adds one, or leaves one out if the type is
    # None; `absent` has defaults of fields that a line may lack, besides those of the class.
    types = {name: kind for name, kind in (get_type_hints(record) | changed).items() if kind is not None}
    absent = {each.name: each.default for each in fields(record) if each.default is not MISSING} | (absent or {})
    given = [(name, kind, absent[name]) if name in absent else (name, kind) for name, kind in types.items()]
    return msgspec.defstruct(f"{record.__name__}Line", given, tag_field="type", tag=tag, frozen=True, kw_only=True)


_STATS: dict[str, Any] = dict.fromkeys(COUNTS, Count) | dict.fromkeys(DOUBLES, float)
_NOTED = {"after": Count, "cure": tuple[str | dict[str, Any], ...]}  # the last step before, and edits
StepLine = _line_of(StepValues, "step", {"step": Count, "time": Time})
ObservationLine = _line_of(  # `exponents` counts from `first` on, without the zeros at the ends
    Observation,
    "observation",
    {"step": Count, "stats": None} | _STATS | {"first": Count, "exponents": tuple[Count, ...]},
    dict.fromkeys(_STATS, 0),
)
VerdictLine = _line_of(Verdict, "verdict", _NOTED)
FindingLine = _line_of(Finding, "finding", _NOTED)

_KNOWN = (Start, SessionLine, End, StepLine, ObservationLine, VerdictLine, FindingLine)
# Not strict: a number may be a text, so that those which are not finite are read.
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[_KNOWN], strict=False)  # noqa: UP007
Line = Start | SessionLine | End | StepValues | Observation | Event


def encode(record: Line) -> bytes:
    """Returns a record as a line of the file, with its newline."""
    line = plain(msgspec.to_builtins(_entries(record)))
    try:
        return msgspec.json.encode(line) + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: Python has them in names of files that are not UTF-8
        return json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n"


def decode(line: bytes) -> Line:
    """Returns the record in a line of a log; raises a msgspec.DecodeError or UnicodeDecodeError if it is none."""
    try:
        found = _DECODER.decode(line)
    except RecursionError as error:
        raise msgspec.DecodeError(str(error)) from None
    if isinstance(found, (Start, SessionLine, End)):
        return found
    given = msgspec.structs.asdict(found)
    if isinstance(found, StepLine):
        return StepValues(**given)
    if isinstance(found, ObservationLine):
        first, used = given.pop("first"), given["exponents"]
        rest = BINS - first - len(used)
        if rest < 0:
            raise msgspec.ValidationError(f"expected histogram bins 0 to {BINS}, got {first} to {first + len(used)}")
        given["exponents"] = (0,) * first + used + (0,) * rest
        stats = TensorStats(**{name: given.pop(name) for name in (*COUNTS, "exponents", *DOUBLES)})
        return Observation(**given, stats=stats)
    after = given.pop("after")
    code = [each for each in given["cure"] if isinstance(each, str)]
    given["advice"] += f"; edits: {', '.join(code)}" if code else ""
    try:
        given["cure"] = tuple(edit_from_dict(each) for each in given["cure"] if each not in code)
    except PlanError as error:
        raise msgspec.ValidationError(str(error)) from None
    return Event(after, Verdict(**given) if isinstance(found, VerdictLine) else Finding(**given))


def _entries(record: object) -> object:
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


def plain(value: Any) -> Any:
    """Returns a value as plain JSON types: a record as its fields, an edit as in plan files, infinity as text."""
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


_NUMBERS = re.compile(r"\[[^\[\]{}\"]*\]")


def to_json(result: object) -> str:
    """Returns records as JSON with field names as keys; non-finite numbers become the text "nan", "inf" or "-inf"."""
    text = json.dumps(plain(result), indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"


def check_start(line: bytes, path: object) -> None:
    """Refuses a file that does not start as a log that this halfstep version can read."""
    if not line.strip(b"\0 \r\n\t"):
        raise LogError(f"{path} is empty: nothing was logged; to write a log, pass sinks=[RunLog(path)] to initialize")
    try:
        found = msgspec.json.decode(line)
    except (ValueError, RecursionError):  # of msgspec, of text that is not UTF-8, of brackets in brackets
        what = "was cut within its first line: nothing was logged" if line[:8] == b'{"type":' else "is not a run log"
        raise LogError(f"{path} {what}; expected a file that RunLog(path) in a session's sinks=[...] wrote") from None
    if not isinstance(found, dict) or found.get("type") != "start" or "schema" not in found:
        raise LogError(
            f"{path} is not a run log: its first line is not the start of one; name a file that RunLog(path) wrote"
        )
    if found["schema"] not in READ:
        raise LogError(
            f"{path} has schema {found['schema']!r}, but this halfstep version reads schemas up to {SCHEMA}; "
            "use the version that wrote the file, or name another file"
        )
    try:
        msgspec.convert(found, Start)
    except msgspec.ValidationError as error:
        raise LogError(f"{path} is damaged in its first line ({error}); fix that line, or name another file") from None
