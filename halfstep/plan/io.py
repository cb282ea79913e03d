"""Plans as plain dicts and as TOML or JSON files, with a schema version."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import torch
from msgspec import UNSET, Struct, UnsetType

from halfstep.errors import HalfstepError, PlanError
from halfstep.formats import Format, as_format
from halfstep.plan.checks import near_miss
from halfstep.plan.levels import LEVELS, level
from halfstep.plan.opnames import check_op_changes
from halfstep.plan.plan import Master, OpChanges, Ops, Plan, PlanInput, PlanOutput
from halfstep.plan.policy import FULL, LOW, OutputWidth, Policy, Width
from halfstep.plan.rules import BufferWidth, Rule, RuleInput
from halfstep.plan.scaling import Scaling, ScalingKind

SCHEMA = 1
_SHORT: Mapping[str, Policy] = {"full": FULL, "low": LOW}


class _PolicyEntry(Struct, forbid_unknown_fields=True):
    param: Width
    compute: Width
    output: OutputWidth


class _RuleEntry(Struct, forbid_unknown_fields=True):
    pattern: str
    policy: Literal["full", "low"] | _PolicyEntry
    buffers: BufferWidth = "keep"
    input: RuleInput = "policy"


class _ScaleEntry(Struct, forbid_unknown_fields=True):
    kind: ScalingKind | UnsetType = UNSET
    init: float | UnsetType = UNSET
    growth: float | UnsetType = UNSET
    backoff: float | UnsetType = UNSET
    growth_interval: int | UnsetType = UNSET
    min: float | UnsetType = UNSET
    max: float | UnsetType = UNSET
    hysteresis: int | UnsetType = UNSET


class _OpsEntry(Struct, forbid_unknown_fields=True):
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    infer: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()


class _PlanEntry(Struct, forbid_unknown_fields=True):
    schema: int
    base: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    low: Literal["bf16", "fp16"] | UnsetType = UNSET
    param: Width | UnsetType = UNSET
    ops: Ops | UnsetType = UNSET
    norms: Width | UnsetType = UNSET
    master: Master | UnsetType = UNSET
    output: PlanOutput | UnsetType = UNSET
    input: PlanInput | UnsetType = UNSET
    scale: _ScaleEntry | UnsetType = UNSET
    op_changes: _OpsEntry = msgspec.field(default_factory=_OpsEntry)
    rules: tuple[_RuleEntry, ...] = ()


_KEYS: Mapping[str, type[Struct]] = {
    "$": _PlanEntry,
    "$.scale": _ScaleEntry,
    "$.op_changes": _OpsEntry,
    "$.rules[...]": _RuleEntry,
    "$.rules[...].policy": _PolicyEntry,
}
_PLAIN = ("name", "low", "param", "ops", "norms", "master", "output", "input")
_WITH_DEFAULTS = ("output", "input")


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as a dict of strings, numbers, lists and dicts, with every field and the schema version.

    >>> to_dict(level("O2", "bf16"))["master"]
    'split'
    """
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "low": plan.low.name,
        "param": plan.param,
        "ops": plan.ops,
        "norms": plan.norms,
        "master": plan.master,
        "output": plan.output,
        "input": plan.input,
        "scale": asdict(plan.scale),
        "op_changes": {field.name: list(getattr(plan.op_changes, field.name)) for field in fields(OpChanges)},
        "rules": [
            {"pattern": rule.pattern, "policy": _short(rule.policy), "buffers": rule.buffers, "input": rule.input}
            for rule in plan.rules
        ],
    }


def _short(policy: Policy) -> str | dict[str, str]:
    return next((name for name, each in _SHORT.items() if each == policy), None) or asdict(policy)


def from_dict(entries: Mapping[str, Any], *, low: Format | torch.dtype | str | None = None) -> Plan:
    """Returns the plan that a dict stands for, as `to_dict` makes it or with a level as `base` for what is not named.

    `low` is the format of a dict that names none. The dict is left as it is.

    Raises:
        PlanError: an unknown schema or key, a wrong type, a missing field, or a contradiction, with its path.
    """
    _check_schema(entries)
    try:
        entry = msgspec.convert(entries, _PlanEntry)
    except msgspec.ValidationError as error:
        raise PlanError(_explain(str(error), entries)) from None
    given = {name: getattr(entry, name) for name in _PLAIN if getattr(entry, name) is not UNSET}
    given["low"] = _low(entry, low)
    base = _base(entry, given)
    with _at("$.scale"):
        given["scale"] = _scaling(entry.scale, None if base is None else base.scale)
    with _at("$.op_changes"):
        given["op_changes"] = OpChanges(**msgspec.structs.asdict(entry.op_changes))
        check_op_changes(given["op_changes"])
    given["rules"] = tuple(_rule(number, rule) for number, rule in enumerate(entry.rules))
    with _at("$"):
        return Plan(**given) if base is None else replace(base, **given)


def _check_schema(entries: object) -> None:
    """Raises a PlanError for a schema other than ours; asked first, as another schema may have other keys."""
    if not isinstance(entries, Mapping):
        raise PlanError(f"at `$`: a plan is a table of fields, this is {type(entries).__name__}: {entries!r:.40}")
    schema = entries.get("schema")
    if schema is None:
        raise PlanError(f"at `$.schema`: the plan has no schema version; add schema = {SCHEMA}")
    if type(schema) is not int or schema != SCHEMA:
        raise PlanError(
            f"at `$.schema`: the plan is of schema {schema!r}, this halfstep reads {SCHEMA}; "
            "update halfstep, or save the plan again with this one"
        )


