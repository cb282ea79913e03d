"""Plans as plain dicts and as TOML or JSON files, with a schema version; what a user passes as a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import torch

from halfstep.edits import FULL, LOW, Edit, OpChange, OpChanges, Policy, Rule, Scaling
from halfstep.errors import HalfstepError, PlanError
from halfstep.formats import BF16, LOW_FORMATS, Format, as_format, for_products
from halfstep.machine import DeviceFacts, emulation_notice, needs_emulation, units
from halfstep.pages import PLANS, more
from halfstep.plan.levels import LEVELS, customize, level
from halfstep.plan.optable import check_op_changes
from halfstep.plan.plan import Plan
from halfstep.saved import replace_file
from halfstep.validate import file_path, instance, near_miss, one_of, with_near_misses

SCHEMA = 2
READ = (1, SCHEMA)  # 1 is of 0.1, whose plans had fewer fields
_SHORT: Mapping[str, Policy] = {"full": FULL, "low": LOW}
_EDITS: Mapping[str, type[Edit]] = {"rule": Rule, "op_change": OpChange, "scale": Scaling}
_TABLES = (Plan, OpChanges, Rule, Policy, OpChange, Scaling)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Returns the plan as a dict of strings, numbers, lists and dicts, with every field and the schema version."""
    return {"schema": SCHEMA, **_entries(plan)}


