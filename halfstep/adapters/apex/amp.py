"""The stand-in for `apex.amp`, by a Session; docs/apex.md lists what works as in apex and what was fixed."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.adapters.apex.properties import BRIEFS, Properties, make_plan, make_scaling, switch
from halfstep.adapters.apex.state import NOT_INITIALIZED, STATE, LossScaler, Trained, maybe_print, warn_or_err
from halfstep.errors import StateError
from halfstep.formats import is_narrow
from halfstep.initialize import initialize as open_session
from halfstep.validate import with_near_misses

__all__ = ["initialize", "load_state_dict", "scale_loss", "state_dict"]

_SCALER = "loss_scaler"  # what the name of a loss scale in a checkpoint begins with


@with_near_misses
def initialize(  # noqa: PLR0913  # apex's arguments, in their order
    models: nn.Module | list[nn.Module],
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Starts mixed precision training as `apex.amp.initialize` did; returns the same models and optimizers.

    `opt_level` sets the defaults of the five options from `cast_model_type` to `loss_scale`; a value other than None
    overrides a default. Model outputs are fp32 unless `cast_model_outputs` is set. With `enabled=False` this function
    and all others of amp do nothing.

    Raises:
        RuntimeError: an option contradicts the level, a model is wrapped or not fp32, or an optimizer was passed to an
            earlier call.
        TypeError: `models` or `optimizers` has the wrong type.
        ValueError: an option has a value that is not allowed.
    """
    if not isinstance(verbosity, int):
        raise ValueError(f"verbosity is {verbosity!r}; pass 0 to print nothing, 1 or 2 to print")
    STATE.verbosity = verbosity
    if not switch("enabled", enabled):
        STATE.opt_properties, STATE.loss_scalers = Properties(None, STATE._low), []
        return models if optimizers is None else (models, optimizers)
    chosen = _as_list(models, nn.Module, "models")
    wrapped = [] if optimizers is None else _as_list(optimizers, Optimizer, "optimizers")
    loaded_low = _check_models(chosen)
    stepping = [_own(each) for each in wrapped]
    for optimizer in stepping:
        if any(optimizer is each for trained in STATE.sessions() for each in trained.session.optimizers):
            raise RuntimeError(
                f"This {type(optimizer).__name__} was already passed to amp.initialize; call amp.initialize once, with "
                "all models and optimizers that train together."
            )
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = _properties(opt_level, {name: value for name, value in overrides.items() if value is not None})
    if type(num_losses) is not int or num_losses < 1:
        raise ValueError(f"num_losses is {num_losses!r}; pass the number of losses, 1 or more")
    plan = make_plan(
        properties,
        chosen,
        low=STATE._low,
        cast_model_outputs=cast_model_outputs,
        scaling=make_scaling(properties.loss_scale, min_loss_scale, max_loss_scale),
        changes=STATE._registered,
    )
    session = open_session(chosen, stepping or None, plan, on_failure="warn", stepping="optimizer")
    for model in loaded_low if opt_level == "O0" else ():  # at the others the session widens what is trained
        model.float()
    trained = Trained(session, num_losses, casts=bool(properties.patch_torch_functions))
    STATE._trained.add(trained)
    STATE.opt_properties = properties
    STATE.loss_scalers = [LossScaler(trained, loss_id) for loss_id in range(num_losses)]
    return models if optimizers is None else (models, optimizers)


def _properties(opt_level: str, overrides: Mapping[str, Any]) -> Properties:
    """Returns the options of an `initialize` call: the level's defaults, changed by `overrides`."""
    properties = Properties(str(opt_level), STATE._low)  # None is no level
    selected = f"Selected optimization level {BRIEFS[opt_level]}"
    overriding = "Processing user overrides (additional kwargs that are not None)..."
    for line in (selected, "Defaults for this optimization level are:", *properties.lines(), overriding):
        maybe_print(line, rank0=True)
    for name, value in overrides.items():
        properties.override(name, value, warn_or_err)
    for line in ("After processing overrides, optimization options are:", *properties.lines()):
        maybe_print(line, rank0=True)
    return properties


