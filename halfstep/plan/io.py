"""Plans as plain dicts and as TOML or JSON files, with a schema version."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_type_hints

import msgspec
import torch
from msgspec import UNSET, Struct, UnsetType

from halfstep.edits import FULL, LOW, Edit, OpChange, OpChanges, Policy, Rule, Scaling
from halfstep.errors import HalfstepError, PlanError
from halfstep.formats import Format, as_format
from halfstep.pages import PLANS, more
from halfstep.plan.levels import LEVELS, level
from halfstep.plan.opnames import check_op_changes
from halfstep.plan.plan import Plan
from halfstep.validate import file_path, instance, near_miss

SCHEMA = 1
_SHORT: Mapping[str, Policy] = {"full": FULL, "low": LOW}


def _table(of: type, changed: Mapping[str, Any] | None = None, **options: Any) -> type[Struct]:
    """Returns the Struct type that describes an object of class `of` (such as a Rule) as a table in a plan file.

    The table has the fields of the class. `changed` maps names to types, for fields that have another type in the file
    or exist only there. Fields with a default may be left out; unknown fields are an error. `options` are options of
    `msgspec.defstruct`.
    """
    optional = {each.name for each in fields(of) if each.default is not MISSING or each.default_factory is not MISSING}
    hints, changed = get_type_hints(of), dict(changed or {})
    kinds = {name: kind for name, kind in changed.items() if name not in hints} | hints | changed
    given = [(k, Union[v, UnsetType], UNSET) if k in optional else (k, v) for k, v in kinds.items()]  # noqa: UP007
    return msgspec.defstruct(of.__name__, given, forbid_unknown_fields=True, kw_only=True, **options)


def _partial(table: type[Struct]) -> type[Struct]:
    """Returns the Struct type `table` with all fields optional: a plan file with a `base` may leave out any field."""
    given = [(each.name, Union[each.type, UnsetType], UNSET) for each in msgspec.structs.fields(table)]  # noqa: UP007
    return msgspec.defstruct(table.__name__, given, forbid_unknown_fields=True, kw_only=True)


_POLICY = _table(Policy)
_IN_RULES = {"policy": Union[Literal["full", "low"], _POLICY]}  # noqa: UP007
_RULE = _table(Rule, _IN_RULES)
_SCALE = _partial(_table(Scaling))
_OPS = _table(OpChanges)
_PLAN = _partial(
    _table(
        Plan,
        {
            "schema": int,
            "base": str,
            "low": Literal["bf16", "fp16"],
            "scale": _SCALE,
            "op_changes": _OPS,
            "rules": tuple[_RULE, ...],  # type: ignore[valid-type]  # a type made of the Rule's fields
        },
    )
)
_KEYS: Mapping[str, type[Struct]] = {
    "$": _PLAN,
    "$.scale": _SCALE,
    "$.op_changes": _OPS,
    "$.rules[...]": _RULE,
    "$.rules[...].policy": _POLICY,
}
# An edit on its own says which it is.
_EDITS: Mapping[type[Edit], type[Struct]] = {
    Rule: _table(Rule, _IN_RULES, tag_field="edit", tag="rule"),
    OpChange: _table(OpChange, tag_field="edit", tag="op_change"),
    Scaling: _table(Scaling, tag_field="edit", tag="scale"),
}


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as a dict of strings, numbers, lists and dicts, with every field and the schema version.

    >>> to_dict(level("O2", "bf16"))["master"]
    'split'
    """
    return {"schema": SCHEMA, **_entries(plan)}


def _entries(value: Any) -> Any:
    """Returns a value, such as a plan or a rule, as a plan file has it: as dicts, lists, names and numbers."""
    match value:
        case Format():
            return value.name
        case Policy() if value in _SHORT.values():
            return next(name for name, each in _SHORT.items() if each == value)
        case tuple():
            return [_entries(each) for each in value]
        case Plan() | OpChanges() | Rule() | Policy() | OpChange() | Scaling():
            return {each.name: _entries(getattr(value, each.name)) for each in fields(value)}
    return value


def edit_to_dict(edit: Edit) -> dict[str, Any]:
    """Returns an edit as a dict of strings and numbers, as in a plan file; its entry `edit` names the kind of edit.

    >>> edit_to_dict(OpChange("deny", "softmax"))
    {'edit': 'op_change', 'list': 'deny', 'op': 'softmax'}
    """
    table = next(table for kind, table in _EDITS.items() if isinstance(edit, kind))
    return {"edit": table.__struct_config__.tag, **_entries(edit)}