def _entries(value: Any) -> Any:
    if isinstance(value, Format):
        return value.name
    if isinstance(value, tuple):
        return [_entries(each) for each in value]
    if type(value) not in _TABLES:
        return value
    short = next((name for name, each in _SHORT.items() if each == value), None)
    found = {each.name: _entries(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Policy) and value.products == "plan":  # as the files of versions that had no such field
        del found["products"]
    return short or found


def edit_to_dict(edit: Edit) -> dict[str, Any]:
    """Returns an edit as a dict of strings and numbers, as in a plan file; its entry `edit` names the kind of edit.

    >>> edit_to_dict(OpChange("deny", "softmax"))
    {'edit': 'op_change', 'list': 'deny', 'op': 'softmax'}
    """
    return {"edit": next(name for name, kind in _EDITS.items() if isinstance(edit, kind)), **_entries(edit)}


@with_near_misses
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
        given = dict(_mapping("$", entries))
        name = given.pop("edit", None)
        one_of("its entry `edit`", name, tuple(_EDITS))
        edit: Edit = _made(_EDITS[name], given, "$")
        return edit
    except PlanError as error:
        use = "pass one entry of a `cure`, as `halfstep check --json` and run logs hold them"
        raise PlanError(f"{entries!r:.80} is not an edit ({error}); {use}") from None


def from_dict(entries: Mapping[str, Any], *, low: Format | torch.dtype | str | None = None) -> Plan:
    """Returns the plan that a dict describes; does not change the dict."""
    given = dict(_mapping("$", entries))
    _check_schema(given.pop("schema", None))
    base = given.pop("base", None)
    _check_keys(Plan, given, "$", also=("schema", "base"))
    given["low"] = _low(given, low)
    if base is None:
        needed = [each.name for each in fields(Plan) if each.default is MISSING and each.default_factory is MISSING]
        missing = [name for name in needed if name not in given]
        if missing:
            raise PlanError(
                f"at the top level: the plan lacks {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}, "
                f"or add base = one of {', '.join(LEVELS)} for the fields that are missing"
            )
    else:
        with _at("$.base"):
            start = _entries(level(base, given["low"]))
        scale = given.get("scale", {})
        if isinstance(scale, Mapping) and scale.get("kind", start["scale"]["kind"]) == start["scale"]["kind"]:
            start["scale"] |= scale
            given.pop("scale", None)
        given = start | given
    plan: Plan = _made(Plan, given, "$")
    with _at("$.op_changes"):
        check_op_changes(plan.op_changes)
    return plan


def _check_schema(schema: object) -> None:
    # This is checked first, because another version may have other keys.
    if schema is None:
        raise PlanError(f"at `$.schema`: the plan has no schema version; add schema = {SCHEMA}")
    if type(schema) is not int or schema not in READ:
        raise PlanError(
            f"at `$.schema`: the plan has schema {schema!r}, but this halfstep reads schemas up to {SCHEMA}; "
            "update halfstep, or save the plan again with this version"
        )


def _low(given: Mapping[str, Any], low: Format | torch.dtype | str | None) -> str:
    if "low" in given:
        with _at("$"):
            one_of("plan low", given["low"], tuple(each.name for each in LOW_FORMATS), hint=for_products(given["low"]))
        return str(given["low"])
    if low is None:
        raise PlanError(
            "at `$.low`: the plan names no low-precision format; add "
            + " or ".join(f'low = "{fmt}"' for fmt in LOW_FORMATS)
        )
    return as_format(low, LOW_FORMATS).name


def _made(kind: Any, entries: Any, path: str) -> Any:
    """Returns the object of a dataclass that a table of a plan file describes; the class checks its own fields."""
    if kind is Policy and isinstance(entries, str):
        with _at(path):
            one_of("policy", entries, tuple(_SHORT))
        return _SHORT[entries]
    given = {}
    _check_keys(kind, _mapping(path, entries), path)
    for each in fields(kind):
        if each.name in entries:
            given[each.name] = _value(get_type_hints(kind)[each.name], entries[each.name], f"{path}.{each.name}")
        elif each.default is MISSING and each.default_factory is MISSING:
            raise PlanError(f"{_place(path)}: the table lacks the field `{each.name}`")
    with _at(path):
        return kind(**given)


def _value(kind: Any, given: Any, path: str) -> Any:
    if kind in _TABLES:
        return _made(kind, given, path)
    if get_origin(kind) is not tuple:
        return given
    if not isinstance(given, (list, tuple)):
        raise PlanError(f"{_place(path)}: expected a list, got {type(given).__name__}: {given!r:.60}")
    return tuple(_value(get_args(kind)[0], each, f"{path}[{number}]") for number, each in enumerate(given))


def _mapping(path: str, entries: Any) -> Mapping[Any, Any]:
    if not isinstance(entries, Mapping):
        raise PlanError(f"{_place(path)}: expected a table of fields, got {type(entries).__name__}: {entries!r:.40}")
    return entries


def _check_keys(kind: type, entries: Mapping[Any, Any], path: str, also: tuple[str, ...] = ()) -> None:
    known = (*also, *(each.name for each in fields(kind)))
    for key in entries:
        if not isinstance(key, str):
            raise PlanError(f"{_place(path)}: a key is not text; expected names, such as 'low'")
        if key not in known:
            raise PlanError(
                f"{_place(path)}: unknown key {key!r}; expected one of {', '.join(known)}"
                f"{near_miss('base' if key == 'level' else key, known)}"
            )


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Adds the path in the file to an error about the value at that path."""
    try:
        yield
    except HalfstepError as error:
        raise PlanError(f"{_place(path)}: {error}") from None


def _place(path: str) -> str:
    return "at the top level" if path == "$" else f"at `{path}`"


@with_near_misses
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
        language = file.suffix[1:].upper()
        raise PlanError(f"plan file {str(file)!r} is not valid {language} ({error}); was it cut short?") from None
    try:
        return from_dict(entries, low=low)
    except PlanError as error:
        raise PlanError(f"plan file {str(file)!r} {error}; {more(PLANS)}") from None


@with_near_misses
def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the plan to a .toml or .json file; an existing file is replaced as a whole or not at all.

    Raises:
        PlanError: `plan` is not a Plan, the path has another suffix, or the folder cannot be written to.
    """
    instance("plan", plan, Plan, "halfstep.level('O2', 'bf16')")
    file = file_path("plan file", path)
    codec = _codec(file)
    data = codec.encode(to_dict(plan))
    data = msgspec.json.format(data) if codec is msgspec.json else data
    try:
        replace_file(file, data)
    except OSError as error:
        raise PlanError(f"plan file {str(file)!r} cannot be written: {error.strerror}; check the folder") from None


def choose_plan(
    plan: Plan | str, low: Format | torch.dtype | str | None, facts: DeviceFacts
) -> tuple[Plan, str | None]:
    """Returns the plan for a level, a Plan or a plan file, and a notice if the device decided its format."""
    wanted = None if low is None else as_format(low, LOW_FORMATS)
    if isinstance(plan, Plan):
        return (plan if wanted is None else customize(plan, low=wanted)), None
    if not isinstance(plan, (str, os.PathLike)):
        raise PlanError(
            f"plan is {plan!r:.80}; expected a level ({', '.join(LEVELS)}), a Plan or the path of a plan file"
        )
    name = os.fspath(plan)
    picked, notice = choose_low(facts) if wanted is None else (wanted, None)
    if not name.endswith((".toml", ".json")):
        chosen = level(name, picked)
        return chosen, None if chosen.ops == "none" else notice
    loaded = load_plan(name, low=picked)
    if wanted is not None:
        return customize(loaded, low=wanted), None
    names_its_own = load_plan(name, low=next(fmt for fmt in LOW_FORMATS if fmt is not picked)).low is loaded.low
    return loaded, None if names_its_own or loaded.ops == "none" else notice


def choose_low(facts: DeviceFacts) -> tuple[Format, str]:
    """Returns the low-precision format for a device, bf16 if possible and else fp16, and a notice that names it."""
    for fmt in LOW_FORMATS:
        found = units(fmt, facts)
        if found is not None:
            return fmt, f"low is not set; using {fmt}, which this device computes in hardware ({found})"
    if needs_emulation(BF16, facts):
        return BF16, f"low is not set; using {BF16}; {emulation_notice(BF16, facts)}"
    return BF16, (
        f"low is not set; using {BF16}, for which this device ({facts}) has no units: "
        "training at level O0 would be faster"
    )


def _codec(file: Path) -> ModuleType:
    codecs = {".toml": msgspec.toml, ".json": msgspec.json}
    if file.suffix.lower() not in codecs:
        raise PlanError(f"plan file {str(file)!r} has suffix {file.suffix!r}; expected {' or '.join(codecs)}")
    return codecs[file.suffix.lower()]
