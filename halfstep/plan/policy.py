"""The formats of one module, relative to the plan: what is stored, what is computed in, what is handed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from halfstep.errors import PlanError
from halfstep.plan.checks import one_of

Width = Literal["full", "low"]
OutputWidth = Literal["full", "low", "input"]


@dataclass(frozen=True)
class Policy:
    """The width of a module's parameters, of its computation and of its output.

    "full" is fp32, "low" is the plan's low format; an output of "input" has the format of the module's input.

    Raises:
        PlanError: a width that is none, or low parameters under full computation, which no op accepts.
    """

    param: Width
    compute: Width
    output: OutputWidth

    def __post_init__(self) -> None:
        one_of("policy param", self.param, get_args(Width))
        one_of("policy compute", self.compute, get_args(Width))
        one_of("policy output", self.output, get_args(OutputWidth))
        if self.param == "low" and self.compute == "full":
            raise PlanError(
                "policy has param 'low' and compute 'full': ops would get low weights with full inputs and fail; "
                "keep the parameters full too, Policy('full', 'full', ...)"
            )


FULL = Policy("full", "full", "input")
LOW = Policy("low", "low", "low")