def _as_list(value: Any, kind: type, what: str) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    if any(type(item).__name__ == "FP16_Optimizer" for item in items):
        raise RuntimeError(
            "An incoming optimizer is an instance of FP16_Optimizer. If you are using the new Amp API via "
            "amp.initialize, pass the ordinary optimizer: amp keeps the fp32 masters and scales the gradients."
        )
    wrong = [item for item in items if not isinstance(_own(item), kind)]
    if wrong:
        raise TypeError(f"{what} must be a {kind.__name__} or a list of them, not {type(wrong[0]).__name__}")
    return list(items)


def _own(optimizer: Any) -> Any:
    """Returns the optimizer inside a wrapper such as LARC; returns any other object unchanged."""
    return optimizer if isinstance(optimizer, (Optimizer, nn.Module)) else getattr(optimizer, "optim", optimizer)


def _check_models(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Checks models and returns those that have fp16 or bf16 parameters or buffers."""
    loaded_low = []
    for model in models:
        if isinstance(model, nn.DataParallel) or type(model).__name__ == "DistributedDataParallel":
            raise RuntimeError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied "
                "to the model(s) AFTER the model(s) have been returned from amp.initialize."
            )
        values: list[tuple[str, str, Tensor]] = [("param", *each) for each in model.named_parameters()]
        values += [("buffer", *each) for each in model.named_buffers()]
        low = [each for each in values if is_narrow(each[2].dtype)]
        if low and not STATE.allow_incoming_model_not_fp32:
            kind, name, value = low[0]
            warn_or_err(
                f"Found {kind} {name} with type {value.type()}, expected fp32. When using amp.initialize, you do not "
                "need to call .half() on your model before passing it, no matter what optimization level you choose; "
                "call model.float() first."
            )
        if low:
            loaded_low.append(model)
    return loaded_low


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss, in fp32, times its scale; call `backward()` on it inside the block.

    The gradients are unscaled at the end of the block. With `delay_unscale` they stay scaled, so that later backward
    passes can add to them. `optimizers` is an optimizer, or a list or tuple of optimizers, all passed to one call of
    `initialize`. `delay_overflow_check` has no effect, since `optimizer.step()` always checks for overflow.
    `model` has no effect, as in apex.

    Raises:
        RuntimeError: `initialize` was not called, or no single call of it got all of these optimizers.
        IndexError: `loss_id` is out of the range that `num_losses` sets.
        TypeError: the loss is not a tensor.
    """
    if not hasattr(STATE, "opt_properties"):
        raise RuntimeError(NOT_INITIALIZED)
    if not STATE.opt_properties.enabled:
        yield loss
        return
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    trained = STATE.of([_own(each) for each in given])
    count = trained.num_losses
    if loss_id not in range(-count, count):
        raise IndexError(
            f"loss_id is {loss_id!r}, but amp.initialize was called with num_losses={count}; pass a loss_id from 0 to "
            f"{count - 1}, or a larger num_losses"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"amp.scale_loss got a loss of type {type(loss).__name__}; pass the loss tensor")
    with trained.session.scaling(loss, loss_id=loss_id % count, unscale=not delay_unscale) as scale:
        yield loss.float() * scale.to(loss.device)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns, for each loss, its scale and the number of steps without overflow since the scale last changed.

    The layout is that of apex's checkpoints: `{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}`. If
    `destination` is passed, the entries are added to it. Before `initialize`, and with `enabled=False`, there are no
    entries.
    """
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(getattr(STATE, "loss_scalers", [])):
        found[f"{_SCALER}{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
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
    if found:
        scalers[0]._trained.load(found)


def _entries(state_dict: Any) -> dict[int, tuple[float, int]]:
    """Checks the layout of a state; returns a dict from a loss's number to its scale and steps without overflow."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"amp.load_state_dict got {type(state_dict).__name__}; pass the result of amp.state_dict()")
    unknown = [str(key) for key in state_dict if not re.fullmatch(_SCALER + r"\d+", str(key))]
    if unknown:
        raise RuntimeError(f"Unexpected key(s) in amp's state: {', '.join(unknown)}; expected loss_scaler0, 1, ...")
    for key, entry in state_dict.items():
        if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= entry.keys():
            raise StateError(f"amp's state has {key}={entry!r}; expected a dict with loss_scale and unskipped")
    return {int(key.removeprefix(_SCALER)): (each["loss_scale"], each["unskipped"]) for key, each in state_dict.items()}
