"""What was measured on a processor, the same in all processes of a run."""

from __future__ import annotations

import json
from dataclasses import replace

from halfstep.machine import DeviceFacts
from halfstep.processes.shards import group_is_open
from halfstep.torch_internals import default_store

_KEY = "halfstep/processor"


def agreed(facts: DeviceFacts) -> DeviceFacts:
    """Returns the facts of a CPU with the measurements of the process of this run that asked first."""
    if facts.kind != "cpu" or not group_is_open():
        return facts
    row = facts.processor
    own = json.dumps([row.bf16, row.fp16, row.wide_backward])
    try:
        found = default_store().compare_set(_KEY, "", own).decode()
    except (RuntimeError, NotImplementedError):  # the process that keeps the store has ended, or it compares nothing
        return facts
    if found == own:
        return facts
    bf16, fp16, wide = json.loads(found)
    source = f"measured in another process of this run; {row.source}"
    limits = tuple((width, length) for width, length in wide)
    return replace(facts, processor=replace(row, bf16=bf16, fp16=fp16, wide_backward=limits, source=source))
