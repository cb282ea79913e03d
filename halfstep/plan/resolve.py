"""Decides which formats a plan gives each module of a model; reads the model, changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from halfstep.edits import FULL, BufferWidth, Policy, Rule, RuleInput, Width
from halfstep.errors import PlanError, SetupError
from halfstep.formats import FP32, Format
from halfstep.plan.compatibility import check_rules, choose_products
from halfstep.plan.matching import (
    Site,
    enterable,
    find_sites,
    has_running_stats,
    match_rules,
    norm_kind,
    uncompiled,
    unwrap,
)
from halfstep.plan.optable import check_op_changes
from halfstep.plan.plan import Plan
from halfstep.sharded import is_sharded
from halfstep.torch_internals import compiled_module, parameters_of
from halfstep.validate import as_list, instance, near_miss, with_near_misses

# Children whose weights the parent uses without calling them, so that nothing can be done at their own forward.
BORROWED: tuple[tuple[type[nn.Module], str], ...] = ((nn.MultiheadAttention, "out_proj"),)
QUANTIZED = ("torch.ao.nn.quantized.", "torch.nn.quantized.")


@dataclass(frozen=True)
class ModuleFormats:
    """The formats that a plan gives one module.

    Attributes:
        param: in which the module's own parameters are stored; None if it has none.
        kept: those that stay in fp32 although the plan stores weights low, since no optimizer updates them.
        compute: in which ops of the op table's allow list run; None if nothing is cast.
        buffers: of its floating buffers; None: unchanged.
        boundary: whether each call casts floating inputs to `input` and outputs to `output` (None: unchanged).
        output: "input" is the format of the first floating input.
        door: whether the plan also applies when user code calls the module directly, as in `model.encoder(x)`.
        reason: what decided.
        aliases: further names of a shared module.
        model: the number of the model, from 0.
        products: of a linear layer in a plan with a recipe for products: the recipe, or why it computes in `compute`.
    """

    name: str
    type_name: str
    param: Format | None
    compute: Format | None
    output: Format | Literal["input"] | None
    boundary: bool
    buffers: Format | None
    reason: str
    input: Format | None = None
    aliases: tuple[str, ...] = ()
    model: int = 0
    door: bool = False
    kept: tuple[str, ...] = ()
    products: str | None = None

    def stored(self, name: str) -> Format | None:
        """Returns the format in which the module's own parameter of this name is stored, if it is an fp32 one."""
        return FP32 if name in self.kept else self.param


