"""`apex.amp.state_dict` and `load_state_dict`: the loss scales, as apex's checkpoints have them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from halfstep.adapters.apex.state import STATE, maybe_print
from halfstep.errors import StateError

_PREFIX = "loss_scaler"


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns each loss scale and the clean steps since its last change, as apex's checkpoints have them.

    It is empty before `initialize` and under `enabled=False`. `destination` is added to and returned.
    """
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(getattr(STATE, "loss_scalers", [])):
        found[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Goes on from what `state_dict` returned, or apex's own; tells of scales that only one side has.

    A scale that is not dynamic stays as `initialize` was asked for.

    Raises:
        RuntimeError: `initialize` was not called, or an entry is none of a loss scale.
        StateError: a loss scale is out of range or incomplete. Nothing is changed in any of these cases.
        TypeError: it is no such state.
    """
    entries = _entries(state_dict)
    if entries and not hasattr(STATE, "opt_properties"):
        raise RuntimeError(
            "amp.load_state_dict was called before amp.initialize, which makes the loss scales: call it after"
        )
    scalers = getattr(STATE, "loss_scalers", [])
    if len(entries) != len(scalers):
        maybe_print(f"Warning: state_dict contains {len(entries)} entries, while {len(scalers)} loss_scalers are used")
    found: dict[int, tuple[float, int]] = {}
    for number, (scale, unskipped) in entries.items():
        if number >= len(scalers):
            maybe_print(f"Skipping loss_scaler[{number}], since num_losses was set to {len(scalers)}")
        elif scalers[number].dynamic:
            maybe_print(f"Restoring loss_scaler[{number}] from loss_scaler{number}")
            found[number] = scale, unskipped
        elif scalers[number].loss_scale() != scale:
            maybe_print(
                f"Skipping loss_scaler{number}: its scale is {scale}, and initialize was asked for another, fixed one"
            )
    if found and STATE._current is not None:
        STATE._current.load(found)


def _entries(state_dict: Any) -> dict[int, tuple[float, int]]:
    """Returns the scale and the clean steps of each loss, by its number."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"amp.load_state_dict was given {type(state_dict).__name__}; give it what amp.state_dict() returned"
        )
    unknown = [str(key) for key in state_dict if not re.fullmatch(_PREFIX + r"\d+", str(key))]
    if unknown:
        raise RuntimeError(f"Unexpected key(s) in amp's state: {', '.join(unknown)}; it has loss_scaler0, 1, ...")
    for key, entry in state_dict.items():
        if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= entry.keys():
            raise StateError(f"amp's state has {key}={entry!r}; an entry has the numbers loss_scale and unskipped")
    return {int(key.removeprefix(_PREFIX)): (each["loss_scale"], each["unskipped"]) for key, each in state_dict.items()}
