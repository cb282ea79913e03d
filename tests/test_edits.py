"""Edits as code for people, and as entries of plan files, JSON and logs: both make an equal edit."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfstep
from halfstep import FULL, LOW, OpChange, PlanError, Policy, Rule, Scaling
from halfstep.edits import OP_LISTS, spell
from halfstep.plan.io import edit_from_dict, edit_to_dict, from_dict, to_dict
from halfstep.plan.levels import level
from tests.plan.strategies import OPS, rules, scalings

EDITS = st.one_of(
    rules("low").filter(len).map(lambda made: made[0]),
    scalings,
    st.builds(OpChange, st.sampled_from(OP_LISTS), st.sampled_from(OPS)),
)


@given(EDITS)
def test_code_and_entries_make_the_edit_again(edit):
    assert eval(repr(edit), vars(halfstep)) == edit
    entries = edit_to_dict(edit)
    assert edit_from_dict(entries) == edit
    assert entries == edit_to_dict(edit), "the dict is left as it is"


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (Rule("head", FULL), "Rule('head', FULL)"),
        (Rule("head", LOW, buffers="low"), "Rule('head', LOW, buffers='low')"),
        (Rule("", Policy("full", "full", "full")), "Rule('', Policy('full', 'full', 'full'))"),
        (OpChange("deny", "exp"), "OpChange('deny', 'exp')"),
        (Scaling("none"), "Scaling('none')"),
        (Scaling("static", init=2.0**24), "Scaling('static', init=16777216)"),
        (Scaling("dynamic", init=1.1, hysteresis=2), "Scaling('dynamic', init=1.1, hysteresis=2)"),
        (Scaling("dynamic", init=2.0**-15, min=2.0**-20), f"Scaling('dynamic', init={2.0**-15!r}, min={2.0**-20!r})"),
    ],
)
def test_an_edit_prints_as_code_with_all_digits_and_without_defaults(edit, code):
    assert repr(edit) == code
    assert spell([edit, edit]) == f"plan.edit({code}, {code})"


@pytest.mark.parametrize(
    ("edit", "where"),
    [(Rule("head", FULL), lambda plan: plan["rules"][-1]), (Scaling("dynamic", init=8.0), lambda plan: plan["scale"])],
)
def test_an_edit_has_the_entries_that_a_plan_file_has(edit, where):
    entries = to_dict(level("O2", "fp16").edit(edit))
    assert edit_to_dict(edit) == {"edit": edit_to_dict(edit)["edit"], **where(entries)}
    assert edit_from_dict(edit_to_dict(edit)) in (from_dict(entries).scale, *from_dict(entries).rules)


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"edit": "plan"},
        {"edit": "rule", "pattern": "head"},
        {"edit": "scale", "init": 2.0},
        {"edit": "op_change", "list": "deny", "op": "exp", "more": 1},
        {"edit": "op_change", "list": "maybe", "op": "exp"},
        {"edit": "scale", "kind": "static", "init": -1.0},
    ],
)
def test_entries_that_are_no_edit_are_refused(entries):
    with pytest.raises(PlanError):
        edit_from_dict(entries)


@pytest.mark.parametrize(
    ("scaling", "active", "adapts", "first"),
    [
        (Scaling("none"), False, False, 1.0),
        (Scaling("static", init=128.0), True, False, 128.0),
        (Scaling("dynamic", init=8.0), True, True, 8.0),
    ],
)
def test_what_is_asked_of_a_scaling_in_place_of_its_kind(scaling, active, adapts, first):
    assert (scaling.active, scaling.adapts, scaling.first) == (active, adapts, first)


def test_kinds_are_told_apart_by_what_scaling_has_and_nowhere_else():
    """A rule of the loss scale that is added has to be looked for in no room that only asks what it does."""
    shown = {"explain/report/html.py", "explain/report/tables.py", "plan/compatibility.py"}  # in sentences
    folder = Path(halfstep.__file__).parent
    asking = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"scal(e|ing)\.kind\b", path.read_text(encoding="utf-8"))
    }
    assert asking == shown | {"train/scale/scaling.py"}
