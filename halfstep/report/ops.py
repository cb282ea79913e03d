"""The op table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.table import Table

from halfstep.plan.optable import Action, Row

WORDS: Mapping[Action | None, str] = {
    "low": "low",
    "full": "fp32",
    "promote": "widest input",
    "norm": "fp32 where formats mix",
    "refuse": "refused on low",
    "pass": "as stored",
    "infer": "as its inputs",
    None: "as written",
}


def op_table(
    rows: Iterable[Row], *, plan: str, actions: Mapping[str, Action], note: Callable[[Row, str], str]
) -> Table:
    """Returns a row an op: its category, why, whose list it is from, what `plan` does to it, and who carries it out.

    `actions` is what the plan does by overload; `note` says who carries a row out on "cpu" and on "cuda".
    """
    table = Table("op", "category", "why", "list of", f"at {plan}", "on cpu by", "on cuda by", box=None, padding=(0, 1))
    for row in rows:
        did = dict.fromkeys(WORDS[actions.get(overload)] for overload in row.overloads)
        table.add_row(row.op, row.category, row.why, row.source, ", ".join(did), note(row, "cpu"), note(row, "cuda"))
    return table
