"""Checks that a plan is compatible with a model and its optimizers; the error names what is incompatible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import SessionError, SetupError
from halfstep.formats import is_low, is_narrow
from halfstep.plan.matching import is_fsdp1
from halfstep.plan.plan import Plan
from halfstep.sharded import fsdp_modules, is_sharded, is_wrapped
from halfstep.torch_internals import is_made, offloads
from halfstep.validate import named

SUPPORTED_DEVICES = ("cpu", "cuda")
FSDP_LINES = (
    "`fully_shard(model, mp_policy=halfstep.fsdp_policy(plan, low=...))`, then make the optimizer from "
    "model.parameters(), then call `halfstep.initialize`"
)
_PER_SAMPLE = "autograd_grad_sample_hooks"  # what Opacus's hooks leave on a model
_EXPANDED = frozenset({"ExpandedWeight", "GradSampleModuleExpandedWeights"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUNCTORCH = "pass grad_sample_mode='functorch' to make_private"


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
        by_name = list(model.named_parameters())
        _refuse(
            [name for name, p in by_name if isinstance(p, nn.parameter.UninitializedParameter)],
            "parameters have no shape yet: {}; run one batch through the lazy modules before initialize",
        )
        if plan.ops == "none":
            continue
        _refuse(
            [name for name, p in by_name if p.requires_grad and is_narrow(p.dtype) and id(p) not in excused],
            "trainable parameters are already in low precision: {}; halfstep makes low weights itself, from fp32 "
            "ones: call model.float() before halfstep.initialize, and before any fully_shard (frozen parameters may "
            "stay low)",
        )
        if not any(p.is_floating_point() or p.is_complex() for p in model.parameters()):
            raise SetupError(
                f"{type(model).__name__} has no floating-point parameters; there is nothing to train in low precision"
            )


def _refuse(names: Sequence[str], why: str) -> None:
    """Raises a SetupError about what has these names, if there are any; they stand in place of {}."""
    if names:
        raise SetupError(why.replace("{}", named(names)))


def loaded_low(models: Sequence[nn.Module], plan: Plan, made_low: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the trainable parameters that were loaded in bf16 or fp16, as from a hub."""
    known = {id(p) for p in made_low}
    every = {id(p): p for model in models for p in model.parameters() if p.requires_grad and id(p) not in known}
    return [] if plan.ops == "none" else [p for p in every.values() if is_low(p.dtype) and not is_wrapped(p)]


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
                    f"{type(optimizer).__name__} do not belong to the model (shapes {shapes}); build the optimizer "
                    "from this model's parameters(), after any .to(device) or fully_shard that replaces them; if it "
                    "updates several models, pass a list of all of them to halfstep.initialize"
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
    modules = [(name or "the model", module) for model in models for name, module in model.named_modules()]
    _refuse(
        [name for name, module in modules if is_fsdp1(module)],
        "FullyShardedDataParallel (FSDP1) shards {}, but FSDP1 works only at O0, where the optimizer steps by itself; "
        f"shard with FSDP2 instead: {FSDP_LINES}",
    )
    _refuse(
        [f"{n} ({type(p).__name__})" for n, p in by_name if id(p) in trained and is_wrapped(p) and not is_sharded(p)],
        f"parameters that have no plain storage cannot be trained at {plan.name}: {{}}; use O0, where the optimizer "
        "steps by itself",
    )
    offloading = {id(module) for module in fsdp_modules(models) if offloads(module)}
    _refuse(
        [name for name, module in modules if id(module) in offloading],
        "CPUOffloadPolicy offloads sharded modules to the CPU ({}), where halfstep cannot step them yet; leave "
        "offload_policy out, as in fully_shard(module, mp_policy=halfstep.fsdp_policy(plan, low=...)), or use O0",
    )
    sharded = [(name, p) for name, p in by_name if is_sharded(p) and id(p) in trained]
    _refuse(
        [f"{name} ({p.dtype})" for name, p in sharded if p.is_floating_point() and p.dtype is not torch.float32],
        f"sharded parameters are not fp32: {{}}; at {plan.name} they are the masters, and mp_policy makes fully_shard "
        f"gather them in low precision. Call model.float() first, then {FSDP_LINES}",
    )
    _refuse(
        [name for name, p in by_name if p.is_inference() and (id(p) in trained or plan.param == "low")],
        "parameters were made under torch.inference_mode(): {}; torch cannot train or change such tensors. Build the "
        "model outside of inference_mode (running it inside is fine)",
    )


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