def _low(entry: _PlanEntry, low: Format | torch.dtype | str | None) -> Format:
    if entry.low is not UNSET:
        return as_format(entry.low)
    if low is None:
        raise PlanError('at `$.low`: the plan names no low format; add low = "bf16" or low = "fp16"')
    return as_format(low)


def _base(entry: _PlanEntry, given: Mapping[str, Any]) -> Plan | None:
    """Returns the level that a plan builds on; without one every field must be there, but those that have defaults."""
    if entry.base is not UNSET:
        with _at("$.base"):
            return level(entry.base, given["low"])
    missing = [name for name in (*_PLAIN, "scale") if name not in _WITH_DEFAULTS and name not in given]
    missing = [name for name in missing if getattr(entry, name) is UNSET]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise PlanError(
            f"at `$`: the plan lacks {', '.join(missing)}; add {them}, or add base = one of {', '.join(LEVELS)} "
            "for what is not named"
        )
    return None


def _scaling(entry: _ScaleEntry | UnsetType, base: Scaling | None) -> Scaling:
    """Returns the scale; of another kind than the base's, it starts from that kind's defaults."""
    given = {} if entry is UNSET else {k: v for k, v in msgspec.structs.asdict(entry).items() if v is not UNSET}
    if base is not None and given.get("kind", base.kind) == base.kind:
        return replace(base, **given)
    if "kind" not in given:
        raise PlanError('the scale has no kind; add kind = "dynamic", "static" or "none"')
    return Scaling(**given)


def _rule(number: int, entry: _RuleEntry) -> Rule:
    with _at(f"$.rules[{number}]"):
        given = entry.policy
        policy = _SHORT[given] if isinstance(given, str) else Policy(given.param, given.compute, given.output)
        return Rule(entry.pattern, policy, entry.buffers, entry.input)


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Adds the path in the file to an error of a value that came from there."""
    try:
        yield
    except HalfstepError as error:
        raise PlanError(f"at `{path}`: {error}") from None


# msgspec's words, and those of plan files
_WORDS = (
    ("Object missing required field", "the table lacks the field"),
    ("object", "table"),
    ("array", "list"),
    ("Expected", "expected"),
)


def _explain(message: str, entries: Mapping[str, Any]) -> str:
    """Returns msgspec's message with the path first, the value that came, and what is known or allowed there."""
    found = re.search(r" - at (`key` in )?`(\$.*)`$", message)  # absent where it is the whole file
    text, path = (message[: found.start()], found[2]) if found else (message, "$")
    unknown = re.search(r"unknown field `(.*)`", text)
    if unknown is not None:
        known = list(_types(path))
        return f"at `{path}`: unknown key {unknown[1]!r}; known are {', '.join(known)}{near_miss(unknown[1], known)}"
    if "invalid enum value" in text.lower():
        parent, _, key = path.rpartition(".")
        allowed = _words(_types(parent)[key])
        value = _value(path, entries)
        return f"at `{path}`: {value!r}; allowed are {', '.join(map(repr, allowed))}{near_miss(value, allowed)}"
    if found and found[1]:
        return f"at `{path}`: a key in it is not text; keys are names, such as 'low'"
    for theirs, ours in _WORDS:
        text = text.replace(theirs, ours)
    return f"at `{path}`: {text}, {_value(path, entries)!r:.60}" if " got " in text else f"at `{path}`: {text}"


def _types(path: str) -> dict[str, Any]:
    """Returns the keys known at a path of a plan file, with their types."""
    return {field.name: field.type for field in msgspec.structs.fields(_KEYS[re.sub(r"\[.*?\]", "[...]", path)])}


def _words(kind: Any) -> list[str]:
    """Returns the words that a type made of Literals allows."""
    return [kind] if isinstance(kind, str) else [word for part in get_args(kind) for word in _words(part)]


def _value(path: str, entries: Any) -> Any:
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        entries = entries[key] if key else entries[int(index)]
    return entries


def load_plan(path: str | os.PathLike[str], *, low: Format | torch.dtype | str | None = None) -> Plan:
    """Returns the plan in a .toml or .json file; `low` is the format where the file names none.

    Raises:
        PlanError: the file is missing, cut short, of another schema or wrong in a field; names the file and the path.
    """
    file = Path(path)
    codec = _codec(file)
    try:
        entries = codec.decode(file.read_bytes())
    except OSError as error:
        raise PlanError(f"plan file {str(file)!r} cannot be read: {error.strerror}; check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"plan file {str(file)!r} is not valid {codec.name} ({error}); was it cut short?") from None
    try:
        return from_dict(entries, low=low)
    except PlanError as error:
        raise PlanError(f"plan file {str(file)!r} {error}") from None


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the plan to a .toml or .json file, replacing an earlier one whole or not at all.

    Raises:
        PlanError: another suffix, or a folder that cannot be written to.
    """
    file = Path(path)
    data = _codec(file).encode(to_dict(plan))
    half = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(data)
        half.replace(file)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise PlanError(f"plan file {str(file)!r} cannot be written: {error.strerror}; check the folder") from None


@dataclass(frozen=True)
class _Codec:
    name: str
    decode: Callable[[bytes], Any]
    encode: Callable[[dict[str, Any]], bytes]


_CODECS: Mapping[str, _Codec] = {
    ".toml": _Codec("TOML", msgspec.toml.decode, msgspec.toml.encode),
    ".json": _Codec("JSON", msgspec.json.decode, lambda entries: msgspec.json.format(msgspec.json.encode(entries))),
}


def _codec(file: Path) -> _Codec:
    codec = _CODECS.get(file.suffix.lower())
    if codec is None:
        raise PlanError(f"plan file {str(file)!r} has suffix {file.suffix!r}; name it {' or '.join(_CODECS)}")
    return codec
