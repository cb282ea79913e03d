"""What proves that deleted tests are not missed: mutants, the fork they run in, and which rows of a grid are fast."""

import ast
import importlib.util
import itertools
import os
import select
import subprocess
from types import SimpleNamespace

import pytest

from tests import conftest, mutants

SIGNS = ["<,<=", ">,>=", "==,!=", "is,is not", "in,not in", "and,or", "+,-", "*,/"]
SWAPS = [(f"a {x} b", f"a {y} b") for each in SIGNS for x, y in itertools.permutations(each.split(","))]
MODULE = """
def less(a, b):
    return a < b

class Pair:
    @staticmethod
    def less(a, b):
        return a < b
"""


@pytest.mark.parametrize(
    ("code", "what", "changed"),
    [
        ("if a:\n    b", "condition negated", "if not a:\n    b"),
        ("while a:\n    b", "condition negated", "while not a:\n    b"),
        ("a if b else c", "condition negated", "a if not b else c"),
        ("[a for a in b if c]", "condition negated", "[a for a in b if not c]"),
        *((code, "swapped", changed) for code, changed in SWAPS),
        ("a // b", "operator swapped", "a * b"),
        ("a += b", "operator swapped", "a -= b"),
        ("return a", "return None", "return None"),
        ("a(b)", "call left out", "None"),
        *((code, "", "") for code in ("return", "return None", "a = b(c)", "a", "[a for a in b]", "a @ b")),
    ],
)
def test_each_change_is_named_and_made_alone(code, what, changed):
    tree = ast.parse("\n" + code)
    found = list(mutants.changes(tree))
    assert len(found) == bool(what)
    for line, name, change in found:
        change()
        assert (line, ast.unparse(ast.fix_missing_locations(tree))) == (2, changed)
        assert what in name


@pytest.mark.slow
def test_a_mutant_takes_the_place_of_one_living_function(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "HOUSE", tmp_path)
    (tmp_path / "pair.py").write_text(MODULE)
    swap = {"file": "pair.py", "function": "Pair.less", "at": 1, "what": "comparison swapped"}
    assert not mutants.apply(swap)  # nobody has imported it
    spec = importlib.util.spec_from_file_location("pair", tmp_path / "pair.py")
    spec.loader.exec_module(pair := importlib.util.module_from_spec(spec))
    for gone in ({"what": "return None"}, {"at": 2}, {"function": "Pair.more"}):
        assert not mutants.apply(swap | gone)
    conftest.freeze()
    assert mutants.apply(swap)
    assert [pair.Pair.less(1, 1), pair.less(1, 1)] == [True, False]
    conftest.freeze()


def test_a_fork_answers_in_silence_and_is_killed_with_all_that_it_started(capfd):
    assert mutants._forked(lambda answer: answer("test_a") or os.write(1, b"loud"), 30) == "test_a"
    assert mutants._forked(lambda answer: None, 30) == ""
    assert mutants._forked(lambda answer: os._exit(3), 30) == "crash"
    assert capfd.readouterr() == ("", "")
    assert mutants._forked(lambda answer: answer.lost, 30) == ""
    assert "AttributeError" in capfd.readouterr().err
    read, write = os.pipe()
    sleep = lambda answer: subprocess.Popen(["sleep", "20"], pass_fds=[write]).wait(2)  # noqa: E731
    assert mutants._forked(sleep, 0.5) == "time"
    os.close(write)
    assert select.select([read], [], [], 5)[0]  # nobody holds the other end
    os.close(read)


def test_the_rows_of_a_grid_that_bring_no_new_value_are_slow():
    marks = [SimpleNamespace(args=[names]) for names in ("one, two", ["three"])]
    rows = []
    for a, c in itertools.product(("a1", "a2"), ("c1", "c2", "c3")):
        call = SimpleNamespace(params={"five": "b", "four": "b", "three": c, "two": "b", "one": a})
        item = SimpleNamespace(callspec=call, iter_markers=lambda name: marks)
        rows.append((a + c, conftest.values_of(item)))
    assert [len(each) for _, each in rows] == [4] * 6  # the pair of one and two, three, and two fixtures
    assert conftest.more_than_each_value(rows) == ["a1c2", "a2c1", "a2c3"]
