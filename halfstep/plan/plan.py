"""The Plan: everything that decides how a model trains, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from halfstep.edits import Edit, OpChange, OpChanges, Rule, Scaling, Width
from halfstep.errors import PlanError
from halfstep.formats import BF16, LOW_FORMATS, Format, as_format, for_products
from halfstep.validate import as_tuple, instance, one_of, short, text, with_near_misses

Ops = Literal["none", "table"]
Master = Literal["none", "copy", "split"]
Moments = Literal["full", "bf16", "8bit"]
Rounding = Literal["nearest", "stochastic"]
PlanInput = Literal["keep", "low"]
PlanOutput = Literal["full", "low", "keep"]
Products = Literal["plan", "fp8", "fp8-row", "fp8-mx", "fp8-block", "nvfp4"]
_WORDS: Mapping[str, Any] = {
    **{"param": Width, "ops": Ops, "norms": Width, "master": Master, "output": PlanOutput, "input": PlanInput},
    **{"frozen": Width, "moments": Moments, "rounding": Rounding, "products": Products},
}


@with_near_misses
@dataclass(frozen=True)
class Plan:
    """How a model trains: which format, what is stored in it, which ops run in it, and how the update is kept precise.

    Attributes:
        low: the low-precision format, bf16 or fp16 (a torch.dtype or a name is accepted too).
        param: the width of stored weights.
        ops: "table" if the op table chooses the format of each op, "none" if ops run as written.
        norms: the width of normalisation parameters if weights are low.
        master: how the fp32 values of low weights are kept: as a "copy", "split" into the bf16 weight and 16 more bits,
            or not at all ("none").
        scale: the loss scale.
        output: the width of what the model returns; "keep": unchanged.
        input: "low" casts the model's inputs; with "keep" products cast their operands.
        frozen: the width of stored weights that no optimizer updates. "full" keeps what a loop averages into them
            exact; "low" stores them low, without masters.
        moments: how the averages of an optimizer (Adam's two, Lion's and SGD's one) are kept between steps: "full" as
            the optimizer keeps them, "bf16" rounded stochastically, "8bit" in codes of one byte.
        full_moments: patterns of dotted parameter names, such as "*embed*", whose averages stay "full".
        rounding: how updates of bf16 weights without a master are rounded.
        products: "plan" computes the products of linear layers in `low`; a recipe rounds their operands to 8 bits
            ("nvfp4": 4 bits) with scales of their own: "fp8" a scale for each tensor, "fp8-row" for each row, "fp8-mx"
            for 32 elements, "fp8-block" for 128 elements and for 128 x 128 weights.
        op_changes: ops that move to other lists of the op table.
        rules: what modules get instead, by name or type.

    Raises:
        PlanError: an invalid field, or fields that contradict each other; the message says why.
        FormatError: an unknown format.
    """

    name: str
    low: Format
    param: Width
    ops: Ops
    norms: Width
    master: Master
    scale: Scaling
    output: PlanOutput = "full"
    input: PlanInput = "keep"
    frozen: Width = "full"
    moments: Moments = "full"
    full_moments: tuple[str, ...] = ()
    rounding: Rounding = "nearest"
    products: Products = "plan"
    op_changes: OpChanges = field(default_factory=OpChanges)
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        text("plan name", self.name)
        object.__setattr__(self, "low", as_format(self.low, LOW_FORMATS))
        if self.low not in LOW_FORMATS:
            known = " or ".join(fmt.name for fmt in LOW_FORMATS)
            raise PlanError(
                f"plan low is {self.low.name}, in which halfstep cannot train; use {known}{for_products(self.low)}"
            )
        for name, kind in _WORDS.items():
            value = getattr(self, name)
            one_of(f"plan {name}", value, get_args(kind), hint=for_products(value) if kind is Products else "")
        patterns = as_tuple("plan full_moments", self.full_moments, of="patterns of parameter names")
        object.__setattr__(self, "full_moments", tuple(text("a pattern of full_moments", each) for each in patterns))
        instance("plan scale", self.scale, Scaling, "Scaling('dynamic')")
        instance("plan op_changes", self.op_changes, OpChanges, "OpChanges(deny=('softmax',))")
        object.__setattr__(self, "rules", as_tuple("plan rules", self.rules, of="Rules"))
        for rule in self.rules:
            instance("a rule of the plan", rule, Rule, "Rule('head', FULL)")
        for contradicts, why in CONTRADICTIONS:
            if contradicts(self):
                raise PlanError(f"plan {self.name!r}: {why}")
        _check_rules(self)

    def edit(self, *edits: Edit) -> Plan:
        """Returns the plan with these edits made in order; later edits win.

        A Rule replaces the rule with the same pattern, an OpChange moves its op to another list, a Scaling replaces the
        loss scale.

        Raises:
            PlanError: a value that is not an edit, or an edit that contradicts the plan.
        """
        plan = self
        for edit in edits:
            if isinstance(edit, Rule):
                kept = tuple(rule for rule in plan.rules if rule.pattern != edit.pattern)
                plan = replace(plan, rules=(*kept, edit))
            elif isinstance(edit, OpChange):
                plan = replace(plan, op_changes=plan.op_changes.moved(edit))
            elif isinstance(edit, Scaling):
                plan = replace(plan, scale=edit)
            else:
                held = isinstance(edit, (list, tuple)) and all(isinstance(each, Edit) for each in edit)
                several = "; pass each by itself: plan.edit(*edits)" if held else ""
                raise PlanError(
                    f"edit {short(edit)} is not an edit; expected a Rule, an OpChange or a Scaling{several}"
                )
        return plan


def multiple_of(products: Products) -> int:
    """Returns what both sizes of a weight must be multiples of for a recipe, as units for 8 bits need it."""
    return 32 if products == "fp8-mx" else 16


CONTRADICTIONS: tuple[tuple[Callable[[Plan], bool], str], ...] = (
    (
        lambda plan: plan.param == "full" and plan.master != "none",
        "a master keeps the fp32 value of low-precision weights, but this plan keeps weights in fp32 (param 'full'); "
        "use master 'none', or level O2",
    ),
    (
        lambda plan: plan.master == "split" and plan.low != BF16,
        "master 'split' needs bf16 weights, whose bits are the upper half of fp32's; use master 'copy' for fp16",
    ),
    (
        lambda plan: plan.param == "full" and plan.norms != "full",
        "norms 'low' stores normalisation weights in low precision, but this plan keeps all weights in fp32 (param "
        "'full') and the op table decides how norms compute; leave norms out, or move an op such as 'layer_norm'",
    ),
    (
        lambda plan: plan.param == "full" and plan.frozen != "full",
        "frozen 'low' stores weights that no optimizer updates in low precision, but this plan keeps all weights in "
        "fp32 (param 'full'); leave frozen out, or use level O2",
    ),
    (
        lambda plan: plan.rounding != "nearest" and (plan.param, plan.master, plan.low) != ("low", "none", BF16),
        "rounding 'stochastic' is for bf16 weights without a master, which alone are rounded at each update, but this "
        "plan has none; leave rounding out, or use level O3 in bf16",
    ),
    (
        lambda plan: plan.products != "plan" and plan.ops == "none",
        "products in 8 or 4 bits need the op table, but with ops 'none' everything runs as written; use O1 or O2",
    ),
    (
        lambda plan: plan.products != "plan" and plan.low != BF16,
        "products in 8 or 4 bits have results in bf16, but low is fp16; use low='bf16'",
    ),
    (
        lambda plan: plan.products != "plan" and plan.param == "low" and plan.master == "none",
        "products in 8 or 4 bits need weights with an fp32 value, but this plan keeps bf16 weights without masters; "
        "use O1 or O2",
    ),
    (
        lambda plan: plan.products == "plan" and any(rule.policy.products != "plan" for rule in plan.rules),
        "a rule says how products run in 8 bits, but products is 'plan', which has none; pass products='fp8', or "
        "remove the rule",
    ),
    (
        lambda plan: plan.param == "low" and plan.ops == "none",
        "weights are in low precision but ops is 'none': fp32 values (rotary tables, masks, torch.zeros states) would "
        "meet them in matrix products and fail; use ops 'table', as O2 does",
    ),
    (
        lambda plan: plan.ops == "none" and plan.scale.active,
        "a loss scale keeps low-precision gradients from underflow, but with ops 'none' no gradient is in low "
        "precision; use scale kind 'none', or level O1",
    ),
    (
        lambda plan: plan.ops == "none" and bool(plan.rules),
        "rules say which modules compute low or full, but with ops 'none' everything runs as written; "
        "remove the rules, or use level O1",
    ),
    (
        lambda plan: plan.ops == "none" and plan.output != "keep",
        "with ops 'none' nothing is cast, so the model's output stays as it is; use output 'keep'",
    ),
    (
        lambda plan: plan.ops == "none" and plan.input != "keep",
        "with ops 'none' nothing is cast, so the model's input stays as it is; use input 'keep'",
    ),
    (
        lambda plan: plan.ops == "none" and plan.op_changes != OpChanges(),
        "op_changes change the op table, but ops is 'none', so no table is used; remove them, or use ops 'table'",
    ),
)


def _check_rules(plan: Plan) -> None:
    seen: dict[str, Rule] = {}
    for rule in plan.rules:
        if rule.pattern in seen:
            how = "twice" if seen[rule.pattern] == rule else "twice, and the two disagree"
            raise PlanError(f"plan {plan.name!r} has rule {rule.pattern!r} {how}; remove one of them")
        seen[rule.pattern] = rule
        if plan.param == "full" and rule.policy.param == "low":
            raise PlanError(
                f"plan {plan.name!r}: rule {rule.pattern!r} stores parameters in low precision, but this plan "
                "keeps all weights in fp32 (param 'full'); use Policy('full', ...) in the rule, or level O2"
            )
