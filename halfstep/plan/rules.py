"""A rule: a pattern on module names or types and the policy that it gives them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from halfstep.errors import PlanError
from halfstep.plan.checks import one_of, text
from halfstep.plan.policy import Policy

BufferWidth = Literal["keep", "low", "full"]
RuleInput = Literal["policy", "keep", "low"]
TYPE_PREFIX = "type:"


@dataclass(frozen=True)
class Rule:
    """A pattern and the policy of the modules it matches, with everything below them.

    `pattern` is a glob over dotted module names ("head", "blocks.*.attn"; `*` runs over dots too; "" is the root), or
    "type:LayerNorm", a glob over the short name of the module's class or any of its bases. `buffers` says what happens
    to the floating-point buffers there: kept as they are, or stored low or full. `input` says what happens to the
    floating-point inputs of what it matches: cast as the policy needs it (fp32 where it computes full, low where its
    weights are low and what calls it has another policy), kept as they come, or cast to low.

    Raises:
        PlanError: a pattern that is no text or can match nothing, a policy that is no Policy, an unknown buffer width
            or input, or an input other than the policy's where it computes full, since its ops would get mixed formats.

    >>> Rule("blocks.*.attn", Policy("full", "full", "input")).matches(("blocks.3.attn",), ())
    True
    """

    pattern: str
    policy: Policy
    buffers: BufferWidth = "keep"
    input: RuleInput = "policy"

    def __post_init__(self) -> None:
        text("rule pattern", self.pattern, empty=True)
        if self.pattern.removeprefix(TYPE_PREFIX) != self.pattern.removeprefix(TYPE_PREFIX).strip():
            raise PlanError(f"rule pattern {self.pattern!r} has blanks around it; module names have none: remove them")
        if self.pattern == TYPE_PREFIX:
            raise PlanError("rule pattern 'type:' names no class; give one, such as 'type:LayerNorm'")
        prefix = re.match(r"(?i)type *[:=] *", self.pattern)
        if prefix and not self.pattern.startswith(TYPE_PREFIX):
            meant = TYPE_PREFIX + self.pattern[prefix.end() :]
            raise PlanError(f"rule pattern {self.pattern!r} matches no module name; did you mean {meant!r}?")
        if not isinstance(self.policy, Policy):
            raise PlanError(
                f"rule {self.pattern!r} has policy {self.policy!r}; give a Policy, such as halfstep.plan.FULL or LOW"
            )
        one_of(f"rule {self.pattern!r}: buffers", self.buffers, get_args(BufferWidth))
        one_of(f"rule {self.pattern!r}: input", self.input, get_args(RuleInput))
        if self.input != "policy" and self.policy.compute == "full":
            raise PlanError(
                f"rule {self.pattern!r} has input {self.input!r} and computes full: its ops would get low inputs "
                "beside fp32 weights; leave the input out, which casts it to fp32"
            )

    def matches(self, names: Iterable[str], type_names: Iterable[str]) -> bool:
        """Returns whether one of a module's dotted names, or of its class names, fits the pattern."""
        if self.pattern.startswith(TYPE_PREFIX):
            pattern = self.pattern.removeprefix(TYPE_PREFIX)
            return any(fnmatchcase(name, pattern) for name in type_names)
        return any(fnmatchcase(name, self.pattern) for name in names)
