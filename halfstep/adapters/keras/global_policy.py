"""Translates a plan into names of Keras policies, and into the map in which Keras finds the policy of a new layer."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Sequence
from fnmatch import translate
from typing import Any

from halfstep.adapters.keras.backend import keras
from halfstep.edits import FULL, TYPE_PREFIX, OpChanges, Policy, Rule
from halfstep.errors import PlanError
from halfstep.formats import BF16, FP16, FP32
from halfstep.plan.plan import Plan

NORMS = ("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization")
DTYPES = {BF16: "bfloat16", FP16: "float16", FP32: "float32"}
_LOG = logging.getLogger("halfstep")
_UNSEEN = "rules_not_seen_yet"  # on the map that is set: those of which `apply_plan` has not said what they match


def policy_map(plan: Plan) -> keras.dtype_policies.DTypePolicyMap:
    """Returns the plan as a map from a layer's path to its policy, for `dtype=` or `keras.config.set_dtype_policy`.

    When a layer is built, Keras looks up the layer's path in this map. A path contains names but no types, so a rule on
    a type works only for layers whose names Keras made from the type (`dense_1`). Layers without weights have no path,
    so no rule works for them. `apply_plan` has neither of these limits.

    Raises:
        PlanError: the plan has a setting that Keras policies cannot express.
    """
    default = policy_name(plan, policy_of(plan))
    entries: dict[str, list[str]] = {}
    rules = [rule for rule in plan.rules if rule.pattern]
    direct = {rule: _regex(rule) for rule in rules}
    below = {rule: f"{_regex(rule)}/.*" for rule in rules}
    for rule in rules:
        deeper = [below[other] for other in rules if _depth(other) > _depth(rule)]
        nearer = "|".join([*direct.values(), *deeper])
        alternatives = entries.setdefault(policy_name(plan, rule.policy), [])
        alternatives += [direct[rule], f"(?!(?:{nearer})$){below[rule]}"]
    if plan.param == "low" and plan.norms == "full":
        norms = "|".join(_regex(Rule(TYPE_PREFIX + name, FULL)) for name in NORMS)
        taken = "|".join([*direct.values(), *below.values()])
        guard = f"(?!(?:{taken})$)" if rules else ""
        entries.setdefault(mixed_name(plan), []).append(f"{guard}(?:{norms})")
    found = {f"^(?:{'|'.join(paths)})$": keras.DTypePolicy(policy) for policy, paths in entries.items()}
    return keras.dtype_policies.DTypePolicyMap(default, found)


def set_plan(plan: Plan, *, others: tuple[keras.Model, ...] = ()) -> keras.dtype_policies.DTypePolicyMap:
    """Sets the plan as Keras's global policy, for layers that are built from now on; returns the policy map.

    Call it before the model is made, and `apply_plan(model, plan)` after. `keras.config.set_dtype_policy("float32")`
    undoes it. Models that are already built keep their policies, and a warning names those that are not in `others`.

    Raises:
        PlanError: as `policy_map`, or a global policy is already set.
    """
    present = keras.config.dtype_policy()
    if present.name != "float32" or isinstance(present, keras.dtype_policies.DTypePolicyMap):
        raise PlanError(
            f"the global policy is already {present.name!r}; reset it first: keras.config.set_dtype_policy('float32')"
        )
    made = policy_map(plan)
    built = built_models(others)
    if built:
        _LOG.warning(
            f"models built before set_plan keep their policies: {', '.join(built[:3])}; call apply_plan(model, plan), "
            "or list the models that should keep them: set_plan(plan, others=(model,))"
        )
    vars(made)[_UNSEEN] = [rule for rule in plan.rules if rule.pattern]
    keras.config.set_dtype_policy(made)
    return made


def built_models(others: tuple[keras.Model, ...]) -> list[str]:
    """Returns the names, quoted and sorted, of built models that still exist, except `others`."""
    gc.collect()  # what was deleted, and waits for it
    models = [each for each in gc.get_objects() if issubclass(type(each), keras.Model)]
    known = {id(each) for each in others}
    known |= {id(each._functional) for each in models if isinstance(each, keras.Sequential)}  # what runs inside of one
    known |= {id(layer) for each in models for layer in each._flatten_layers(include_self=False)}  # models in others
    return sorted(repr(each.name) for each in models if each.built and each.weights and id(each) not in known)


def rules_seen() -> None:
    """Records that `apply_plan` has checked the global policy's rules, so that `tell_unseen_rules` does not warn."""
    vars(keras.config.dtype_policy()).pop(_UNSEEN, None)


