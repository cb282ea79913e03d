"""Makes a probe from the user's settings: which modules, which kinds of tensors, how often, and how many elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from halfstep.edits import FULL, Rule
from halfstep.errors import ObserveError, PlanError
from halfstep.observe.probe import Probe
from halfstep.observe.rows import check_sample
from halfstep.observe.window import Overflows, owned
from halfstep.plan.matching import find_sites, nearest, uncompiled
from halfstep.records import TENSOR_KINDS, UPDATE, Observation
from halfstep.validate import near_miss, short

KINDS = (*TENSOR_KINDS, UPDATE)
_OF_PARAMETERS = {"weight", "weight_grad", UPDATE}


def make_probe(
    roots: Sequence[nn.Module],
    *,
    every: int,
    modules: str | Iterable[str],
    tensors: str | Iterable[str],
    sample: int | None,
    deliver: Sequence[Callable[[Observation], object]] = (),
    absorbed: Overflows | None = None,
) -> Probe:
    """Returns a probe on the modules that the patterns match and all modules inside them; see `Session.observe`."""
    whole = isinstance(every, int) and not isinstance(every, bool)
    if not whole or every < 1:
        raise ObserveError(f"every is {every!r}; pass an integer, 1 or more: every=10 observes one step in ten")
    check_sample(sample)
    kinds = _kinds(tensors, may_be_none=absorbed is not None)
    chosen = _chosen(roots, _patterns(modules))
    if not owned({name: module for root in roots for name, module in root.named_modules()}):
        raise ObserveError("the model has no floating-point parameter, so there is nothing to train or observe")
    parameters = owned(chosen).values()
    if UPDATE in kinds and any(p.device.type == "mps" for p, _, _ in parameters):
        raise ObserveError("updates are measured in float64, which MPS does not have; leave 'update' out of tensors")
    if kinds and kinds <= _OF_PARAMETERS and not parameters:
        raise ObserveError(
            f"tensors is {sorted(kinds)}, but none of the {len(chosen)} modules that {modules!r} matches has a "
            "floating-point parameter; name other modules, or observe their activations"
        )
    return Probe(chosen, kinds, every=every, sample=sample, deliver=deliver, absorbed=absorbed)


def check_delivery(
    log: Callable[[Observation], object] | None, absorbed: object
) -> list[Callable[[Observation], object]]:
    """Returns the function `log` in a list, which is empty if it is None; also checks the switch `absorbed`."""
    if not isinstance(absorbed, bool):
        raise ObserveError(
            f"absorbed is {short(absorbed)}; pass True to look for overflows that a later operation hides, or False"
        )
    if log is not None and not callable(log):
        raise ObserveError(f"log is {short(log)}; pass a function that is called with each Observation, or None")
    return [] if log is None else [log]


def _listed(name: str, given: Any, what: str) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise ObserveError(f"{name} is {given!r}; pass {what}, or a list of such strings")
    return list(given)


def _kinds(tensors: str | Iterable[str], *, may_be_none: bool) -> frozenset[str]:
    given = _listed("tensors", tensors, "a string such as 'activation'")
    for kind in given:
        if kind not in KINDS:
            allowed = ", ".join(map(repr, KINDS))
            raise ObserveError(f"tensors has {kind!r}; expected one of {allowed}{near_miss(kind, KINDS)}")
    if not given and not may_be_none:
        raise ObserveError(f"tensors is empty; name at least one of {', '.join(map(repr, KINDS))}")
    return frozenset(given)


def _patterns(modules: str | Iterable[str]) -> list[Rule]:
    given = _listed("modules", modules, "a pattern of module names as a string ('*' for all)")
    if not given:
        raise ObserveError("modules is empty; pass a pattern of module names ('*' for all)")
    try:
        return [Rule(pattern, FULL) for pattern in given]
    except PlanError as error:
        raise ObserveError(f"modules: {error}") from None


def _chosen(roots: Sequence[nn.Module], patterns: Sequence[Rule]) -> dict[str, nn.Module]:
    """Returns, by name, the modules that the patterns match and all modules inside them, in model order."""
    sites = [site for index, root in enumerate(roots) for site in find_sites(root, index)]
    wanted: set[int] = set()
    for pattern in patterns:
        hits = [site for site in sites if pattern.matches(site.names, site.type_names)]
        if not hits:
            raise ObserveError(f"the pattern {pattern.pattern!r} in modules matches no module{nearest(pattern, sites)}")
        wanted.update(id(module) for site in hits for module in site.module.modules())
    chosen: dict[str, nn.Module] = {}
    for site in sites:
        if id(site.module) in wanted:
            wanted.discard(id(site.module))
            prefix = [] if len(roots) == 1 else [str(site.model)]
            chosen[".".join([*prefix, *filter(None, [uncompiled(site.name)])])] = site.module
    return chosen