@dataclass(frozen=True)
class Assignment:
    """A plan and the formats that it gives each module, in the order of `named_modules()`, model by model."""

    plan: Plan
    modules: tuple[ModuleFormats, ...]

    def by_products(self) -> dict[str, tuple[str, ...]]:
        """Returns the names of the linear layers by how they multiply: the recipe, or why not by it."""
        found: dict[str, tuple[str, ...]] = {}
        for name, formats in zip(self.names(), self.modules, strict=True):
            if formats.products is not None:
                found[formats.products] = (*found.get(formats.products, ()), name)
        return found

    def names(self) -> tuple[str, ...]:
        """Returns the dotted names of all modules; with several models, as in "1.encoder"."""
        several = any(formats.model > 0 for formats in self.modules)
        return tuple(
            ".".join([*([str(formats.model)] if several else []), *filter(None, [uncompiled(formats.name)])])
            for formats in self.modules
        )

    @with_near_misses
    def of(self, name: str, *, model: int = 0) -> ModuleFormats:
        """Returns the formats of the module with this dotted name; "" is the model itself.

        Raises:
            PlanError: there is no such module.
        """
        own = [formats for formats in self.modules if formats.model == model]
        here = {each: formats for formats in own for each in (formats.name, *formats.aliases)}
        if name not in here:
            raise PlanError(f"model {model} has no module {name!r}; it has {len(here)} modules{near_miss(name, here)}")
        return here[name]

    def __str__(self) -> str:
        several = any(formats.model > 0 for formats in self.modules)
        more = self.plan.products != "plan"
        header = ("module", "type", "param", "compute", "output", *(["products"] if more else []), "why")
        rows = [header, *(_row(formats, several=several, products=more) for formats in self.modules)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join((f"plan {self.plan.name} in {self.plan.low}", *lines))


def _row(formats: ModuleFormats, *, several: bool, products: bool) -> tuple[str, ...]:
    name = f"{formats.model}:" * several + (formats.name or "(model)")
    cells = (formats.param, formats.compute, formats.output, *[formats.products] * products)
    return (name, formats.type_name, *("-" if word is None else str(word) for word in cells), formats.reason)


@dataclass(frozen=True)
class _Decision:
    policy: Policy
    buffers: BufferWidth
    reason: str
    input: RuleInput = "policy"
    ruled: bool = False
    stored_full: bool = False  # its own parameters, whatever `policy.param` says

    @property
    def param(self) -> Width:
        return "full" if self.stored_full else self.policy.param

    def enters_from(self, caller: _Decision) -> bool:
        """Returns whether a module with this decision casts inputs and outputs if its caller's decision is `caller`."""
        # What level O1 hands on depends on the op, so that a rule with its very policy still decides the output.
        by_policy = _formats_of(self.policy) != _formats_of(caller.policy) or (
            self.ruled and not caller.ruled and self.policy.param == "full" and self.policy.products == "plan"
        )
        return by_policy or (self.input != "policy" and self.input != caller.input)


@with_near_misses
def resolve(
    plan: Plan,
    model: nn.Module | Sequence[nn.Module],
    *,
    made_low: Iterable[nn.Parameter] = (),
    untrained: Iterable[nn.Parameter] = (),
) -> Assignment:
    """Returns the formats that the plan gives each module of a model, or of several models trained together.

    `made_low` are parameters that an earlier session stores low. They count as fp32, because that session ends before
    this plan applies, and they are fp32 again then. `untrained` are parameters that no optimizer updates: they stay in
    fp32 unless `plan.frozen` or a rule says low (sharded ones are fp32 already, and are gathered as the plan says).

    The rule that matches the module or its nearest ancestor decides; without such a rule, the plan decides.
    `plan.output` decides what the model itself returns. If weights are low and `plan.norms` is "full", norms have fp32
    parameters: torch's norm classes take low inputs with them, and classes of the model's own whose name ends in "Norm"
    compute in fp32. A rule that matches a norm decides instead.

    Raises:
        PlanError: a rule matches nothing, two rules disagree on a module, a tied parameter or a shared module would get
            two formats, a rule requires what the module or its kernel cannot do, or an op change names no op; or `plan`
            is not a Plan.
        SetupError: `model` is neither a module nor a list of modules, or a module is scripted.
    """
    instance("plan", plan, Plan, "halfstep.level('O2', 'bf16')")
    roots = [unwrap(each) for each in as_list(model, nn.Module, "model")]
    check_op_changes(plan.op_changes)
    sites = [site for number, root in enumerate(roots) for site in find_sites(root, number)]
    for site in sites:
        if isinstance(site.module, torch.jit.ScriptModule):
            raise SetupError(
                f"the module {site.name or '(model)'!r} is scripted (TorchScript), and halfstep cannot enter its "
                "forward; pass the Python module that it was made from, and use torch.compile for speed"
            )
    matched = match_rules(plan.rules, sites)
    modules: list[ModuleFormats] = []
    fp32 = {id(p) for p in made_low}
    kept = {id(p) for p in untrained if not is_sharded(p)} if plan.frozen == "full" else set()
    for number in range(len(roots)):
        modules += _assign(plan, [site for site in sites if site.model == number], matched, fp32, kept)
    check_rules(plan, sites, modules, matched)
    _check_shared(sites, modules)
    _check_tied(sites, modules, fp32)
    return Assignment(plan, tuple(modules))


def check_forwards(models: Sequence[nn.Module], plan: Plan) -> None:
    """Refuses modules whose forward a plan cannot be entered around."""
    for name, module in (pair for model in models for pair in model.named_modules()):
        if plan.ops != "none" and inspect.isgeneratorfunction(type(module).forward):
            what = f"{type(module).__name__} {name!r}" if name else f"the model ({type(module).__name__})"
            raise SetupError(
                f"the forward of {what} is a generator, whose code would run after the call, where the plan has ended; "
                "return the values (as a list) instead of yielding them, or move the loop that yields to a method"
            )


def _assign(
    plan: Plan, sites: Sequence[Site], matched: Mapping[Site, Rule], fp32: Container[int], untrained: Container[int]
) -> list[ModuleFormats]:
    at = {path: site for site in sites for path in site.paths}
    decided: dict[str, _Decision] = {}
    callers: dict[str, _Decision | None] = {"": None}
    start = _Decision(Policy(plan.param, "low", "low"), "keep", plan.name)
    if plan.ops == "none":
        start = _Decision(FULL, "keep", f"{plan.name}: as written")
    for path in sorted(at, key=lambda path: len(path.split(".")) if path else 0):  # parents first
        parent = path.rpartition(".")[0]
        above, owner = (decided[parent], at[parent].module) if path else (start, None)
        decided[path] = _decide(plan, at[path], matched.get(at[path]), above, owner)
        if path:
            callers[path] = callers[parent] if _is_uncalled(at[parent].module) else decided[parent]
            _check_borrowed(path, decided[path], parent, at[parent].module, callers[path])
    formats = [
        _keep(_formats(plan, each, decided, callers, fp32), plan, each, decided, fp32, untrained) for each in sites
    ]
    if plan.products == "plan":
        return formats
    chosen = choose_products(plan, sites, formats, [decided[site.name].policy.products for site in sites])
    return [replace(each, products=how) for each, how in zip(formats, chosen, strict=True)]


def _formats_of(policy: Policy) -> Policy:
    return replace(policy, products="plan")


def _is_uncalled(module: nn.Module) -> bool:
    """Returns whether a module only holds others: it has no forward (ModuleList), or is torch.compile's wrapper."""
    return type(module).forward is nn.Module.forward or compiled_module(module) is not None


def _decide(plan: Plan, site: Site, rule: Rule | None, above: _Decision, owner: nn.Module | None) -> _Decision:
    """Returns the decision for a module: by the `rule` that matches it, or else by its parent's (`above`, `owner`)."""
    statistics = has_running_stats(site.module)
    if rule is not None:
        if statistics and (rule.policy.param == "low") != (rule.buffers == "low"):
            raise PlanError(
                f"rule {rule.pattern!r} gives {type(site.module).__name__} {site.name!r} {rule.policy.param} weights "
                f"with buffers {rule.buffers!r}, but its kernel needs weights and running statistics that are both low "
                "or both fp32; use param 'low' with buffers 'low', or param 'full' with buffers 'keep'"
            )
        return _Decision(rule.policy, rule.buffers, f"rule {rule.pattern!r}", rule.input, ruled=True)
    full = None  # why it computes in fp32 although no rule says so
    if plan.param == "low" and isinstance(owner, ParametrizationList):
        full = "parametrizations full"
    elif type(site.module).__module__.startswith(QUANTIZED):
        full = "quantized: takes fp32"
    kind = norm_kind(site.module) if plan.param == "low" and above.policy.compute == "low" else None
    if full is None and kind == "own" and plan.norms == "full":
        full = "norms full: own class"
    if full is not None and above.policy.compute == "low":
        return _Decision(FULL, above.buffers, full, ruled=True)
    decision = above
    if kind == "torch" and plan.norms == "full":
        decision = replace(above, stored_full=True, reason="norms full")
    elif statistics and above.param == "low" and above.buffers != "low":
        decision = replace(above, stored_full=True, reason="running statistics are full")
    if statistics and decision.param == "full" and above.buffers == "low":
        decision = replace(decision, buffers="keep")
    return decision


def _formats(
    plan: Plan,
    site: Site,
    decided: Mapping[str, _Decision],
    callers: Mapping[str, _Decision | None],
    fp32: Container[int],
) -> ModuleFormats:
    decision = decided[site.name]
    for path in site.paths:
        if replace(decided[path], reason=decision.reason) != decision:
            raise PlanError(
                f"{type(site.module).__name__} is shared as {site.name!r} ({decision.reason}) and {path!r} "
                f"({decided[path].reason}), which would give it two policies; put the same rule on both"
            )
    formats = ModuleFormats(
        name=site.name,
        type_name=type(site.module).__name__,
        param=_width(plan, decision.param) if _own_fp32(site.module, fp32) else None,
        compute=None,
        output=None,
        boundary=False,
        buffers=None if decision.buffers == "keep" else _width(plan, decision.buffers),
        reason=decision.reason,
        aliases=site.paths[1:],
        model=site.model,
    )
    if plan.ops == "none":
        return formats
    computes_a_weight = "parametrizations" in site.name.split(".")  # also for code outside of the model, in fp32
    door = not computes_a_weight and _is_door(plan, site.module, decision, fp32)
    formats = replace(formats, compute=_width(plan, decision.policy.compute), door=door)
    entries = [callers[path] for path in site.paths]
    if _is_uncalled(site.module) or not any(caller is None or decision.enters_from(caller) for caller in entries):
        return formats
    into_full = any(caller is not None and caller.policy.compute == "full" for caller in entries)
    output = "full" if into_full and decision.policy.output == "low" else decision.policy.output  # nothing casts there
    given = _input(plan, decision, root=None in entries)
    if None in entries:
        made = None if plan.output == "keep" else _width(plan, plan.output)
        return replace(formats, boundary=True, input=given, output=made)
    return replace(formats, boundary=True, input=given, output="input" if output == "input" else _width(plan, output))


def _keep(  # all that it depends on
    formats: ModuleFormats,
    plan: Plan,
    site: Site,
    decided: Mapping[str, _Decision],
    fp32: Container[int],
    untrained: Container[int],
) -> ModuleFormats:
    """Returns the formats of a module whose `untrained` parameters stay in fp32, unless a rule says low."""
    own = _own_fp32(site.module, fp32)
    kept = tuple(name for name, p in own if id(p) in untrained)
    if not kept or decided[site.name].param == "full" or decided[site.name].ruled:
        return formats
    whole = len(kept) == len(own)
    reason = f"{formats.reason}, no optimizer" + ("" if whole else f" for {', '.join(kept)}")
    formats = replace(formats, kept=kept, param=FP32 if whole else formats.param, reason=reason)
    reads = isinstance(site.module, (nn.Embedding, nn.EmbeddingBag)) and formats.compute is plan.low
    if not reads or formats.boundary or not enterable(site.module):
        return formats
    return replace(formats, boundary=True, output=plan.low)


def _is_door(plan: Plan, module: nn.Module, decision: _Decision, fp32: Container[int]) -> bool:
    """Returns whether calling this submodule directly, as in `model.encoder(x)`, must enter the plan."""
    # It must if the submodule computes low and holds a weight that the plan stores low or that a product casts.
    own_forward = "forward" in module.__dict__ and compiled_module(module) is None
    called = own_forward or not _is_uncalled(module)
    if decision.policy.compute == "full" or not called or not enterable(module):
        return False
    if decision.param == "low" and _own_fp32(module, fp32):
        return True
    norms = plan.norms == "low"
    return any(_own_fp32(each, fp32) for each in module.modules() if norms or norm_kind(each) is None)


def _width(plan: Plan, width: Width) -> Format:
    return FP32 if width == "full" else plan.low


def _input(plan: Plan, decision: _Decision, *, root: bool) -> Format | None:
    """Returns the format that inputs are cast to at a boundary, None if they are not cast."""
    # `root` is true for the model itself. It gets the user's data, which a cast to low would damage silently; modules
    # below it get what other modules computed.
    if decision.policy.compute == "full":
        return FP32
    if decision.input != "policy":
        return plan.low if decision.input == "low" else None
    return plan.low if (plan.input if root else decision.policy.param) == "low" else None


def _own_fp32(module: nn.Module, fp32: Container[int]) -> list[tuple[str, nn.Parameter]]:
    own = [(name, p) for name, p in parameters_of(module).items() if p is not None]
    return [(name, p) for name, p in own if p.dtype is torch.float32 or id(p) in fp32]


def _check_borrowed(path: str, decision: _Decision, parent: str, owner: nn.Module, caller: _Decision | None) -> None:
    borrowed = any(isinstance(owner, kind) and path.rpartition(".")[2] == child for kind, child in BORROWED)
    if borrowed and caller is not None and decision.enters_from(caller):
        raise PlanError(
            f"{decision.reason} covers {path!r}, but {type(owner).__name__} {parent!r} never calls that module: it "
            f"only uses its weights; put the rule on {parent!r}"
        )


def _check_shared(sites: Sequence[Site], modules: Sequence[ModuleFormats]) -> None:
    first: dict[nn.Module, ModuleFormats] = {}
    for site, formats in zip(sites, modules, strict=True):
        other = first.setdefault(site.module, formats)
        if replace(formats, name=other.name, aliases=other.aliases, model=other.model, reason=other.reason) != other:
            raise PlanError(
                f"{formats.name!r} of model {formats.model} and {other.name!r} of model {other.model} are the same "
                "module, but get different formats; pass only the outer model to initialize, or put the same rule on "
                "both"
            )


def _check_tied(sites: Sequence[Site], modules: Sequence[ModuleFormats], fp32: Container[int]) -> None:
    first: dict[nn.Parameter, tuple[str, ModuleFormats, Format | None]] = {}
    for site, formats in zip(sites, modules, strict=True):
        for name, parameter in _own_fp32(site.module, fp32):
            full_name = f"{formats.name}.{name}".removeprefix(".")
            stored = formats.stored(name)
            other_name, other, before = first.setdefault(parameter, (full_name, formats, stored))
            if stored != before:
                raise PlanError(
                    f"{full_name!r} and {other_name!r} are one tied parameter, but module {formats.name!r} "
                    f"({formats.reason}) stores it in {stored} and module {other.name!r} ({other.reason}) in "
                    f"{before}; give both modules the same rule"
                )
