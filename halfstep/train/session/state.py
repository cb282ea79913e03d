"""Checks that a session state, as loaded from a checkpoint, is complete and belongs to the session's plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from halfstep.errors import HalfstepError, StateError
from halfstep.pages import TRAINERS, more
from halfstep.plan.io import from_dict, to_dict
from halfstep.plan.plan import Plan
from halfstep.validate import check_entries

STATE_SCHEMA = 2
_READ = (1, STATE_SCHEMA)  # 1 is of 0.1, whose plans had fewer fields
_DEFAULTS = {each.name: each.default for each in fields(Plan) if isinstance(each.default, str)}
# What may differ: checkpoints hold the states that these fields are about in fp32, and earlier schemas are read.
_FREE = ("moments", "full_moments", "rounding", "schema")
_LOSS_ID = re.compile("0|[1-9][0-9]{0,17}")  # as `str` writes it: other digits would name one loss twice


def check_state(state: dict[str, Any], plan: dict[str, Any]) -> None:
    """Refuses a session state that is incomplete or belongs to another plan than `plan` (a dict)."""
    instead = "pass what session.state_dict() returned (or was the file cut short?)"
    needed, also = ("schema", "plan", "steps", "skipped", "scales"), ("losses", "emulate", "bad_losses")
    check_entries("the session state", state, needed, also=also, instead=instead)
    counts = dict.fromkeys(("schema", "steps", "skipped", "losses", "bad_losses"), int)
    kinds = {"plan": dict, "scales": dict, "emulate": bool, **counts}
    for key, kind in kinds.items():
        value, least = state.get(key, kind()), key == "schema"  # the first states had fewer
        if type(value) is not kind or (isinstance(value, int) and not least <= value < 2**63):
            wanted = {int: "a count" + " from 1 on" * least, bool: "True or False"}.get(kind, "a dict")
            raise StateError(f"session state: {key} is {value!r:.60}; expected {wanted}: {instead}")
    for key, value in state["scales"].items():
        if not (isinstance(key, str) and _LOSS_ID.fullmatch(key) and isinstance(value, dict)):
            raise StateError(
                f"session state: scales has {key!r:.40}: {value!r:.60}; each key must be a loss id, such as '0', and "
                "each value a dict: load what session.state_dict() returned"
            )
    if len(state["scales"]) < state.get("losses", 0):
        raise StateError(
            f"this session state has the loss scales of only {len(state['scales'])} of {state['losses']} losses: "
            "torch.distributed.checkpoint loads only the entries that a new state has, which are those of loss 0. Save "
            'the state as one value, "session": json.dumps(session.state_dict()), and load it with json.loads'
        )
    if state["schema"] not in _READ:
        raise StateError(
            f"session state has schema {state['schema']!r}; this halfstep reads schemas 1 to {STATE_SCHEMA}: load it "
            "with the version that saved it, or leave it out: weights and optimizer states load without it"
        )
    strange = next((key for key, value in state["plan"].items() if not _is_plain(value)), None)
    if strange is not None:
        raise StateError(
            f"session state: plan has {strange!r:.40}: {state['plan'][strange]!r:.60}; expected only numbers, text, "
            "True, False, None, and dicts or lists of these"
        )
    there = state["plan"]
    with suppress(HalfstepError):  # no plan of today is compared as it is
        there = to_dict(from_dict(there))  # its parts may lack fields that their version had not
    keys = sorted(plan.keys() | there.keys(), key=str)
    differing = [key for key in keys if _differs(key, there, plan)]
    if differing:
        which = "; ".join(words for key in differing for words in _apart(key, there.get(key), plan.get(key)))
        raise StateError(
            "this session state belongs to another plan; initialize with that plan, or do not load the session state: "
            "model and optimizer states load under any plan, only the loss scale and counters restart. These fields "
            f"differ: {which}; in trainers, {more(TRAINERS)}"
        )


def _apart(key: str, there: Any, here: Any) -> Iterator[str]:
    """Yields the words for each entry in which two values of a plan's field differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys((*there, *here)):
            yield from _apart(f"{key}.{name}", there.get(name), here.get(name))
    elif isinstance(there, list) and isinstance(here, list):
        for where, only in (("in the state", (there, here)), ("here", (here, there))):
            yield from (f"{key} has {each!r:.200} only {where}" for each in only[0] if each not in only[1])
        if sorted(map(repr, there)) == sorted(map(repr, here)) and there != here:
            yield f"{key} are in another order"
    elif there != here:
        yield f"{key} is {there!r:.200} in the state, {here!r:.200} here"


def _differs(key: str, there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Returns whether two plans, as dicts, train differently because of the field `key`."""
    # The masters "copy" and "split" do not count as different, because both hold the same values. A field that the
    # state lacks, because its version had none, or that is None, as a version had it for the level's choice, has its
    # default.
    value = there.get(key)
    values = _DEFAULTS.get(key) if value is None else value, here.get(key)
    same = key in _FREE or (key == "master" and values in (("copy", "split"), ("split", "copy")))
    return values[0] != values[1] and not same


def _is_plain(value: Any) -> bool:
    """Returns whether a value consists only of dicts, lists, tuples, str, numbers, bool and None, like plan dicts."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)