def edit_from_dict(entries: Mapping[str, Any]) -> Edit:
    """Returns the edit that a dict describes, such as an entry of a `cure` in JSON or in a log; for `plan.edit`.

    The dict is not changed. Its entry `edit` is "rule", "op_change" or "scale"; the others are the fields of a Rule,
    OpChange or Scaling, as in a plan file.

    >>> edit_from_dict({"edit": "op_change", "list": "deny", "op": "softmax"})
    OpChange('deny', 'softmax')

    Raises:
        PlanError: the dict does not describe an edit.
    """
    try:
        entry = msgspec.convert(entries, Union[tuple(_EDITS.values())])  # noqa: UP007
    except msgspec.ValidationError as error:
        raise PlanError(
            f"{entries!r:.80} is not an edit ({_in_our_words(str(error))}); pass one entry of a `cure`, as "
            "`halfstep check --json` and run logs hold them"
        ) from None
    kind = next(kind for kind, table in _EDITS.items() if isinstance(entry, table))
    return _rule(_given(entry)) if kind is Rule else kind(**_given(entry))


def _given(table: Any) -> dict[str, Any]:
    """Returns a dict of the fields that are set in a table of a plan file."""
    return {key: value for key, value in msgspec.structs.asdict(table).items() if value is not UNSET}


def from_dict(entries: Mapping[str, Any], *, low: Format | torch.dtype | str | None = None) -> Plan:
    """Returns the plan that a dict describes; does not change the dict.

    The dict has all fields, as made by `to_dict`, or a level as `base`, from which missing fields are taken. `low` is
    the format if the dict names none.

    Raises:
        PlanError: an unknown schema or key, a wrong type, a missing field, or a contradiction; the message names the
            path of the entry in the dict.
    """
    _check_schema(entries)
    try:
        given = _given(msgspec.convert(entries, _PLAN))
    except msgspec.ValidationError as error:
        raise PlanError(_explain(str(error), entries)) from None
    del given["schema"]
    given["low"] = _low(given, low)
    base = _base(given)
    with _at("$.scale"):
        given["scale"] = _scaling(_given(given.get("scale", _SCALE())), None if base is None else base.scale)
    with _at("$.op_changes"):
        given["op_changes"] = OpChanges(**_given(given.get("op_changes", _OPS())))
        check_op_changes(given["op_changes"])
    given["rules"] = tuple(_numbered(number, rule) for number, rule in enumerate(given.get("rules", ())))
    with _at("$"):
        return Plan(**given) if base is None else replace(base, **given)


def _numbered(number: int, table: Struct) -> Rule:
    with _at(f"$.rules[{number}]"):
        return _rule(_given(table))


def _check_schema(entries: object) -> None:
    """Raises a PlanError if the schema version is not the one that this halfstep reads.

    This is checked first, because another version may have other keys.
    """
    if not isinstance(entries, Mapping):
        raise PlanError(f"at the top level: expected a table of fields, got {type(entries).__name__}: {entries!r:.40}")
    schema = entries.get("schema")
    if schema is None:
        raise PlanError(f"at `$.schema`: the plan has no schema version; add schema = {SCHEMA}")
    if type(schema) is not int or schema != SCHEMA:
        raise PlanError(
            f"at `$.schema`: the plan has schema {schema!r}, but this halfstep reads schema {SCHEMA}; "
            "update halfstep, or save the plan again with this version"
        )


def _low(given: Mapping[str, Any], low: Format | torch.dtype | str | None) -> Format:
    if "low" in given:
        return as_format(given["low"])
    if low is None:
        raise PlanError('at `$.low`: the plan names no low-precision format; add low = "bf16" or low = "fp16"')
    return as_format(low)


def _base(given: dict[str, Any]) -> Plan | None:
    """Removes `base` from the given fields and returns the plan of that level; None if there is no `base`.

    Without a base, no field may be missing.
    """
    if "base" in given:
        with _at("$.base"):
            return level(given.pop("base"), given["low"])
    needed = [each.name for each in fields(Plan) if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in needed if name not in given]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise PlanError(
            f"at the top level: the plan lacks {', '.join(missing)}; add {them}, or add base = one of "
            f"{', '.join(LEVELS)} for the fields that are missing"
        )
    return None


