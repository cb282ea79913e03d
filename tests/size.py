"""Counts the lines, statements and files of each room of the house, and holds them against the budget in size.toml.

    python tests/size.py            a table; exit code 1 where a room is over its budget
    python tests/size.py --lower    lowers the budget of each room that has become smaller; never raises one

A room is a folder of `halfstep/`, and each folder of train, explain and lab is counted for itself too; files outside of
folders are the room "base", all tests are "tests". Statements
are counted by Python's own parser, without docstrings, since lines can be had by longer lines; C++ has lines alone.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import tomli_w
from rich.console import Console
from rich.table import Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOUSE = Path(__file__).resolve().parents[1]
BUDGET = HOUSE / "size.toml"
KINDS = ("lines", "statements", "files")
SPLIT = ("train", "explain", "lab")
SUFFIXES = (".py", ".cpp", ".h", ".js", ".css", ".html")

Size = dict[str, int]


def statements(text: str) -> int:
    """Returns how many statements a Python file has, without docstrings.

    >>> statements('"A docstring."' + chr(10) + "if x:" + chr(10) + "    y = 1; z = 2")
    3
    """
    nodes = list(ast.walk(ast.parse(text)))
    holders = [n for n in nodes if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    return sum(isinstance(n, ast.stmt) for n in nodes) - sum(ast.get_docstring(n) is not None for n in holders)


def rooms(house: Path) -> Iterator[tuple[list[str], Path]]:
    """Yields each source file of a checkout with the names that it is counted under."""
    for path in sorted((house / "halfstep").rglob("*")):
        if path.suffix in SUFFIXES:
            folders = path.relative_to(house / "halfstep").parts[:-1]
            names = [folders[0] if folders else "base", "halfstep"]
            yield names + ["/".join(folders[:2])] * (len(folders) > 1 and folders[0] in SPLIT), path
    for path in sorted((house / "tests").rglob("*.py")):
        yield ["tests"], path


def count(house: Path) -> dict[str, Size]:
    """Returns lines, statements and files of each room, and of all of `halfstep/`."""
    found: dict[str, Size] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for names, path in rooms(house):
        text = path.read_text(encoding="utf-8")
        counted = text.count("\n"), statements(text) if path.suffix == ".py" else 0, 1
        for name in names:
            for kind, number in zip(KINDS, counted, strict=True):
                found[name][kind] += number
    return dict(found)


def over(found: dict[str, Size], budget: dict[str, Size]) -> list[str]:
    """Returns a sentence for each room that has more than its budget allows, or that has none."""
    said = [f"{room} is not in size.toml" for room in found if room not in budget]
    for room, allowed in budget.items():
        for kind in KINDS:
            has = found.get(room, {}).get(kind, 0)
            if has > allowed[kind]:
                said.append(f"{room} has {has} {kind}, {has - allowed[kind]} more than the {allowed[kind]} allowed")
    return said


def main(arguments: list[str]) -> int:
    """Prints the table; lowers the budget with `--lower`; returns the exit code."""
    if arguments not in ([], ["--lower"]):
        print(f"tests/size.py takes --lower or nothing, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    found, budget = count(HOUSE), tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    table = Table("room", *(f"{kind} / allowed" for kind in KINDS))
    for room, size in sorted(found.items(), key=lambda item: item[1]["lines"]):
        table.add_row(room, *(f"{size[kind]} / {budget.get(room, {}).get(kind, '-')}" for kind in KINDS))
    Console().print(table)
    problems = over(found, budget)
    for problem in problems:
        print(f"size: {problem}; take something out, or name what a feature needs in size.toml", file=sys.stderr)
    if arguments and not problems:
        lower = {room: {kind: min(size[kind], budget[room][kind]) for kind in KINDS} for room, size in found.items()}
        head = BUDGET.read_text(encoding="utf-8").partition("[")[0]
        BUDGET.write_text(head + tomli_w.dumps(dict(sorted(lower.items()))), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
