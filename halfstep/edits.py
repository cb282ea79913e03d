"""The values that make and edit a plan: policies, rules, op changes and loss scales."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from halfstep.errors import PlanError
from halfstep.validate import as_tuple, count, one_of, real, text, with_near_misses


def _code(value: Any) -> str:
    """Returns Python code that constructs `value`; fields that have their default are left out."""
    given = [
        _literal(getattr(value, each.name))
        if each.default is MISSING
        else f"{each.name}={_literal(getattr(value, each.name))}"
        for each in fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def _literal(value: object) -> str:
    # All digits, since the edit is copied: 2^24 and not 1.67772e+07.
    whole = isinstance(value, float) and value.is_integer() and value < 1e15
    return f"{value:.0f}" if whole else repr(value)


Width = Literal["full", "low"]
OutputWidth = Literal["full", "low", "input"]
ProductsOf = Literal["plan", "low", "recipe"]


@with_near_misses
@dataclass(frozen=True)
class Policy:
    """The width of a module's parameters, of its computation and of its output.

    "full" is fp32, "low" is the plan's low-precision format; an output of "input" has the format of the module's input.
    `products` is for plans with 8-bit products: "low" keeps those of the module's layers in the low format, "recipe"
    runs them by the plan's recipe, also in layers that the plan leaves out (the last one, and those tied to an
    embedding); "plan" leaves it to the plan.
    `halfstep.FULL` is `Policy("full", "full", "input")`, and `halfstep.LOW` is `Policy("low", "low", "low")`.

    Raises:
        PlanError: an unknown width, or low parameters with full computation, which no op accepts.
    """

    param: Width
    compute: Width
    output: OutputWidth
    products: ProductsOf = "plan"

    def __post_init__(self) -> None:
        one_of("policy param", self.param, get_args(Width))
        one_of("policy compute", self.compute, get_args(Width))
        one_of("policy output", self.output, get_args(OutputWidth))
        one_of("policy products", self.products, get_args(ProductsOf))
        if self.compute == "full" and self.products != "plan":
            raise PlanError(
                f"policy products is {self.products!r}, but compute 'full' runs products in fp32; leave it out"
            )
        if self.param == "low" and self.compute == "full":
            raise PlanError(
                "policy has param 'low' and compute 'full': ops would get low-precision weights with fp32 inputs and "
                "fail; keep the parameters full too, Policy('full', 'full', ...)"
            )

    def __repr__(self) -> str:
        return next((name for name, each in (("FULL", FULL), ("LOW", LOW)) if each == self), None) or _code(self)


FULL = Policy("full", "full", "input")
LOW = Policy("low", "low", "low")

BufferWidth = Literal["keep", "low", "full"]
RuleInput = Literal["policy", "keep", "low"]
TYPE_PREFIX = "type:"


@with_near_misses
@dataclass(frozen=True)
class Rule:
    """The policy of all modules that match a pattern, and of all modules inside them.

    Attributes:
        pattern: a glob over dotted module names, such as "head" or "blocks.*.attn" (`*` matches dots too, "" is the
            root); or "type:" and a glob over names of classes and base classes, such as "type:LayerNorm".
        buffers: how floating-point buffers are stored: "keep" (unchanged), "low" or "full".
        input: how floating-point inputs of the matched modules are cast: "keep" (not at all), "low", or "policy": to
            fp32 if the module computes full, to low if its weights are low and the calling module has another policy.

    Raises:
        PlanError: a pattern that is not text or can match nothing, a policy that is not a Policy, an unknown `buffers`
            or `input`, or an `input` other than "policy" for modules that compute full, whose ops would mix formats.

    >>> Rule("blocks.*.attn", Policy("full", "full", "input")).matches(("blocks.3.attn",), ())
    True
    """

    pattern: str
    policy: Policy
    buffers: BufferWidth = "keep"
    input: RuleInput = "policy"

    def __post_init__(self) -> None:
        if isinstance(self.pattern, type):
            raise PlanError(f"rule pattern is the class {self.pattern.__name__}; write 'type:{self.pattern.__name__}'")
        text("rule pattern", self.pattern, empty=True)
        if self.pattern.removeprefix(TYPE_PREFIX) != self.pattern.removeprefix(TYPE_PREFIX).strip():
            raise PlanError(f"rule pattern {self.pattern!r} has a space before or after the name; remove the space")
        if self.pattern == TYPE_PREFIX:
            raise PlanError("rule pattern 'type:' names no class; add one, such as 'type:LayerNorm'")
        prefix = re.match(r"(?i)type *[:=] *", self.pattern)
        if prefix and not self.pattern.startswith(TYPE_PREFIX):
            meant = TYPE_PREFIX + self.pattern[prefix.end() :]
            raise PlanError(f"rule pattern {self.pattern!r} matches no module name; did you mean {meant!r}?")
        if not isinstance(self.policy, Policy):
            raise PlanError(f"rule {self.pattern!r} has policy {self.policy!r}; expected a Policy, such as FULL or LOW")
        one_of(f"rule {self.pattern!r}: buffers", self.buffers, get_args(BufferWidth))
        one_of(f"rule {self.pattern!r}: input", self.input, get_args(RuleInput))
        if self.input != "policy" and self.policy.compute == "full":
            raise PlanError(
                f"rule {self.pattern!r} computes full but has input {self.input!r}: its ops would mix low-precision "
                "inputs and fp32 weights; leave out `input`, and inputs are cast to fp32"
            )

    __repr__ = _code

    def matches(self, names: Iterable[str], type_names: Iterable[str]) -> bool:
        """Returns whether one of a module's dotted names, or of its class names, fits the pattern."""
        if self.pattern.startswith(TYPE_PREFIX):
            pattern = self.pattern.removeprefix(TYPE_PREFIX)
            return any(fnmatchcase(name, pattern) for name in type_names)
        return any(fnmatchcase(name, self.pattern) for name in names)


