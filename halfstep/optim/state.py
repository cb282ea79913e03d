"""Loads optimizer state from a checkpoint with the bits that it was saved with, also for low-precision weights."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from halfstep.errors import StateError
from halfstep.optim.guard import put_over
from halfstep.optim.masters import is_low
from halfstep.optim.table import has_row
from halfstep.optim.trial_step import CHOICES, can_try_step, small_state, try_step
from halfstep.torch_internals import load_post_hooks_of, load_pre_hooks_of

StateDict = dict[str, Any]
LARGEST_COUNT = 2**63 - 1


def exact_state_loading(optimizer: Optimizer) -> Callable[[], None]:
    """Makes `optimizer.load_state_dict` keep fp32 state fp32 and copy it; returns a function that undoes this.

    Without this, torch casts state to the dtype of the parameter, so that the moments of a low weight would lose bits.
    torch also uses the tensors of the loaded dict themselves, so that a later step would overwrite them. If the loaded
    state of a low weight is in low precision, it becomes fp32.

    A state that the optimizer cannot continue from raises a StateError before anything is changed. This is checked
    after all load pre-hooks have run, because a pre-hook may change the state. If a load raises any other error, the
    previous state and options are put back.
    """
    loading: list[StateDict] = []

    def keep(_: Optimizer, state_dict: StateDict) -> StateDict:
        _check(optimizer, state_dict)
        state = {key: entry for key, entry in state_dict["state"].items() if entry != {}}
        loading[:] = [{**state_dict, "state": state}]  # as none, an empty entry says that no update has come
        return loading[0]

    def put_back(_: Optimizer) -> None:
        saved = loading.pop()
        members = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        for p, index in zip(members, indices, strict=True):
            if p in optimizer.state and index in saved["state"]:
                optimizer.state[p] = _exact(optimizer.state[p], saved["state"][index], is_low(p))

    handles = [
        optimizer.register_load_state_dict_pre_hook(keep),
        optimizer.register_load_state_dict_post_hook(put_back),
    ]
    release = _all_or_nothing(optimizer, *handles)

    def undo() -> None:
        release()
        for handle in handles:
            handle.remove()

    return undo


def _all_or_nothing(optimizer: Optimizer, judge: RemovableHandle, mend: RemovableHandle) -> Callable[[], None]:
    """Makes `optimizer.load_state_dict` put the old state back if it raises; returns a function that undoes this.

    `judge` is the pre-hook that checks the loaded state. It is made to run last, after hooks that may change the state.
    `mend` is the post hook that restores the saved bits. It is made to run first, before hooks that read the state.
    """
    load = optimizer.load_state_dict
    pre, post = load_pre_hooks_of(optimizer), load_post_hooks_of(optimizer)
    released = False

    @functools.wraps(load)
    def load_state_dict(state_dict: StateDict) -> None:
        if released:
            return load(state_dict)
        if not isinstance(state_dict, dict):
            raise StateError(
                f"expected the optimizer state as a dict, got {type(state_dict).__name__}; "
                "pass what state_dict() of an optimizer returned"
            )
        pre.move_to_end(judge.id)
        post.move_to_end(mend.id, last=False)
        before = optimizer.state, optimizer.param_groups
        try:
            load(state_dict)
            for number, (group, old) in enumerate(zip(optimizer.param_groups, before[1], strict=True)):
                options = [name for name in optimizer.defaults if name in old]
                _require(f"parameter group {number} of the optimizer state", group, options)
        except BaseException:
            optimizer.state, optimizer.param_groups = before
            raise

    put_back = put_over(optimizer, "load_state_dict", load_state_dict)

    def undo() -> None:
        nonlocal released
        released = True
        put_back()

    return undo


def _check(optimizer: Optimizer, saved: StateDict) -> None:
    """Refuses a state that `optimizer` cannot continue from: parts are missing, or it belongs to other parameters."""
    _require("the optimizer state", saved, ("state", "param_groups"))
    groups, state = saved["param_groups"], saved["state"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        raise StateError("the optimizer state holds no dict under 'state' or no list under 'param_groups'")
    for number, group in enumerate(groups):
        _require(f"parameter group {number} of the optimizer state", group, ("params",))
        if not isinstance(group["params"], list | tuple):
            raise StateError(f"parameter group {number} of the optimizer state has no list under 'params'")
    sizes, own = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise StateError(
            f"the optimizer state has parameter groups of {sizes} parameters, but this optimizer has groups of {own}; "
            "load the state of an optimizer with the same groups"
        )
    known = [index for group in groups for index in group["params"]]
    strange = [key for key in state if key not in known and (can_try_step(optimizer) or not isinstance(key, str))]
    if strange or len({*map(repr, known)}) != len(known):
        raise StateError(
            f"the optimizer state has entries {strange!r:.60}, but its groups name the parameters {known!r:.60}; "
            "each entry must belong to one parameter"
        )
    for number, (group, now) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _check_options(f"parameter group {number} of the optimizer state", group, optimizer)
        for p, index in zip(now["params"], group["params"], strict=True):
            entry = state.get(index, {})
            what = f"parameter {index} of shape {tuple(p.shape)}"
            _check_values(what, entry)
            names = (what, f"parameter {index}", f"parameter group {number}")
            wrong = _wrong(optimizer, p, (group, now), entry, names)
            if wrong is not None:
                raise StateError(wrong)


def _check_options(what: str, group: StateDict, optimizer: Optimizer) -> None:
    if can_try_step(optimizer):
        _check_kinds(what, group, optimizer.defaults)
    for name, default in optimizer.defaults.items() if has_row(type(optimizer)) else ():
        if name not in group or name in CHOICES or default is None:
            continue
        value = group[name]
        if value is None and _may_be_none(optimizer, name):
            continue
        values = value if isinstance(default, tuple) and isinstance(value, tuple | list) else (value,)
        if isinstance(default, bool):
            if not isinstance(value, bool | int):
                raise StateError(f"{what} has {name}={value!r:.60}; expected True or False")
        elif not all(_is_number(one, tensor=name == "lr") for one in values):
            raise StateError(f"{what} has {name}={value!r:.60}; expected a number, or two for betas")


def _may_be_none(optimizer: Optimizer, name: str) -> bool:
    parameter = inspect.signature(type(optimizer)).parameters.get(name)
    return parameter is not None and "None" in str(parameter.annotation)


def _check_kinds(what: str, group: StateDict, defaults: StateDict) -> None:
    """Refuses loaded options with which a later step of a torch or halfstep optimizer would fail."""
    for name in defaults.keys() & group.keys():
        value = group[name]
        if (isinstance(defaults[name], bool) or name in CHOICES) and not isinstance(value, bool | int | None):
            raise StateError(f"{what} has {name}={value!r:.60}; expected True, False or None")
        if isinstance(value, Tensor) and (value.numel() != 1 or value.is_meta):
            raise StateError(f"{what} has {name}={value!r:.60}; expected one number")


def _is_number(value: Any, *, tensor: bool) -> bool:
    if isinstance(value, Tensor):
        return tensor and value.numel() == 1 and not value.is_meta and value.is_floating_point()
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_values(what: str, entry: Any) -> None:
    """Refuses a state that is not a dict, has tensors without plain storage, or has an impossible step count."""
    if not isinstance(entry, dict):
        raise StateError(f"the optimizer state of {what} is {entry!r:.40}; expected a dict")
    for name, value in entry.items():
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_meta or value.is_quantized):
            raise StateError(f"the optimizer state {name!r} of {what} is not a dense tensor with plain storage")
    step = entry.get("step", 0)
    if isinstance(step, Tensor):
        if step.numel() != 1:
            raise StateError(f"the step count of {what} has shape {tuple(step.shape)}; it must be one number")
        step = step.item()
    count = isinstance(step, int | float) and not isinstance(step, bool) and 0 <= step <= LARGEST_COUNT
    if not count or step != int(step):
        raise StateError(f"the step count of {what} is {step!r:.40}; it must be a non-negative integer")


def _wrong(
    optimizer: Optimizer,
    p: Tensor,
    groups: tuple[StateDict, StateDict],
    entry: StateDict,
    names: tuple[str, str, str],
) -> str | None:
    """Returns what is wrong with a parameter's loaded state, or None; `groups` are the loaded and the present options.

    `names` are the long and the short name of the parameter, and the name of its group, for the message.
    """
    given, now = groups
    what, short, group = names
    held = optimizer.state.get(p, {})
    expected, error, made = held, None, small_state(p, entry)
    if can_try_step(optimizer) and p.requires_grad:
        try:
            expected = try_step(optimizer, p, now, held)
        except Exception:  # it cannot step so anyway: nothing is known
            return None
        try:
            made = try_step(optimizer, p, given, entry)
        except Exception as raised:
            error = raised
    else:
        expected = small_state(p, held)
        made = {name: value for name, value in made.items() if value is not None}  # which it may make itself
    misfit = _misfit(what, made, expected, entry)
    if misfit is not None:
        return misfit
    if error is None:
        return None
    for where, missing in (
        (f"the optimizer state of {short}", [name for name in expected if entry and name not in entry]),
        (f"{group} of the optimizer state", [name for name in optimizer.defaults if name in now and name not in given]),
    ):
        if missing:
            return f"{where} has no {', '.join(map(repr, missing))}; was the file cut short?"
    reason = f"{type(error).__name__}: {error}"[:200]
    return f"{type(optimizer).__name__} cannot step from the loaded optimizer state of {what} ({reason})"


def _misfit(what: str, made: StateDict, expected: StateDict, entry: StateDict) -> str | None:
    """Returns an error message for the first tensor in `entry`, the loaded state, that has a wrong shape; else None.

    `made` is the loaded state and `expected` the present one, both with small tensors in place of the real ones. If a
    trial step was possible, both are as they are after it. A tensor has a wrong shape if its shapes in `made` and in
    `expected` differ.
    """
    for name, want in expected.items():
        if name not in made or name not in entry or name == "step" or not isinstance(want, Tensor):
            continue
        got, came = made[name], entry[name]
        if isinstance(got, Tensor) and got.shape == want.shape and got.is_complex() == want.is_complex():
            continue
        kind = f"shape {tuple(came.shape)}" if isinstance(came, Tensor) else f"no tensor ({came!r:.40})"
        return (
            f"{what} cannot take the loaded optimizer state {name!r}, which has {kind}; "
            "load the state of an optimizer of this model with its parameters in the same order"
        )
    return None


def _require(what: str, part: Any, names: Iterable[str]) -> None:
    if not isinstance(part, Mapping):
        raise StateError(f"{what} is {part!r:.40}; expected a dict")
    missing = [name for name in names if name not in part]
    if missing:
        raise StateError(f"{what} has no {', '.join(map(repr, missing))}; was the file cut short?")


def widen_states(optimizer: Optimizer, made_low: Iterable[Tensor]) -> Callable[[], None]:
    """Makes low tensors in the state of parameters that were low when it was made fp32; returns what puts them back.

    What an optimizer keeps low for an fp32 weight is its own choice and stays as it is.
    """
    changed: list[tuple[StateDict, StateDict]] = []
    for p in made_low:
        state = optimizer.state.get(p, {})
        low = {name: value for name, value in state.items() if isinstance(value, Tensor) and is_low(value)}
        state.update({name: value.float() for name, value in low.items()})
        changed.append((state, low))

    def put_back() -> None:
        for state, low in changed:
            state.update(low)

    return put_back


def _exact(loaded: Any, saved: Any, low: bool) -> Any:
    """Returns a copy of the `loaded` state; for a `low` weight, its tensors are fp32 copies of those in `saved`."""
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved.get(key), low) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(_exact(one, other, low) for one, other in zip(loaded, saved, strict=True))
    if not isinstance(loaded, Tensor):
        return loaded
    wanted = isinstance(saved, Tensor) and saved.shape == loaded.shape and (saved.is_floating_point() or is_low(loaded))
    if low and wanted:
        return saved.detach().to(loaded.device, torch.float32, copy=True)
    return loaded.clone()
