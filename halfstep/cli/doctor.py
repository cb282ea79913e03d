"""The command `halfstep doctor`, which measures this machine in each format and recommends one."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.options import Device, Json, Quiet, check_writable, device_of, write
from halfstep.cli.screen import activity, stdout
from halfstep.explain.report.doctor import doctor_report
from halfstep.explain.report.lines import to_json
from halfstep.lab.doctor.doctor import examine

Save = Annotated[bool, typer.Option("--save", help="Save the measurements; later sessions on this machine use them.")]


def doctor(device: Device = "auto", json: Json = None, save: Save = False, quiet: Quiet = False) -> None:
    """Measure this machine's speed in each format, and recommend what to train in; takes half a minute."""
    place = device_of(device)
    check_writable(json)
    with activity("measuring", quiet=quiet) as now:
        found = examine(place, tell=lambda what: now(f"measuring {what}"), keep=save)
    stdout().print(doctor_report(found))
    write(json, to_json(found))
