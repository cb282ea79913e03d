"""Checks that a plan is compatible with a model and its optimizers, and which of its layers multiply by a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.edits import ProductsOf, Rule
from halfstep.errors import PlanError, SessionError, SetupError
from halfstep.formats import CASTABLE, FP32, is_low, is_narrow
from halfstep.plan.matching import Site, enterable, is_fsdp1
from halfstep.plan.plan import Plan, multiple_of
from halfstep.sharded import fsdp_modules, is_sharded, is_wrapped
from halfstep.torch_internals import is_made, offloads, parameters_of
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


if TYPE_CHECKING:
    from halfstep.plan.resolve import Assignment, ModuleFormats

# ---- which linear layers multiply by the recipe of a plan, and why others do not
_NAMED = re.compile("Linear|^Conv1D$")  # layers of a model's own, and those of transformers' GPT-2

_LAST, _TIED = "the last Linear", "tied to"


def sizes_of(module: nn.Module) -> list[tuple[int, ...]]:
    """Returns the shapes of the weights that a module multiplies with as a linear layer does; [] if it is none."""
    own = [p for p in parameters_of(module).values() if p is not None]
    if any(p.dtype not in CASTABLE for p in own):
        return []
    if isinstance(module, nn.Linear):  # whose weight may be computed
        return [(module.out_features, module.in_features)]
    named = _NAMED.search(type(module).__name__) is not None and not any(True for _ in module.children())
    return [tuple(p.shape) for p in own if p.dim() == 2] if named or isinstance(module, nn.MultiheadAttention) else []


def choose_products(
    plan: Plan, sites: Sequence[Site], modules: Sequence[ModuleFormats], asked: Sequence[ProductsOf]
) -> list[str | None]:
    """Returns for each module of one model the recipe of its products, why it has none, or None if it is no layer."""
    linear = [site for site in sites if isinstance(site.module, nn.Linear)]
    embedded = {
        id(site.module.weight): site.name for site in sites if isinstance(site.module, (nn.Embedding, nn.EmbeddingBag))
    }
    borrowed = {f"{s.name}.out_proj" for s in sites if isinstance(s.module, nn.MultiheadAttention)}
    multiple = multiple_of(plan.products)
    found: list[str | None] = []
    for site, formats, how in zip(sites, modules, asked, strict=True):
        sizes = [] if site.name in borrowed else sizes_of(site.module)
        weight = parameters_of(site.module).get("weight")
        if isinstance(site.module, nn.Linear) and weight is not None and weight.dtype not in CASTABLE:
            found.append(f"{str(weight.dtype).removeprefix('torch.')}: no plan casts its weight")
            continue
        tied = embedded.get(id(parameters_of(site.module).get("weight")))
        why = ""
        if formats.compute is FP32:
            why = formats.reason
        elif not enterable(site.module):
            why = "its forward is not its class's"
        elif not any(all(size % multiple == 0 < size for size in shape) for shape in sizes):
            why = f"{' x '.join(map(str, sizes[0]))} is no multiple of {multiple}" if sizes else ""
        elif how == "low":
            why = formats.reason
        elif how == "plan" and tied is not None:
            why = f"{_TIED} {tied!r}"
        elif how == "plan" and site in linear[-1:]:
            why = _LAST
        found.append(None if not sizes else f"{formats.compute}: {why}" if why else plan.products)
    return found


def check_rules(
    plan: Plan, sites: Sequence[Site], modules: Sequence[ModuleFormats], matched: Mapping[Site, Rule]
) -> None:
    """Raises a PlanError for a rule about products that reaches no layer, or none that can follow it."""
    for rule in (each for each in plan.rules if each.policy.products != "plan"):
        roots = [site for site, each in matched.items() if each == rule]
        below = [f for site, f in zip(sites, modules, strict=True) if any(_is_below(site, root) for root in roots)]
        layers = [f for f in below if f.products is not None]
        if not layers:
            raise PlanError(f"rule {rule.pattern!r} says how products run, but matches no linear layer")
        if rule.policy.products == "recipe" and all(f.products != plan.products for f in layers):
            raise PlanError(f"rule {rule.pattern!r} asks for {plan.products} products, but {_reasons(layers)}")


def _is_below(site: Site, root: Site) -> bool:
    inside = (f"{path}.".startswith(f"{top}.") or not top for path in site.paths for top in root.paths)
    return site.model == root.model and any(inside)


def _reasons(layers: Sequence[ModuleFormats]) -> str:
    return "; ".join(f"{formats.name or 'the model'} is in {formats.products}" for formats in layers)


def check_some_products(assignment: Assignment) -> None:
    """Raises a SetupError if no layer of the models multiplies by the plan's recipe, and not because a rule says so."""
    how = assignment.plan.products
    layers = [f for f in assignment.modules if f.products is not None]
    if how == "plan" or any(f.products == how or ": rule " in (f.products or "") for f in layers):
        return
    why = _reasons(layers) or "the model has no linear layer"
    rule = ", or have a rule ask for it: Rule(name, Policy(param, 'low', 'low', products='recipe'))"
    asks = any(reason in why for reason in (_LAST, _TIED))  # what other layers lack no rule changes
    raise SetupError(f"products={how!r} reaches no layer: {why}. Leave products out{rule if asks else ''}")
