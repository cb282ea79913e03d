"""`apex.amp.state_dict` and `load_state_dict`: the loss scales, in the layout of apex's checkpoints."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from halfstep.adapters.apex.state import STATE, maybe_print
from halfstep.errors import StateError

_PREFIX = "loss_scaler"


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns, for each loss, its scale and the number of steps without overflow since the scale last changed.

    The layout is that of apex's checkpoints: `{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}`. If
    `destination` is passed, the entries are added to it. Before `initialize`, and with `enabled=False`, there are no
    entries.
    """
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(getattr(STATE, "loss_scalers", [])):
        found[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Restores the loss scales from a dict that `state_dict` of halfstep or of apex returned.

    A static scale stays as `initialize` set it. If the dict has more or fewer loss scales than `initialize` made, a
    warning is printed. If an error is raised, no scale was changed.

    Raises:
        RuntimeError: `initialize` was not called, or a key is not the name of a loss scale.
        StateError: a loss scale is out of range or incomplete.
        TypeError: the state is not a mapping.
    """
    entries = _entries(state_dict)
    if entries and not hasattr(STATE, "opt_properties"):
        raise RuntimeError(
            "amp.load_state_dict was called before amp.initialize, which makes the loss scales; call it after"
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
                f"Skipping loss_scaler{number}: its scale is {scale}, but amp.initialize set another, static one"
            )
    if found and STATE._current is not None:
        STATE._current.load(found)


def _entries(state_dict: Any) -> dict[int, tuple[float, int]]:
    """Checks the layout of a state; returns a dict from a loss's number to its scale and steps without overflow."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"amp.load_state_dict got {type(state_dict).__name__}; pass the result of amp.state_dict()")
    unknown = [str(key) for key in state_dict if not re.fullmatch(_PREFIX + r"\d+", str(key))]
    if unknown:
        raise RuntimeError(f"Unexpected key(s) in amp's state: {', '.join(unknown)}; expected loss_scaler0, 1, ...")
    for key, entry in state_dict.items():
        if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= entry.keys():
            raise StateError(f"amp's state has {key}={entry!r}; expected a dict with loss_scale and unskipped")
    return {int(key.removeprefix(_PREFIX)): (each["loss_scale"], each["unskipped"]) for key, each in state_dict.items()}
