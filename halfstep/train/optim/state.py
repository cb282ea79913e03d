"""Loads optimizer state from a checkpoint with the bits that it was saved with, also for low-precision weights."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import StateError
from halfstep.formats import is_narrow
from halfstep.train.optim.hooks import put_over, updated_by
from halfstep.train.optim.optimizers import any_row_of
from halfstep.train.processes.shards import local
from halfstep.validate import check_entries

StateDict = dict[str, Any]
Shapes = dict[str, torch.Size | None]
LARGEST_COUNT = 2**63 - 1
_require = partial(check_entries, also=None, instead="was the file cut short?")
CHOICES = ("foreach", "fused", "capturable", "differentiable")  # options that choose a kernel, not numbers


def exact_state_loading(optimizer: Optimizer) -> Callable[[], None]:
    """Makes `optimizer.load_state_dict` keep fp32 state fp32, and change all or nothing; returns what undoes this."""
    # Without this, torch casts state to the dtype of the parameter, so that the moments of a low weight would lose
    # bits. torch also uses the tensors of the loaded dict themselves, so that a later step would overwrite them. A
    # state that the optimizer cannot continue from raises a StateError before anything is changed. This is checked
    # after all load pre-hooks have run, because a pre-hook may change the state.
    load = optimizer.load_state_dict
    released = False

    @wraps(load)
    def load_state_dict(state_dict: StateDict) -> None:
        if released:
            return load(state_dict)
        if not isinstance(state_dict, dict):
            raise StateError(
                f"expected the optimizer state as a dict, got {type(state_dict).__name__}; "
                "pass what state_dict() of an optimizer returned"
            )
        saved: StateDict = {}

        def keep(_: Optimizer, given: StateDict) -> StateDict:
            _check(optimizer, given)
            state = {key: entry for key, entry in given["state"].items() if entry != {}}
            saved.update(given, state=state)  # as none, an empty entry says that no update has come
            return saved

        before = optimizer.state, optimizer.param_groups
        with ExitStack() as hooks:
            hooks.callback(optimizer.register_load_state_dict_pre_hook(keep).remove)  # the last one
            hooks.callback(optimizer.register_load_state_dict_post_hook(partial(_put_back, saved), prepend=True).remove)
            try:
                load(state_dict)
                for number, (group, old) in enumerate(zip(optimizer.param_groups, before[1], strict=True)):
                    options = [name for name in optimizer.defaults if name in old]
                    _require(f"parameter group {number} of the optimizer state", group, options)
            except BaseException:
                optimizer.state, optimizer.param_groups = before
                raise

    restore = put_over(optimizer, "load_state_dict", load_state_dict)

    def undo() -> None:
        nonlocal released
        released = True
        restore()

    return undo


def _put_back(saved: StateDict, optimizer: Optimizer) -> None:
    """Gives parameters the `saved` states as they were before torch has cast them."""
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    for p, index in zip(updated_by(optimizer), indices, strict=True):
        if p in optimizer.state and index in saved["state"]:
            optimizer.state[p] = _exact(optimizer.state[p], saved["state"][index], is_narrow(p.dtype))


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
    strange = [key for key in state if key not in known and (_is_known(optimizer) or not isinstance(key, str))]
    if strange or len({*map(repr, known)}) != len(known):
        raise StateError(
            f"the optimizer state has entries {strange!r:.60}, but its groups name the parameters {known!r:.60}; "
            "each entry must belong to one parameter"
        )
    for number, (group, now) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _check_options(f"parameter group {number} of the optimizer state", group, optimizer)
        _check_group(optimizer, state, group, now)


def _check_group(optimizer: Optimizer, state: StateDict, given: StateDict, now: StateDict) -> None:
    names: defaultdict[int, set[str]] = defaultdict(set)  # by the dimensions of the parameter: those of one kind agree
    pairs = list(zip(now["params"], given["params"], strict=True))
    for p, index in pairs:
        _check_values(f"parameter {index} of shape {tuple(p.shape)}", state.get(index, {}))
        names[p.dim()] |= state.get(index, {}).keys()
    for p, index in pairs:
        entry = state.get(index, {})
        if not p.requires_grad or all(value is None for value in entry.values()):  # no update has come
            continue
        wanted = _shapes(optimizer, p, entry, names[p.dim()], (given, now))
        wrong = _misfit(index, p, entry, wanted, known=_is_known(optimizer))
        if wrong is not None:
            raise StateError(wrong)


def _check_options(what: str, group: StateDict, optimizer: Optimizer) -> None:
    """Refuses loaded options with which a later step of a torch or halfstep optimizer would fail."""
    if not _is_known(optimizer):
        return
    own = any_row_of(type(optimizer)) is not None
    annotated = inspect.signature(type(optimizer)).parameters
    for name in optimizer.defaults.keys() & group.keys():
        default, value, expected = optimizer.defaults[name], group[name], "one number"
        if name in CHOICES or isinstance(default, bool):
            fits = isinstance(value, bool | int) or (value is None and (name in CHOICES or not own))
            expected = "True, False or None"
        elif (
            default is None
            or isinstance(default, str)
            or (value is None and "None" in str(getattr(annotated.get(name), "annotation", "")))
        ):
            fits = not isinstance(value, Tensor) or (value.numel() == 1 and not value.is_meta)
        else:
            usual = default if isinstance(default, tuple) else (default,)
            given = value if isinstance(default, tuple) and isinstance(value, tuple | list) else (value,)
            fits = len(given) == len(usual) and all(
                _is_number(one, tensor=name == "lr" or not own) or one is each is None
                for each, one in zip(usual, given, strict=True)
            )
            expected += f", or as many as in {default!r:.60}"
        if not fits:
            raise StateError(f"{what} has {name}={value!r:.60}; expected {expected}")


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


def _is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of halfstep's or torch's optimizers, but not LBFGS, whose states belong to no parameter."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    known = any_row_of(type(optimizer)) is not None or f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return known and (closure is None or closure.default is not inspect.Parameter.empty)


def _shapes(
    optimizer: Optimizer, p: Tensor, entry: StateDict, names: Iterable[str], groups: tuple[StateDict, StateDict]
) -> Shapes:
    """Returns the states that the loaded ones of `p` must have, by name, with their shapes (None: any), where known."""
    # Of another optimizer those that it holds tell, unless its options change; otherwise the `names` in the states of
    # all parameters with as many dimensions.
    given, now = groups
    held = {name: value.shape for name, value in optimizer.state.get(p, {}).items() if isinstance(value, Tensor)}
    row = any_row_of(type(optimizer))
    if row is not None:
        names = row.states({**now, **given})
        own: Shapes = {name: torch.Size() if name in row.scalars else p.shape for name in names}
        return {**own, "step": None} if row.counts else own
    if not _is_known(optimizer):
        return {name: shape for name, shape in held.items() if name in entry}
    if held and all(given.get(name) == now.get(name) for name in optimizer.defaults if name != "lr"):
        return dict(held)
    large = {name for name, value in entry.items() if isinstance(value, Tensor) and value.numel() > 1}
    return {name: p.shape if name in large and not _fits(entry[name].shape, p.shape) else None for name in names}


def _fits(shape: torch.Size, full: torch.Size) -> bool:
    """Whether a state has the shape of its parameter, but for sizes of 1, as Adafactor's means have."""
    return len(shape) == len(full) and all(size in (1, whole) for size, whole in zip(shape, full, strict=True))