def _scaling(given: Mapping[str, Any], base: Scaling | None) -> Scaling:
    """Returns the loss scale with the given fields.

    Missing fields are those of `base`, or defaults if there is no base or the base is of another kind.
    """
    if base is not None and given.get("kind", base.kind) == base.kind:
        return replace(base, **given)
    if "kind" not in given:
        raise PlanError('the scale has no kind; add kind = "dynamic", "static" or "none"')
    return Scaling(**given)


def _rule(given: dict[str, Any]) -> Rule:
    policy = given["policy"]
    made = _SHORT[policy] if isinstance(policy, str) else Policy(**_given(policy))
    return Rule(**given | {"policy": made})


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Adds the path in the file to an error about the value at that path."""
    try:
        yield
    except HalfstepError as error:
        raise PlanError(f"{_place(path)}: {error}") from None


def _place(path: str) -> str:
    return "at the top level" if path == "$" else f"at `{path}`"


# msgspec's words, and those of plan files
_WORDS = (
    ("Object missing required field", "the table lacks the field"),
    ("object", "table"),
    ("array", "list"),
    ("Expected", "expected"),
)


def _explain(message: str, entries: Mapping[str, Any]) -> str:
    """Returns msgspec's message with the path first, the value that was found, and the keys or values allowed there."""
    found = re.search(r" - at (`key` in )?`(\$.*)`$", message)  # absent where it is the whole file
    text, path = (message[: found.start()], found[2]) if found else (message, "$")
    unknown = re.search(r"unknown field `(.*)`", text)
    if unknown is not None:
        known = list(_types(path))
        return (
            f"{_place(path)}: unknown key {unknown[1]!r}; expected one of {', '.join(known)}"
            f"{near_miss(unknown[1], known)}"
        )
    if "invalid enum value" in text.lower():
        parent, _, key = path.rpartition(".")
        allowed = _words(_types(parent)[key])
        value = _value(path, entries)
        return (
            f"{_place(path)}: got {value!r}, expected one of {', '.join(map(repr, allowed))}{near_miss(value, allowed)}"
        )
    if found and found[1]:
        return f"{_place(path)}: a key is not text; expected names, such as 'low'"
    text = _in_our_words(text)
    return f"{_place(path)}: {text}, {_value(path, entries)!r:.60}" if " got " in text else f"{_place(path)}: {text}"


def _in_our_words(text: str) -> str:
    for theirs, ours in _WORDS:
        text = text.replace(theirs, ours)
    return text


def _types(path: str) -> dict[str, Any]:
    """Returns the keys known at a path of a plan file, with their types."""
    return {field.name: field.type for field in msgspec.structs.fields(_KEYS[re.sub(r"\[.*?\]", "[...]", path)])}


def _words(kind: Any) -> list[str]:
    """Returns the strings that `kind`, a Literal or a union of Literals, allows."""
    return [kind] if isinstance(kind, str) else [word for part in get_args(kind) for word in _words(part)]


def _value(path: str, entries: Any) -> Any:
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        entries = entries[key] if key else entries[int(index)]
    return entries


def load_plan(path: str | os.PathLike[str], *, low: Format | torch.dtype | str | None = None) -> Plan:
    """Returns the plan in a .toml or .json file; `low` is the format if the file names none.

    Raises:
        PlanError: the file is missing or cut short, has another schema version, or has a wrong field; the message names
            the file and the path in it.
    """
    file = file_path("plan file", path)
    codec = _codec(file)
    try:
        entries = codec.decode(file.read_bytes())
    except OSError as error:
        raise PlanError(f"plan file {str(file)!r} cannot be read: {error.strerror}; check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"plan file {str(file)!r} is not valid {codec.name} ({error}); was it cut short?") from None
    try:
        return from_dict(entries, low=low)
    except PlanError as error:
        raise PlanError(f"plan file {str(file)!r} {error}; {more(PLANS)}") from None


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the plan to a .toml or .json file; an existing file is replaced as a whole or not at all.

    Raises:
        PlanError: `plan` is not a Plan, the path has another suffix, or the folder cannot be written to.
    """
    instance("plan", plan, Plan, "halfstep.level('O2', 'bf16')")
    file = file_path("plan file", path)
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
        raise PlanError(f"plan file {str(file)!r} has suffix {file.suffix!r}; expected {' or '.join(_CODECS)}")
    return codec
