"""Checks that a plan is compatible with a model and its optimizers; the error names what is incompatible.

Nothing is changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import SessionError, SetupError, StateError
from halfstep.formats import is_low, is_narrow
from halfstep.pages import TRAINERS, more
from halfstep.plan.plan import Plan
from halfstep.sharded import fsdp_modules, is_sharded, is_wrapped
from halfstep.torch_internals import compiled_module, is_made, offloads

SUPPORTED_DEVICES = ("cpu", "cuda")
STATE_SCHEMA = 1
FSDP_LINES = (
    "`fully_shard(model, mp_policy=halfstep.fsdp_policy(plan, low=...))`, then make the optimizer from "
    "model.parameters(), then call `halfstep.initialize`"
)
_PER_SAMPLE = "autograd_grad_sample_hooks"  # what Opacus's hooks leave on a model
_EXPANDED = frozenset({"ExpandedWeight", "GradSampleModuleExpandedWeights"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUNCTORCH = "pass grad_sample_mode='functorch' to make_private"
_SHOWN = 5
_DEFAULTS = {each.name: each.default for each in fields(Plan) if isinstance(each.default, str)}
_LOSS_ID = re.compile("0|[1-9][0-9]{0,17}")  # as `str` writes it: other digits would name one loss twice


# What is passed by mistake as a model or an optimizer, and what to do instead.
_INSTEAD: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda item: isinstance(item, type), "pass an instance, which calling the class makes"),
    (lambda item: isinstance(item, (nn.Module, Optimizer)), "pass the model first, then the optimizer"),
    (lambda item: isinstance(item, Iterator), "pass them in a list; parameters go to an optimizer, and that is passed"),
    (lambda item: True, "as in halfstep.initialize(model, torch.optim.AdamW(model.parameters()))"),
)


def as_list(value: Any, kind: type, what: str, *, empty: bool = False) -> list[Any]:
    """Returns one object, or a list or tuple of them, as a list; `empty` allows a list without items."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not isinstance(item, kind):
            instead = next(do for looks, do in _INSTEAD if looks(item))
            came = "the class " + item.__name__ if isinstance(item, type) else "of type " + type(item).__name__
            raise SetupError(f"{what} is {came}; expected a torch {kind.__name__}, or a list of them; {instead}")
    if not (items or empty) or len({id(item) for item in items}) != len(items):
        raise SetupError(f"{what} is an empty list, or has one object twice; pass each {kind.__name__} once")
    return items


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the user's own module inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    while True:
        inner = compiled_module(model)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def enterable(module: nn.Module) -> bool:
    """Returns whether halfstep can apply a plan at the calls of a module inside a model."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return False
    return inspect.isfunction(inspect.getattr_static(type(module), "forward", None)) and not _shards(module)


def named(names: Iterable[str]) -> str:
    """Returns the first few names as text, with the number of further names."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def first_device(models: Sequence[nn.Module]) -> torch.device:
    """Returns the device of the first parameter; the CPU if there is no parameter (`device_of` refuses this)."""
    return next((p.device for model in models for p in model.parameters()), torch.device("cpu"))


def device_of(models: Sequence[nn.Module], plan: Plan) -> torch.device:
    """Returns the device of the parameters, which must all be on one kind of device."""
    kinds = {p.device.type: p.device for model in models for p in model.parameters()}
    if not kinds:
        raise SetupError("the model has no parameters; there is nothing to train or to cast")
    if len(kinds) > 1:
        raise SetupError(
            f"the parameters are on several kinds of device ({', '.join(sorted(kinds))}); move the model to one"
        )
    (kind, device) = next(iter(kinds.items()))
    if kind not in SUPPORTED_DEVICES and plan.ops != "none":
        raise SetupError(
            f"device {kind!r} is not supported; use {' or '.join(SUPPORTED_DEVICES)}, or O0, which works on any device"
        )
    return device


def check_models(models: Sequence[nn.Module], plan: Plan, made_low: Iterable[nn.Parameter] = ()) -> None:
    """Refuses models that cannot run under the plan."""
    # `made_low` are parameters that an earlier session stores low. They are accepted, because that session ends before
    # this plan applies.
    excused = {id(p) for p in made_low}
    for model in models:
        _refuse_lazy(model)
        if plan.ops == "none":
            continue
        low = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and is_narrow(p.dtype) and id(p) not in excused
        ]
        if low:
            raise SetupError(
                f"trainable parameters are already in low precision: {named(low)}; halfstep makes low weights itself, "
                "from fp32 ones: call model.float() before halfstep.initialize, and before any fully_shard (frozen "
                "parameters may stay low)"
            )
        if not any(p.is_floating_point() or p.is_complex() for p in model.parameters()):
            raise SetupError(
                f"{type(model).__name__} has no floating-point parameters; there is nothing to train in low precision"
            )