def _is_code(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 or not (dtype.is_floating_point or dtype.is_complex)


def _misfit(index: Any, p: Tensor, entry: StateDict, wanted: Shapes, *, known: bool) -> str | None:
    """Returns what is wrong with a parameter's loaded state: a name, a shape or a value; None if nothing is."""
    for name, shape in sorted(wanted.items(), key=lambda each: each[0] not in entry):  # what is missing last
        if name not in entry:
            return f"the optimizer state of parameter {index} has no {name!r}; was the file cut short?"
        value = entry[name]
        if name == "step":  # whose value is checked by itself
            continue
        if not shape and not isinstance(value, Tensor) and _is_number(value, tensor=False):  # as older torch had it
            continue
        if known and isinstance(value, Tensor) and _is_code(value.dtype):
            return (
                f"the optimizer state {name!r} of parameter {index} is in {value.dtype}, a code rather than values; "
                "load a state that was saved in fp32, as state_dict() of halfstep and torch optimizers is"
            )
        if not isinstance(value, Tensor) or value.is_complex() != p.is_complex():
            kind = f"no tensor ({value!r:.40})" if not isinstance(value, Tensor) else f"dtype {value.dtype}"
        elif shape is not None and value.shape != shape:
            kind = f"shape {tuple(value.shape)}"
        elif known and not torch.isfinite(local(value)).all():
            return (
                f"the optimizer state {name!r} of parameter {index} has values that are not finite; load an earlier one"
            )
        else:
            continue
        return (
            f"parameter {index} of shape {tuple(p.shape)} cannot take the loaded optimizer state {name!r}, which has "
            f"{kind}; load the state of an optimizer of this model with its parameters in the same order"
        )
    return None


def widen_states(optimizer: Optimizer, made_low: Iterable[Tensor]) -> Callable[[], None]:
    """Makes low tensors in the state of parameters that were low when it was made fp32; returns what puts them back."""
    changed: list[tuple[StateDict, StateDict]] = []
    for p in made_low:
        state = optimizer.state.get(p, {})
        low = {name: value for name, value in state.items() if isinstance(value, Tensor) and is_narrow(value.dtype)}
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
    wanted = (
        isinstance(saved, Tensor)
        and saved.shape == loaded.shape
        and (saved.is_floating_point() or is_narrow(loaded.dtype))
    )
    if low and wanted:
        return saved.detach().to(loaded.device, torch.float32, copy=True)
    return loaded.clone()
