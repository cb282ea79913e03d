"""Finds the modules of a model by name, what they are, and the rule that matches each; only reads the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from halfstep.edits import TYPE_PREFIX, Rule
from halfstep.errors import PlanError
from halfstep.torch_internals import CHECKPOINTED, COMPILED, BatchNormBase, buffers_of, compiled_module, parameters_of
from halfstep.validate import named, near_miss

NormKind = Literal["torch", "own"]

_TORCH_NORMS = (BatchNormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NAMED_NORM = re.compile(r".*Norm(\d+d?)?")  # T5LayerNorm, LlamaRMSNorm, FrozenBatchNorm2d, GroupNorm32


@dataclass(frozen=True, eq=False)
class Site:
    """A module of the model number `model`, and its dotted names there (`paths`): several if the module is shared."""

    model: int
    module: nn.Module
    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """The module's name in `named_modules()`."""
        return self.paths[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a pattern may match: the paths, with and without what wrappers add."""
        return (*self.paths, *(path for path in map(uncompiled, self.paths) if path not in self.paths))

    @property
    def type_names(self) -> tuple[str, ...]:
        """The short names of the module's class and of all its bases that are modules."""
        return tuple(cls.__name__ for cls in type(self.module).__mro__ if issubclass(cls, nn.Module))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the module's own parameters and buffers."""
        return (*parameters_of(self.module), *buffers_of(self.module))


def uncompiled(path: str) -> str:
    """Returns a module's path without what torch.compile and torch's checkpoint_wrapper add."""
    return ".".join(part for part in path.split(".") if part not in (COMPILED, CHECKPOINTED))


def find_sites(root: nn.Module, model: int) -> list[Site]:
    """Returns the modules of one model in the order of `named_modules()`, each with all its paths, parents first."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return [Site(model, module, tuple(names)) for module, names in paths.items()]


def together(name: str, model: nn.Module) -> tuple[str, ...]:
    """Returns the names, as in rules, of a module and of the modules outside of it that hold one of its parameters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> model[2].weight = model[0].weight
    >>> together("2", model), together("1", model)
    (('2', '0'), ('1',))
    """
    modules = {uncompiled(known): module for known, module in model.named_modules()}
    if name not in modules:
        return (name,)
    own = set(modules[name].parameters())
    outside = ((known, module) for known, module in modules.items() if not f"{known}.".startswith(f"{name}."))
    return (name, *(known for known, module in outside if not own.isdisjoint(parameters_of(module).values())))


def match_rules(rules: Sequence[Rule], sites: Sequence[Site]) -> Mapping[Site, Rule]:
    """Returns the modules that the pattern of a rule matches, by name or type, each with that rule."""
    matched: dict[Site, Rule] = {}
    unused = dict.fromkeys(rules)
    for site in sites:
        hits = [rule for rule in rules if rule.matches(site.names, site.type_names)]
        if len({(rule.policy, rule.buffers, rule.input) for rule in hits}) > 1:
            patterns = " and ".join(repr(rule.pattern) for rule in hits)
            raise PlanError(
                f"module {site.name!r} matches rules {patterns}, which disagree; narrow one of the patterns "
                "(a rule covers everything below what it matches, so the name of the outer module is enough)"
            )
        for rule in hits:
            matched.setdefault(site, rule)
            unused.pop(rule, None)
    for rule in unused:
        raise PlanError(f"rule {rule.pattern!r} matches no module{nearest(rule, sites)}")
    return matched


def match_parameters(patterns: Sequence[str], models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters whose dotted names fit patterns of `full_moments`; raises if one fits no parameter."""
    pairs = [(uncompiled(n), p) for model in models for n, p in model.named_parameters(remove_duplicate=False)]
    found: list[nn.Parameter] = []
    for pattern in patterns:
        hits = [p for name, p in pairs if fnmatchcase(name, pattern)]
        if not hits:
            names = [name for name, _ in pairs]
            hint = near_miss(pattern, names) or f"; the model has the parameters {_some(names)}"
            raise PlanError(f"pattern {pattern!r} of full_moments matches no parameter{hint}")
        found += hits
    return found


def nearest(rule: Rule, sites: Iterable[Site]) -> str:
    """Returns a hint for a rule that matches nothing: what to write instead, or the names to choose from."""
    names = [name for site in sites for name in site.names if name]
    types = list(dict.fromkeys(name for site in sites for name in site.type_names))
    if rule.pattern.startswith(TYPE_PREFIX):
        hint = near_miss(rule.pattern.removeprefix(TYPE_PREFIX), types)
        return hint.replace("mean '", f"mean '{TYPE_PREFIX}") or f"; the model has the classes {_some(types)}"
    deeper = Rule(f"*.{rule.pattern}", rule.policy)
    if any(deeper.matches(site.names, ()) for site in sites):
        return f"; did you mean {deeper.pattern!r}?"
    owner, _, leaf = rule.pattern.rpartition(".")
    for site in sites:
        if owner in site.names and leaf in site.tensors:
            return f"; it is a tensor of module {owner!r}: put the rule on the module"
    if rule.pattern in types:
        return f"; did you mean {TYPE_PREFIX + rule.pattern!r}?"
    if not names:
        return "; the model has no submodules: use '' for the model itself"
    return near_miss(rule.pattern, names) or f"; the model has the modules {_some(names)}"


def _some(names: Sequence[str]) -> str:
    return named(map(repr, names), 8) or "none"


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
    return inspect.isfunction(inspect.getattr_static(type(module), "forward", None)) and not is_fsdp1(module)


def is_fsdp1(module: nn.Module) -> bool:
    """Returns whether FullyShardedDataParallel (FSDP1) wraps a module."""
    return any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__)


def first_device(models: Sequence[nn.Module]) -> torch.device:
    """Returns the device of the first parameter; the CPU if there is no parameter (`device_of` refuses this)."""
    return next((p.device for model in models for p in model.parameters()), torch.device("cpu"))


def norm_kind(module: nn.Module) -> NormKind | None:
    """Returns "torch" or "own", depending on whose code normalises in the module; None if the module is not a norm."""
    # Torch's own kernels take low inputs with fp32 weights; in the model's own code low and fp32 values would mix.
    # One that contains other layers with weights (PreNorm with its attention) is not a norm itself.
    by_torch = isinstance(module, _TORCH_NORMS)
    if not by_torch and _NAMED_NORM.fullmatch(type(module).__name__) is None:
        return None
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    below = (each for each in module.modules() if each is not module and not isinstance(each, _TORCH_NORMS))
    holds_layers = any(p is not None for each in below for p in parameters_of(each).values())
    if not (by_torch and owner.__module__.startswith("torch.nn.modules.")) and not holds_layers:
        return "own"
    return "torch" if by_torch else None


def has_running_stats(module: nn.Module) -> bool:
    """Returns whether a batch or instance norm has running statistics as well as weights."""
    return isinstance(module, BatchNormBase) and bool(module.affine) and module.running_mean is not None
