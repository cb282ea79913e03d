"""The findings of a check as text."""

from halfstep.edits import FULL, Rule
from halfstep.explain.report.step import check_text
from halfstep.records import Finding

ERROR = Finding("error", "mixed formats", "a.b", "[seen] it", "do that", (Rule("a.b", FULL),))
NOTE = Finding("note", "no loss scale", "O3", "lost", "take one")


def test_each_finding_has_place_evidence_advice_and_edits():
    lines = check_text([ERROR, NOTE], what="it").plain.splitlines()
    assert lines[0] == "it: 1 error, 1 note"
    assert lines[2:6] == [
        "error: mixed formats at a.b",
        "  seen: [seen] it",
        "  do:   do that",
        "  edit: Rule('a.b', FULL)",
    ]
    assert lines[7] == "note: no loss scale at O3"


def test_edits_that_the_advice_spells_out_are_printed_once():
    finding = Finding("warning", "x", "a", "seen", "plan.edit(Rule('a', FULL)): it runs", (Rule("a", FULL),))
    assert check_text([finding], what="it").plain.count("Rule('a', FULL)") == 1


def test_counts_and_nothing():
    assert check_text([NOTE, NOTE], what="it").plain.startswith("it: 2 notes\n")
    assert check_text([], what="it").plain == "it: nothing found"