OpList = Literal["allow", "deny", "infer", "promote"]
OP_LISTS: tuple[OpList, ...] = get_args(OpList)


def _op_name(where: str, op: object) -> None:
    """Raises a PlanError unless `op` is a public torch name, or "module:function"."""
    name = text(f"an op in {where}", op)
    module, colon, function = name.partition(":")
    parts = [module, function] if colon else [module]
    if not all(part and all(word.isidentifier() for word in part.split(".")) for part in parts):
        raise PlanError(
            f"op {name!r} in {where} is not a function name; use a public torch name such as 'softmax', "
            "or 'module:function' such as 'my_ops:swish'"
        )


@with_near_misses
@dataclass(frozen=True)
class OpChange:
    """One op and the list that it moves to.

    The lists are allow (runs low), deny (runs full), infer (runs as its inputs are) and promote (runs in the widest
    format of its inputs). `op` is a public torch name such as "softmax", or "module:function" for a function that is
    not a torch op.

    Raises:
        PlanError: an unknown list, or an invalid op name.
    """

    list: OpList
    op: str

    def __post_init__(self) -> None:
        one_of("op change: list", self.list, OP_LISTS)
        _op_name(self.list, self.op)

    __repr__ = _code


@with_near_misses
@dataclass(frozen=True)
class OpChanges:
    """The ops that a plan moves to other lists of the op table; each field takes a tuple or a list of op names.

    Raises:
        PlanError: a field that is not a list of names, an invalid op name, or an op that is listed twice.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    infer: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        listed: dict[str, str] = {}
        for field in fields(self):
            ops = as_tuple(f"op changes: {field.name}", getattr(self, field.name), of="op names")
            object.__setattr__(self, field.name, ops)
            for op in ops:
                _op_name(field.name, op)
                if op in listed:
                    where = (
                        f"twice in {field.name}" if listed[op] == field.name else f"in {listed[op]} and {field.name}"
                    )
                    raise PlanError(f"op {op!r} is listed {where}; list each op only once")
                listed[op] = field.name

    def listed(self) -> list[tuple[OpList, str]]:
        """Returns a (name of the list, op) pair for each op, grouped by list."""
        return [(name, op) for name in OP_LISTS for op in getattr(self, name)]

    def moved(self, change: OpChange) -> OpChanges:
        """Returns these changes with one op moved to the list that `change` names.

        >>> OpChanges(allow=("softmax",)).moved(OpChange("deny", "softmax"))
        OpChanges(allow=(), deny=('softmax',), infer=(), promote=())
        """
        lists = {field.name: tuple(op for op in getattr(self, field.name) if op != change.op) for field in fields(self)}
        lists[change.list] += (change.op,)
        return OpChanges(**lists)


ScalingKind = Literal["none", "static", "dynamic"]

SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_RANGES = {
    **dict.fromkeys(("init", "min", "max"), (SMALLEST_SCALE, LARGEST_SCALE)),
    "growth": (1.0, LARGEST_SCALE),
    "backoff": (SMALLEST_SCALE, 1.0),
}
_USED_BY = {"none": ("kind",), "static": ("kind", "init")}  # the fields of the kinds that do not adapt


@with_near_misses
@dataclass(frozen=True)
class Scaling:
    """The kind of loss scale and, for a dynamic one, its schedule (Micikevicius et al. 2018, section 3.2).

    `kind` is "none", "static" or "dynamic". A static scale is always `init` and uses no other field. A dynamic scale
    starts at `init` and stays within [`min`, `max`]. It is multiplied by `growth` after `growth_interval` steps in a
    row without overflow. It is multiplied by `backoff` at the `hysteresis`-th overflow since it last grew, and at every
    overflow after that one. Scales and their inverses are normal fp32 numbers, so scales are in [2**-126, 2**126].

    Raises:
        PlanError: a value that is out of range, or that this kind of scale does not use.

    >>> Scaling("static", init=128).init
    128.0
    """

    kind: ScalingKind
    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    min: float = 1.0
    max: float = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        one_of("scale kind", self.kind, get_args(ScalingKind))
        for name, (low, high) in _RANGES.items():
            object.__setattr__(self, name, real(f"scale {name}", getattr(self, name), low=low, high=high))
        for name in ("growth_interval", "hysteresis"):
            object.__setattr__(self, name, count(f"scale {name}", getattr(self, name)))
        if not self.adapts:
            for field in fields(self):
                if field.name not in _USED_BY[self.kind] and getattr(self, field.name) != field.default:
                    raise PlanError(
                        f"scale {field.name} is {getattr(self, field.name)!r}, but a scale of kind {self.kind!r} does "
                        "not use it; leave it out, or use kind 'dynamic'"
                    )
            return
        for wrong, why in (
            (self.growth == 1, "growth is 1, so the scale could never recover; set it above 1, for example to 2"),
            (self.backoff == 1, "backoff is 1, so every overflow would repeat; set it below 1, for example to 0.5"),
            (self.min > self.max, f"min {self.min:g} is above max {self.max:g}; swap them or widen the range"),
            (
                not self.min <= self.init <= self.max,
                f"init {self.init:g} is outside [min, max] = [{self.min:g}, {self.max:g}]; set init within that range, "
                "or change min or max",
            ),
        ):
            if wrong:
                raise PlanError(f"scale {why}")

    __repr__ = _code

    @property
    def active(self) -> bool:
        """Whether the loss is scaled at all."""
        return self.kind != "none"

    @property
    def adapts(self) -> bool:
        """Whether the scale adapts to overflows, within [`min`, `max`]."""
        return self.kind not in _USED_BY

    @property
    def first(self) -> float:
        """The scale of the first step; 1 if the loss is not scaled."""
        return self.init if self.active else 1.0


Edit = Rule | OpChange | Scaling


def spell(edits: Iterable[Edit]) -> str:
    """Returns the call of `plan.edit` that makes these edits, as Python code.

    >>> spell([Rule("head", FULL), Scaling("dynamic", init=2.0**24)])
    "plan.edit(Rule('head', FULL), Scaling('dynamic', init=16777216))"
    """
    return f"plan.edit({', '.join(map(repr, edits))})"
