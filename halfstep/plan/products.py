"""Which linear layers of a model multiply by the recipe of a plan, and why others do not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from halfstep.edits import ProductsOf, Rule
from halfstep.errors import PlanError, SetupError
from halfstep.formats import CASTABLE, FP32
from halfstep.plan.matching import Site, enterable
from halfstep.plan.plan import Plan, multiple_of
from halfstep.torch_internals import parameters_of

if TYPE_CHECKING:
    from halfstep.plan.resolve import Assignment, ModuleFormats

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
