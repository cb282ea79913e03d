"""A Plan as Keras's own dtype policies: what it gives each layer, and how the layers get it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from halfstep.adapters.keras.installed import keras
from halfstep.edits import FULL, TYPE_PREFIX, OpChanges, Policy, Rule
from halfstep.errors import PlanError
from halfstep.formats import BF16, FP16, FP32
from halfstep.plan.matching import Site, match_rules
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, ModuleFormats

NORMS = ("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization")
DTYPES = {BF16: "bfloat16", FP16: "float16", FP32: "float32"}
FORMATS = {name: fmt for fmt, name in DTYPES.items()}
_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function", "predict": "predict_function"}
_SHOWN = 5


def policy_map(plan: Plan) -> keras.dtype_policies.DTypePolicyMap:
    """Returns the plan as a map from a layer's path to its policy, for `dtype=` or `keras.config.set_dtype_policy`.

    Keras looks layers up in it as they are built, by path: a rule on a type finds those that have a name of Keras's
    making (`dense_1`), and none finds layers without weights, which have no path. `apply_plan` sees to the rest.

    Raises:
        PlanError: the plan asks for something that Keras's policies cannot say.
    """
    default = policy_name(plan, _of_plan(plan))
    entries: dict[str, list[str]] = {}
    rules = [rule for rule in plan.rules if rule.pattern]
    direct = {rule: _regex(rule) for rule in rules}
    below = {rule: f"{_regex(rule)}/.*" for rule in rules}
    named = "|".join(direct.values())
    for rule in rules:
        deeper = [below[other] for other in rules if _depth(other) > _depth(rule)]
        nearer = "|".join([*direct.values(), *deeper])
        alternatives = entries.setdefault(policy_name(plan, rule.policy), [])
        alternatives += [direct[rule], f"(?!(?:{nearer})$){below[rule]}"]
    if plan.param == "low" and plan.norms == "full":
        norms = "|".join(_regex(Rule(TYPE_PREFIX + name, FULL)) for name in NORMS)
        taken = "|".join([named, *below.values()])
        guard = f"(?!(?:{taken})$)" if rules else ""
        entries.setdefault(_mixed(plan), []).append(f"{guard}(?:{norms})")
    keys = {f"^(?:{'|'.join(alternatives)})$": policy for policy, alternatives in entries.items()}
    return keras.dtype_policies.DTypePolicyMap(
        default, {key: keras.DTypePolicy(policy) for key, policy in keys.items()}
    )


def set_plan(plan: Plan) -> keras.dtype_policies.DTypePolicyMap:
    """Makes the plan the global policy, which layers that are built from now on take; returns its map.

    Call it before the model is made and `apply_plan(model, plan)` after. `keras.config.set_dtype_policy("float32")`
    takes it back.

    Raises:
        PlanError: as `policy_map`, or a policy is set already.
    """
    present = keras.config.dtype_policy()
    if present.name != "float32" or isinstance(present, keras.dtype_policies.DTypePolicyMap):
        raise PlanError(
            f"the global policy is {present.name!r} already; take it back first: "
            "keras.config.set_dtype_policy('float32')"
        )
    made = policy_map(plan)
    keras.config.set_dtype_policy(made)
    return made


def apply_plan(model: keras.Model, plan: Plan) -> Assignment:
    """Gives every layer of a built model the policy that the plan has for it; prints as what each got, and why.

    A layer that was given a `dtype=` of its own keeps it, unless a rule names it.

    Raises:
        PlanError: the model is not built, has run already, or has weights that the plan stores in another format;
            a rule matches no layer; two rules disagree on a layer; or as `policy_map`. Nothing was changed.
    """
    decided = _decide(model, plan)
    ran = [name for name in ("fit", "evaluate", "predict") if getattr(model, _FUNCTIONS[name], None) is not None]
    if ran:
        raise PlanError(
            f"model {model.name!r} was compiled by model.{ran[0]}, and what runs is made already; call "
            "apply_plan(model, plan) before it, or model.compile(...) again and then apply_plan"
        )
    _check_stored(decided)
    for each in decided.values():
        if not each.holds:
            each.layer._dtype_policy = keras.DTypePolicy(each.policy)  # the setter would write into a shared map
    return describe(model, plan)


def describe(model: keras.Model, plan: Plan) -> Assignment:
    """Returns what each layer of a model has, and why; changes nothing.

    Raises:
        PlanError: the model is not built, a rule matches no layer, or two rules disagree on a layer.
    """
    modules = [
        _formats(path, each.layer, each.why if each.holds else f"not as planned ({each.policy}, {each.why})")
        for path, each in _decide(model, plan).items()
    ]
    return Assignment(plan, tuple(modules))


def layers_of(model: keras.Model, *, opaque: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the layers of a model that compute, the model itself as "" first, with their dotted paths in it.

    Of layers of the types `opaque` nothing inside is yielded.
    """
    seen: set[int] = set()

    def walk(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        yield path, layer
        for child in [] if isinstance(layer, opaque) else children_of(layer):
            yield from walk(child, f"{path}.{child.name}".removeprefix("."))

    yield from walk(model, "")


def children_of(layer: Any) -> list[Any]:
    """Returns the layers right below a layer that compute."""
    is_model = isinstance(layer, keras.Model)
    found = layer.layers if is_model else layer._flatten_layers(include_self=False, recursive=False)
    return [child for child in found if not isinstance(child, keras.layers.InputLayer)]


def own_variables(layer: Any) -> list[Any]:
    """Returns the weights of a layer that belong to none below it."""
    below = {id(v) for child in children_of(layer) for v in child.weights}
    return [v for v in layer.weights if id(v) not in below]


def policy_name(plan: Plan, policy: Policy) -> str:
    """Returns Keras's name of a policy of a plan.

    Keras casts inputs and weights of a layer to what it computes in, and returns that. A variable in fp32 under
    low computation is a master: it is rounded to low at each use.

    Raises:
        PlanError: there is none.
    """
    if policy.output not in ("input", policy.compute):
        raise PlanError(
            f"{policy!r} computes {policy.compute} and returns {policy.output}, but a layer of Keras returns what it "
            f"computes in, and the next casts it; give Policy({policy.param!r}, {policy.compute!r}, 'input')"
        )
    if policy.compute == "full":
        return "float32"
    return DTYPES[plan.low] if policy.param == "low" and plan.master == "none" else _mixed(plan)


def _mixed(plan: Plan) -> str:
    return f"mixed_{DTYPES[plan.low]}"


def _of_plan(plan: Plan) -> Policy:
    """Returns the policy of layers that no rule matches.

    Raises:
        PlanError: it is no plan, or one with something that Keras has no means for.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r:.80} is no Plan; give one, such as level('O1', 'fp16')")
    if plan.op_changes != OpChanges():
        raise PlanError(
            f"plan {plan.name!r} has op_changes, which change torch's op table, and Keras has none; give a rule on the "
            "layer, such as Rule('type:Softmax', FULL)"
        )
    for rule in plan.rules:
        if rule.buffers != "keep" or rule.input != "policy":
            raise PlanError(
                f"rule {rule.pattern!r} has buffers or input of its own; Keras keeps the variables of a layer in one "
                "format and casts its inputs to what it computes in: leave them out"
            )
    root = next((rule.policy for rule in plan.rules if not rule.pattern), None)
    if root is not None:
        return root
    return FULL if plan.ops == "none" else Policy(plan.param, "low", "low")


def _regex(rule: Rule) -> str:
    """Returns what the path of a layer that a rule matches looks like: parts between slashes, the model's own first."""
    if rule.pattern.startswith(TYPE_PREFIX):
        words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", rule.pattern.removeprefix(TYPE_PREFIX))
        words = re.sub(r"([A-Z])([A-Z][a-z])", r"\1_\2", words).lower()
        return rf"(?:.*/)?{_glob(words)}(?:_\d+)?"
    return f"(?:[^/]*/)?{_glob(rule.pattern.replace('.', '/'))}"


def _glob(pattern: str) -> str:
    return translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _depth(rule: Rule) -> int:
    return -1 if rule.pattern.startswith(TYPE_PREFIX) else rule.pattern.count(".")


class LayerSite(Site):
    """A layer of a Keras model, as rules see it."""

    @property
    def type_names(self) -> tuple[str, ...]:
        """The short names of its class and of all bases that are layers."""
        return tuple(cls.__name__ for cls in type(self.module).__mro__ if issubclass(cls, keras.layers.Layer))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its own variables."""
        layer: Any = self.module
        return tuple(v.name for v in layer.weights)


@dataclass(frozen=True)
class _Decision:
    """What a layer gets: the name of a policy, and why."""

    layer: Any
    policy: str
    why: str

    @property
    def dtypes(self) -> tuple[str, str]:
        """What it computes in, and what it stores."""
        policy = keras.DTypePolicy(self.policy)
        return policy.compute_dtype, policy.variable_dtype

    @property
    def holds(self) -> bool:
        """Whether the layer has it."""
        return (self.layer.compute_dtype, self.layer.variable_dtype) == self.dtypes


def _decide(model: keras.Model, plan: Plan) -> dict[str, _Decision]:
    """Returns by path what each layer gets: from a rule on it, its own dtype, a rule on what holds it, or the plan."""
    default = policy_name(plan, _of_plan(plan))
    if not model.built:
        raise PlanError(f"model {model.name!r} is not built, so its layers have no names; call model.build(shape)")
    found = dict(layers_of(model))
    sites = {path: LayerSite(0, layer, (path,)) for path, layer in found.items()}
    matched = match_rules(plan.rules, list(sites.values()))
    rules = {path: matched[site] for path, site in sites.items() if site in matched}
    was_set = any(_has_map(layer) for layer in found.values())
    decided: dict[str, _Decision] = {}
    for path, layer in found.items():
        policy, why = _by_plan(plan, path, layer, rules, default)
        own = layer.dtype_policy.name
        given = not _has_map(layer) and (was_set or own != "float32")  # fp32 is what layers have without any plan
        kept = given and own != policy and path not in rules
        decided[path] = _Decision(layer, own, "its own dtype") if kept else _Decision(layer, policy, why)
    return decided


def _by_plan(plan: Plan, path: str, layer: Any, rules: Mapping[str, Rule], default: str) -> tuple[str, str]:
    above = [".".join(path.split(".")[:length]) for length in range(path.count(".") + 1, -1, -1)]
    rule = next((rules[each] for each in above if each in rules), None)
    if rule is not None:
        return policy_name(plan, rule.policy), f"rule {rule.pattern!r}"
    if plan.param == "low" and plan.norms == "full" and type(layer).__name__ in NORMS:
        return _mixed(plan), "norms full"
    return default, plan.name


def _has_map(layer: Any) -> bool:
    return isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)


def _check_stored(decided: Mapping[str, _Decision]) -> None:
    wrong = [
        f"{path or '(model)'} ({stored.dtype}, planned is {each.dtypes[1]})"
        for path, each in decided.items()
        for stored in own_variables(each.layer)[:1]
        if "float" in stored.dtype and stored.dtype != each.dtypes[1]
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise PlanError(
            f"the model is built with weights in other formats than the plan's: {', '.join(wrong[:_SHOWN])}{more}; "
            "call set_plan(plan) before the model is made, and give layers with such a rule their dtype="
        )


def _formats(path: str, layer: Any, why: str) -> ModuleFormats:
    compute = FORMATS.get(layer.compute_dtype)
    stored = {FORMATS[v.dtype] for v in own_variables(layer) if v.dtype in FORMATS}
    return ModuleFormats(
        name=path,
        type_name=type(layer).__name__,
        param=stored.pop() if len(stored) == 1 else None,
        compute=compute,
        output=compute,
        boundary=False,
        buffers=None,
        reason=why,
    )