def loaded_low(models: Sequence[nn.Module], plan: Plan, made_low: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the trainable parameters that were loaded in bf16 or fp16, as from a hub."""
    known = {id(p) for p in made_low}
    every = {id(p): p for model in models for p in model.parameters() if p.requires_grad and id(p) not in known}
    return [] if plan.ops == "none" else [p for p in every.values() if is_low(p.dtype) and not is_wrapped(p)]


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise SetupError(
            f"parameters have no shape yet: {named(lazy)}; run one batch through the lazy modules before initialize"
        )


def _shards(module: nn.Module) -> bool:
    return any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__)


def check_optimizers(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> None:
    """Refuses optimizers that update parameters outside of the models."""
    for optimizer in optimizers:
        if not is_made(optimizer):
            raise SetupError(
                f"{type(optimizer).__name__} has not called Optimizer.__init__, as wrappers of optimizers do (Opacus's "
                "DPOptimizer): its step cannot be taken over; pass the optimizer inside of it, or train with it "
                "outside of halfstep"
            )
    known = {id(p) for model in models for p in model.parameters()}
    seen: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            foreign = [p for p in group["params"] if id(p) not in known]
            if foreign:
                shapes = named(str(tuple(p.shape)) for p in foreign)
                raise SetupError(
                    f"{len(foreign)} of {len(group['params'])} parameters in group {index} of "
                    f"{type(optimizer).__name__} "
                    f"do not belong to the model (shapes {shapes}); build the optimizer from this model's "
                    "parameters(), after any .to(device) or fully_shard that replaces them; if it updates several "
                    "models, pass a list of all of them to halfstep.initialize"
                )
            for p in group["params"]:
                if seen.setdefault(id(p), number) != number:
                    raise SetupError(
                        f"a parameter of shape {tuple(p.shape)} is in two optimizers; pass it to one of them only"
                    )


def check_per_sample(root: nn.Module, plan: Plan) -> None:
    """Refuses gradients per sample, as Opacus takes them, where they would be wrong or cannot be computed."""
    first = next(root.parameters(), None)
    if _EXPANDED.intersection((type(first).__name__, type(root).__name__)):
        raise SessionError(f"torch's expanded weights (grad_sample_mode='ew') take one format only; {_FUNCTORCH}")
    if _PER_SAMPLE not in vars(root):
        return
    if plan.scale.active:
        raise SessionError("gradients per sample (Opacus) would carry fp16's loss scale; use bf16, which needs none")
    layers = [m for m in root.modules() if isinstance(m, _CONVOLUTIONS) and "ft_compute_sample_grad" not in vars(m)]
    if layers:
        name = type(layers[0]).__name__
        raise SessionError(f"Opacus's hooks do not know the {name} of a session by its class; {_FUNCTORCH}")


def check_parameters(optimizers: Sequence[Optimizer], models: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses parameters whose memory the plan's steps could not read or write."""
    if plan.ops == "none":
        return
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    by_name = [item for model in models for item in model.named_parameters()]
    older = [name or "the model" for model in models for name, module in model.named_modules() if _shards(module)]
    if older:
        raise SetupError(
            f"FullyShardedDataParallel (FSDP1) shards {named(older)}, but FSDP1 works only at O0, where the optimizer "
            f"steps by itself; shard with FSDP2 instead: {FSDP_LINES}"
        )
    wrapped = [
        f"{name} ({type(p).__name__})"
        for name, p in by_name
        if id(p) in trained and is_wrapped(p) and not is_sharded(p)
    ]
    if wrapped:
        raise SetupError(
            f"parameters that have no plain storage cannot be trained at {plan.name}: {named(wrapped)}; use O0, where "
            "the optimizer steps by itself"
        )
    offloading = {id(module) for module in fsdp_modules(models) if offloads(module)}
    offloaded = [
        name or "the model" for model in models for name, module in model.named_modules() if id(module) in offloading
    ]
    if offloaded:
        raise SetupError(
            f"CPUOffloadPolicy offloads sharded modules to the CPU ({named(offloaded)}), where halfstep cannot step "
            "them yet; leave offload_policy out, as in fully_shard(module, mp_policy=halfstep.fsdp_policy(plan, "
            "low=...)), or use O0"
        )
    other = [f"{name} ({p.dtype})" for name, p in by_name if is_sharded(p) and id(p) in trained and not _is_full(p)]
    if other:
        raise SetupError(
            f"sharded parameters are not fp32: {named(other)}; at {plan.name} they are the masters, and mp_policy "
            f"makes fully_shard gather them in low precision. Call model.float() first, then {FSDP_LINES}"
        )
    frozen = [name for name, p in by_name if p.is_inference() and (id(p) in trained or plan.param == "low")]
    if frozen:
        raise SetupError(
            f"parameters were made under torch.inference_mode(): {named(frozen)}; torch cannot train or change such "
            "tensors. Build the model outside of inference_mode (running it inside is fine)"
        )


def _is_full(p: Tensor) -> bool:
    return p.dtype is torch.float32 or not p.is_floating_point()


def check_closures(optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuses optimizers that need a closure, if the plan stores weights low or scales the loss."""
    for optimizer in optimizers:
        if plan.param == "full" and not plan.scale.active:
            continue
        why = (
            "its closure would need the low weights while the update needs the masters"
            if plan.param == "low"
            else "it evaluates the loss several times per step, and the loss scale must not change in between"
        )
        raise SetupError(
            f"{type(optimizer).__name__} needs a closure, which does not work with {plan.name} and loss scale "
            f"{plan.scale.kind!r}: {why}; use O1 with low='bf16', which needs no loss scale, or another optimizer"
        )


def check_state(state: dict[str, Any], plan: dict[str, Any]) -> None:
    """Refuses a session state that is incomplete or belongs to another plan than `plan` (a dict)."""
    expected = {"schema", "plan", "steps", "skipped", "scales"}
    if not isinstance(state, dict) or set(state) - {"losses", "emulate"} != expected:
        have = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise StateError(
            f"expected a session state with the entries {sorted(expected)}, got {have}; pass what session.state_dict() "
            "returned (or was the file cut short?)"
        )
    kinds = {"plan": dict, "steps": int, "skipped": int, "losses": int, "scales": dict, "emulate": bool}
    for key, kind in kinds.items():
        value = state.get(key, kind())  # the first states had neither "losses" nor "emulate"
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**63):
            wanted = {int: "a count", bool: "True or False"}.get(kind, "a dict")
            raise StateError(f"session state: {key} is {value!r:.60}; expected {wanted}")
    for key, value in state["scales"].items():
        if not (isinstance(key, str) and _LOSS_ID.fullmatch(key) and isinstance(value, dict)):
            raise StateError(
                f"session state: scales has {key!r:.40}: {value!r:.60}; each key must be a loss id, such as '0', and "
                "each value a dict: load what session.state_dict() returned"
            )
    if len(state["scales"]) < state.get("losses", 0):
        raise StateError(
            f"this session state has the loss scales of only {len(state['scales'])} of {state['losses']} losses: "
            "torch.distributed.checkpoint loads only the entries that a new state has, which are those of loss 0. Save "
            'the state as one value, "session": json.dumps(session.state_dict()), and load it with json.loads'
        )
    if type(state["schema"]) is not int or state["schema"] != STATE_SCHEMA:
        raise StateError(f"session state has schema {state['schema']!r}; this halfstep reads schema {STATE_SCHEMA}")
    strange = next((key for key, value in state["plan"].items() if not _is_plain(value)), None)
    if strange is not None:
        raise StateError(
            f"session state: plan has {strange!r:.40}: {state['plan'][strange]!r:.60}; expected only numbers, text, "
            "True, False, None, and dicts or lists of these"
        )
    differing = sorted(
        (key for key in plan.keys() | state["plan"].keys() if _differs(key, state["plan"], plan)), key=str
    )
    if differing:
        which = "; ".join(
            f"{key} is {state['plan'].get(key)!r} in the state, {plan.get(key)!r} here" for key in differing
        )
        raise StateError(
            "this session state belongs to another plan; initialize with that plan, or do not load the session state: "
            "model and optimizer states load under any plan, only the loss scale and counters restart. These fields "
            f"differ: {which}; in trainers, {more(TRAINERS)}"
        )


def _differs(key: str, there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Returns whether two plans, as dicts, train differently because of the field `key`."""
    # The masters "copy" and "split" do not count as different, because both hold the same values. A field that the
    # state lacks, because its version had none, has its default.
    values = there.get(key, _DEFAULTS.get(key)), here.get(key)
    return values[0] != values[1] and not (key == "master" and values in (("copy", "split"), ("split", "copy")))


def _is_plain(value: Any) -> bool:
    """Returns whether a value consists only of dicts, lists, tuples, str, numbers, bool and None, like plan dicts."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)
