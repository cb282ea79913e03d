"""Optimizer state that comes back from a checkpoint with the bits it was saved with, also for low weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import StateError
from halfstep.optim.masters import is_low
from halfstep.optim.table import TABLE, Row

StateDict = dict[str, Any]


def exact_state_loading(optimizer: Optimizer) -> Callable[[], None]:
    """Makes `optimizer.load_state_dict` keep fp32 state fp32 and copy what it loads; returns the undo.

    torch casts state to the dtype of the parameter, so a low weight would lose the bits of its moments, and it shares
    the tensors of the loaded dict, which a later step would overwrite. Low state of a low weight becomes fp32.

    A state that does not fit raises a StateError before anything was changed. Where a later pre-hook may still adapt
    what comes, torch checks it as ever.
    """
    loading: list[StateDict] = []

    def keep(_: Optimizer, state_dict: StateDict) -> None:
        hooks = optimizer._optimizer_load_state_dict_pre_hooks
        if next(reversed(hooks)) == handles[0].id:
            _check(optimizer, state_dict)
        loading[:] = [state_dict]

    def put_back(_: Optimizer) -> None:
        saved = loading.pop()
        members = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in saved.get("param_groups", ()) for i in group["params"]]
        if len(members) != len(indices) or "state" not in saved:  # a hook registered later gave torch another dict
            return
        for p, index in zip(members, indices, strict=True):
            if p in optimizer.state and index in saved["state"]:
                optimizer.state[p] = _exact(optimizer.state[p], saved["state"][index], is_low(p))

    handles = [
        optimizer.register_load_state_dict_pre_hook(keep),
        optimizer.register_load_state_dict_post_hook(put_back),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _check(optimizer: Optimizer, saved: StateDict) -> None:
    """Refuses a state that `optimizer` cannot go on from: parts are missing, or it is of other parameters."""
    _require("the optimizer state", saved, ("state", "param_groups"))
    row, groups = TABLE.get(type(optimizer)), saved["param_groups"]
    for number, group in enumerate(groups):
        _require(f"parameter group {number} of the optimizer state", group, ("params", *(row.saved if row else ())))
    sizes, own = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise StateError(
            f"the optimizer state has a parameter group each for {sizes} parameters, this optimizer for {own}; "
            "load the state of an optimizer that was made alike"
        )
    if row is None:
        return
    members = [p for group in optimizer.param_groups for p in group["params"]]
    for p, (index, names) in zip(members, _expected(row, optimizer.defaults, groups), strict=True):
        entry = saved["state"].get(index)
        if entry:  # an empty one says, as none does, that no update has reached the parameter
            if row.counts:  # another one makes its state when it first needs it
                _require(f"the optimizer state of parameter {index}", entry, ("step", *names))
            _check_shapes(f"parameter {index} of shape {tuple(p.shape)}", p, entry, names)


def _expected(row: Row, defaults: StateDict, groups: list[StateDict]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields the index of each saved parameter with the names of its state tensors."""
    for group in groups:
        names = row.options({**defaults, **group}).states
        for index in group["params"]:
            yield index, names


def _check_shapes(what: str, p: Tensor, entry: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name, value in entry.items():
        if name == "step":
            if isinstance(value, Tensor) and value.numel() != 1:
                raise StateError(f"the step count of {what} has shape {tuple(value.shape)}; it must be one number")
        elif name in names and not (value is None and "step" not in entry):
            came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"no tensor ({value!r})"
            if not isinstance(value, Tensor) or value.shape != p.shape:
                raise StateError(
                    f"{what} cannot take the optimizer state {name!r} that came: it has {came}; "
                    "load the state of an optimizer of this model, its parameters in the same order"
                )


def _require(what: str, part: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if name not in part]
    if missing:
        raise StateError(f"{what} has no {', '.join(map(repr, missing))}; was the file cut short?")


def _exact(loaded: Any, saved: Any, low: bool) -> Any:
    """Returns copies of the `loaded` tensors, for a `low` weight with the bits of the `saved` ones, in fp32."""
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved.get(key), low) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_exact(one, other, low) for one, other in zip(loaded, saved, strict=True))
    if not isinstance(loaded, Tensor):
        return loaded
    if low and isinstance(saved, Tensor) and saved.is_floating_point() and saved.shape == loaded.shape:
        return saved.detach().to(loaded.device, torch.float32, copy=True)
    return loaded.clone()
