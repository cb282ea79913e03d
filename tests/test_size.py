"""The budget of the house: what is counted, and what is over."""

from pathlib import Path

import pytest

import tests.size as size
from tests.size import HOUSE, count, over, statements

ALLOWED = {"cast": {"lines": 10, "statements": 5, "files": 1}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ('"Doc."\n', 0),
        ("a = 1\nb = 2; c = 3\n", 3),
        ('def f():\n    "Doc."\n    return 1\n', 2),
        ('class C:\n    """Doc."""\n\n    def f(self):\n        if self:\n            return 1\n', 4),
    ],
)
def test_statements_are_counted_without_docstrings(text: str, expected: int) -> None:
    assert statements(text) == expected


def test_a_room_at_its_budget_passes_and_one_more_of_anything_does_not() -> None:
    assert over(ALLOWED, ALLOWED) == []
    for kind in ALLOWED["cast"]:
        more = {"cast": {**ALLOWED["cast"], kind: ALLOWED["cast"][kind] + 1}}
        (said,) = over(more, ALLOWED)
        assert f"1 more than the {ALLOWED['cast'][kind]} allowed" in said


def test_a_room_without_a_budget_is_named() -> None:
    assert over({"new": {"lines": 1, "statements": 1, "files": 1}}, {}) == ["new is not in size.toml"]


def test_a_checkout_is_counted_by_room(tmp_path: Path) -> None:
    for name, text in (
        ("halfstep/a.py", "x = 1\n"),
        ("halfstep/train/cast/b.py", "y = 1\nz = 2\n"),
        ("tests/c.py", "\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count(tmp_path) == {
        "base": {"lines": 1, "statements": 1, "files": 1},
        "train": {"lines": 2, "statements": 2, "files": 1},
        "train/cast": {"lines": 2, "statements": 2, "files": 1},
        "halfstep": {"lines": 3, "statements": 3, "files": 2},
        "tests": {"lines": 1, "statements": 0, "files": 1},
    }


def test_every_room_has_a_budget() -> None:
    budget = size.tomllib.loads((HOUSE / "size.toml").read_text())
    assert set(budget) == {name for names, _ in size.rooms(HOUSE) for name in names}