def tell_unseen_rules(variables: Sequence[Any]) -> None:
    """Warns once about rules of the global policy that match none of the layers that own `variables`."""
    unseen: list[Rule] = vars(keras.config.dtype_policy()).pop(_UNSEEN, [])
    parts = [v.path.split("/")[:-1] for v in variables]
    paths = {"/".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}
    unmatched = [rule.pattern for rule in unseen if not any(re.fullmatch(_regex(rule), path) for path in paths)]
    if unmatched:
        _LOG.warning(
            f"rules {', '.join(map(repr, unmatched))} match no layer whose weights are trained; "
            "call apply_plan(model, plan) before model.compile: it says what every rule matches"
        )


def policy_name(plan: Plan, policy: Policy) -> str:
    """Returns Keras's name for a policy of a plan."""
    if policy.output not in ("input", policy.compute):
        raise PlanError(
            f"{policy!r} computes {policy.compute} and returns {policy.output}, but the output of a Keras layer has "
            "the format in which the layer computes, and the next layer casts it; use "
            f"Policy({policy.param!r}, {policy.compute!r}, 'input')"
        )
    if policy.compute == "full":
        return "float32"
    return DTYPES[plan.low] if policy.param == "low" and plan.master == "none" else mixed_name(plan)


def mixed_name(plan: Plan) -> str:
    """Returns the name of the Keras policy that computes in the plan's low format with fp32 variables: `mixed_...`."""
    return f"mixed_{DTYPES[plan.low]}"


def policy_of(plan: Plan) -> Policy:
    """Returns the plan's policy for layers that no rule matches."""
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r:.80} is not a Plan; pass one, such as level('O1', 'fp16')")
    for wrong, why in (
        (
            plan.op_changes != OpChanges(),
            "op_changes, which change torch's op table, but Keras has no op table; use a rule on the layer instead, "
            "such as Rule('type:Softmax', FULL)",
        ),
        (
            plan.moments != "full",
            f'moments {plan.moments!r}, but Keras\'s own optimizers keep their states; use moments="full"',
        ),
        (
            plan.products != "plan",
            f'products {plan.products!r}, but Keras\'s layers multiply by themselves; use products="plan"',
        ),
    ):
        if wrong:
            raise PlanError(f"plan {plan.name!r} has {why}")
    for rule in plan.rules:
        if rule.buffers != "keep" or rule.input != "policy":
            raise PlanError(
                f"rule {rule.pattern!r} sets buffers or input, but Keras stores all variables of a layer in one format "
                "and casts inputs to the format in which the layer computes; leave buffers and input out"
            )
    root = next((rule.policy for rule in plan.rules if not rule.pattern), None)
    if root is not None:
        return root
    return FULL if plan.ops == "none" else Policy(plan.param, "low", "low")


def _regex(rule: Rule) -> str:
    """Returns a regular expression for the paths ("model/block/layer") of the layers that a rule matches."""
    if rule.pattern.startswith(TYPE_PREFIX):
        words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", rule.pattern.removeprefix(TYPE_PREFIX))
        words = re.sub(r"([A-Z])([A-Z][a-z])", r"\1_\2", words).lower()
        return rf"(?:.*/)?{_glob(words)}(?:_\d+)?"
    return f"(?:[^/]*/)?{_glob(rule.pattern.replace('.', '/'))}"


def _glob(pattern: str) -> str:
    return translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def _depth(rule: Rule) -> int:
    return -1 if rule.pattern.startswith(TYPE_PREFIX) else rule.pattern.count(".")
