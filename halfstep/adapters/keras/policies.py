"""Applies a plan as Keras dtype policies: decides which policy each layer gets, and sets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from halfstep.adapters.keras.backend import keras
from halfstep.adapters.keras.global_policy import DTYPES, NORMS, mixed_name, policy_name, policy_of, rules_seen
from halfstep.edits import Rule
from halfstep.errors import PlanError
from halfstep.plan.matching import Site, match_rules
from halfstep.plan.plan import Plan
from halfstep.plan.resolve import Assignment, ModuleFormats
from halfstep.validate import named

FORMATS = {name: fmt for fmt, name in DTYPES.items()}
_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function", "predict": "predict_function"}
_OWN = "its own dtype"
_GIVEN = "policy_given_by_plan"  # on a layer: the policy that it has from a plan, and the one it had before


def apply_plan(model: keras.Model, plan: Plan) -> Assignment:
    """Sets the plan's policy on every layer of a built model; print the result to see what each layer got, and why.

    A layer that was made with its own `dtype=` keeps it, unless a rule matches it. A second plan replaces the first. If
    an error is raised, the model is unchanged.

    Raises:
        PlanError: the model is not built, has run already, or was made under another global policy; the model stores
            weights in another format than the plan; a rule matches no layer, or two rules disagree on a layer; or the
            plan has a setting that Keras policies cannot express.
    """
    decided = _decide(model, plan)
    _check_not_compiled(decided)
    _check_takes(model, plan, decided)
    _check_stored(decided)
    rules_seen()
    for each in decided.values():
        if not each.holds:
            _give(each.layer, each.policy)
    return describe(model, plan)


def _give(layer: Any, name: str) -> None:
    before = _without_plan(layer)
    layer._dtype_policy = keras.dtype_policies.get(name)  # the setter would write into a shared map
    vars(layer)[_GIVEN] = (layer._dtype_policy, before)
    if isinstance(layer, keras.layers.Normalization) and layer.built:  # it keeps what it subtracts in what it computes
        layer.build_from_config(layer.get_build_config()) if layer.input_mean is not None else layer.finalize_state()


def _without_plan(layer: Any) -> Any:
    """Returns the policy that a layer had before any plan was applied."""
    # If no plan has changed the layer's policy, or other code has set another policy since, returns the current one.
    given, before = vars(layer).get(_GIVEN, (None, None))
    return before if layer._dtype_policy is given else layer._dtype_policy


def describe(model: keras.Model, plan: Plan) -> Assignment:
    """Returns the formats that each layer of a model has now, and the reason for them; changes nothing."""
    modules = [
        _formats(path, each.layer, each.why if each.holds else f"not as planned, which is {each.policy} ({each.why})")
        for path, each in _decide(model, plan).items()
    ]
    return Assignment(plan, tuple(modules))


def layers_of(model: keras.Model, *, opaque: tuple[type, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (dotted path, layer) for each layer of a model except input layers; ("", model) is the first."""
    seen: set[int] = set()

    def walk(layer: Any, path: str) -> Iterator[tuple[str, Any]]:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        yield path, layer
        for name, child in [] if isinstance(layer, opaque) else named_children(layer):
            yield from walk(child, f"{path}.{name}".removeprefix("."))

    yield from walk(model, "")


def children_of(layer: Any) -> list[Any]:
    """Returns the direct sublayers of a layer, except input layers, which compute nothing."""
    is_model = isinstance(layer, keras.Model)
    found = layer.layers if is_model else layer._flatten_layers(include_self=False, recursive=False)
    return [child for child in found if not isinstance(child, keras.layers.InputLayer)]


def named_children(layer: Any) -> list[tuple[str, Any]]:
    """Returns (name, sublayer) for the direct sublayers of a layer; a second one called `name` becomes `name_1`."""
    named: dict[str, Any] = {}
    children = children_of(layer)
    taken = {child.name for child in children}
    for child in children:
        more = (name for number in count(1) if (name := f"{child.name}_{number}") not in taken)
        name = next(more) if child.name in named else child.name
        taken.add(name)
        named[name] = child
    return list(named.items())


def own_variables(layer: Any) -> list[Any]:
    """Returns the weights of a layer that belong to none of its sublayers."""
    below = {id(v) for child in children_of(layer) for v in child.weights}
    return [v for v in layer.weights if id(v) not in below]


