"""`halfstep doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from halfstep.cli.options import Device, Json, check_writable, device_of, write_json
from halfstep.cli.screen import stderr, stdout
from halfstep.doctor.doctor import examine
from halfstep.report.doctor import doctor_report
from halfstep.report.json import to_json

Save = Annotated[bool, typer.Option("--save", help="Have later sessions on this machine decide by what is measured.")]


def doctor(device: Device = "auto", json: Json = None, save: Save = False) -> None:
    """Measure what this machine does in each format, and say what to train in; takes half a minute."""
    place = device_of(device)
    check_writable(json)
    with stderr().status("measuring") as status:
        found = examine(place, tell=lambda what: status.update(f"measuring {what}"), keep=save)
    stdout().print(doctor_report(found))
    if json is not None:
        write_json(json, to_json(found))
