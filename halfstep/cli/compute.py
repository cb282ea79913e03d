"""`halfstep bench matmul` and `halfstep bench memory`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halfstep.bench.compute import matrix_products, memory_by_format
from halfstep.cli.options import check_page, write_json, write_page
from halfstep.cli.screen import stderr, stdout
from halfstep.machine import read_machine
from halfstep.report import compute
from halfstep.report.json import to_json
from halfstep.report.tables import plain_table

# What measures, then the table, the sentence and the charts of what it returns.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., str], Callable[..., Any]]] = {
    "matmul": (matrix_products, compute.products_rows, compute.products_headline, compute.products_charts),
    "memory": (memory_by_format, compute.memory_rows, compute.memory_headline, compute.memory_charts),
}


def run_compute(name: str, device: torch.device, *, command: str, json: Path | None, page: Path | None) -> None:
    """Measures what formats cost without training, and prints a table with a one-sentence summary."""
    measure, rows_of, headline_of, charts_of = KINDS[name]
    check_page(page, json)
    with stderr().status("starting") as status:
        found = measure(device, progress=status.update)
    header, rows = rows_of(found)
    stdout().print(plain_table(header, rows), "", headline_of(found), sep="\n")
    machine = read_machine(device)
    if json is not None:
        write_json(json, to_json({"command": command, "machine": machine, "rows": found}))
    if page is not None:
        facts = [("command", command), ("machine", f"{machine.device}, {machine.processor}"),
                 ("threads", str(machine.threads)), ("torch", machine.torch)]  # fmt: skip
        write_page(page, command, headline_of(found), (header, rows), charts_of(found), notes=[], facts=facts)