class LayerSite(Site):
    """A layer of a Keras model, with the names by which the rules of a plan match it."""

    @property
    def type_names(self) -> tuple[str, ...]:
        """The short names of the layer's class and of all base classes that are layers."""
        return tuple(cls.__name__ for cls in type(self.module).__mro__ if issubclass(cls, keras.layers.Layer))

    @property
    def tensors(self) -> tuple[str, ...]:
        layer: Any = self.module
        return tuple(v.name for v in layer.weights)


@dataclass(frozen=True)
class _Decision:
    """The policy that a layer gets, by name, and why it gets this one."""

    layer: Any
    policy: str
    why: str

    @property
    def dtypes(self) -> tuple[str, str]:
        policy = keras.dtype_policies.get(self.policy)
        return policy.compute_dtype, policy.variable_dtype

    @property
    def holds(self) -> bool:
        """Whether the layer has the dtypes of the policy."""
        return (self.layer.compute_dtype, self.layer.variable_dtype) == self.dtypes


def _decide(model: keras.Model, plan: Plan) -> dict[str, _Decision]:
    """Returns a dict from the path of each layer to the policy that it gets."""
    default = policy_name(plan, policy_of(plan))
    if not model.built:
        raise PlanError(f"model {model.name!r} is not built, so its layers have no names; call model.build(shape)")
    found = dict(layers_of(model))
    sites = {path: LayerSite(0, layer, _names(path, layer)) for path, layer in found.items()}
    matched = match_rules(plan.rules, list(sites.values()))
    rules = {path: matched[site] for path, site in sites.items() if site in matched}
    was_set = any(_is_map(_without_plan(layer)) for layer in found.values())
    decided: dict[str, _Decision] = {}
    for path, layer in found.items():
        policy, why = _by_plan(plan, path, layer, rules, default)
        before = _without_plan(layer)
        given = not _is_map(before) and (was_set or before.name != "float32")  # which layers have without any plan
        kept = given and before.name != policy and path not in rules
        decided[path] = _Decision(layer, before.name, _OWN) if kept else _Decision(layer, policy, why)
    return decided


def _names(path: str, layer: Any) -> tuple[str, ...]:
    """Returns the names of a layer that rules can match: its path and, if different, a path with its Keras name."""
    above = path.rpartition(".")[0]
    named = f"{above}.{layer.name}".removeprefix(".") if path else path
    return (path,) if named == path else (path, named)


def _by_plan(plan: Plan, path: str, layer: Any, rules: Mapping[str, Rule], default: str) -> tuple[str, str]:
    above = [".".join(path.split(".")[:length]) for length in range(path.count(".") + 1, -1, -1)]
    rule = next((rules[each] for each in above if each in rules), None)
    if rule is not None:
        return policy_name(plan, rule.policy), f"rule {rule.pattern!r}"
    if plan.param == "low" and plan.norms == "full" and type(layer).__name__ in NORMS:
        return mixed_name(plan), "norms full"
    return default, plan.name


def _is_map(policy: Any) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def _check_not_compiled(decided: Mapping[str, _Decision]) -> None:
    models = [each.layer for each in decided.values() if isinstance(each.layer, keras.Model)]
    for model in models:  # those inside of the model too
        ran = next((name for name, function in _FUNCTIONS.items() if getattr(model, function, None) is not None), None)
        if ran is not None:
            raise PlanError(
                f"model {model.name!r} was compiled by model.{ran}, and compiled code would not follow the plan; call "
                f"apply_plan(model, plan) before model.{ran}, or call model.compile(...) again and then apply_plan"
            )


def _check_takes(model: keras.Model, plan: Plan, decided: Mapping[str, _Decision]) -> None:
    """Refuses a model that was made under another global policy, since its layers would keep that policy."""
    kept = {path: each.policy for path, each in decided.items() if each.why == _OWN}
    low = next((policy for policy in kept.values() if policy != "float32"), None)
    if low is not None and ("" in kept or len(kept) == len(decided) - 1):
        raise PlanError(
            f"model {model.name!r} was made or saved under the policy {low!r}, which its layers would keep instead of "
            f"the policies of plan {plan.name!r}; call keras.config.set_dtype_policy('float32') before making the "
            "model, and load saved weights into it rather than loading a saved model"
        )


def _check_stored(decided: Mapping[str, _Decision]) -> None:
    wrong = [
        f"{path or '(model)'} ({stored.dtype}, expected {each.dtypes[1]})"
        for path, each in decided.items()
        for stored in own_variables(each.layer)[:1]
        if "float" in stored.dtype and stored.dtype != each.dtypes[1]
    ]
    if wrong:
        raise PlanError(
            f"the model stores weights in other formats than the plan: {named(wrong)}; "
            "call set_plan(plan) before making the model, and pass dtype= to layers that get their format from a rule"
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
