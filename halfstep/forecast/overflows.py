"""Predicts which fp16 overflows later operations would absorb, that is turn into finite but wrong values.

Runs the forward pass of one step in fp16 to find them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.diagnose.closure import compute_loss
from halfstep.edits import Scaling
from halfstep.errors import SessionError
from halfstep.formats import FP16
from halfstep.initialize import initialize
from halfstep.observe.overflows import AbsorbedWatch
from halfstep.plan.levels import customize
from halfstep.plan.plan import Plan
from halfstep.records import Finding, Observation

NOT_FINITE = "not finite"  # the code of a finding


def absorbed_in_fp16(closure: Callable[[], Any], model: nn.Module, plan: Plan) -> tuple[Observation | Finding, ...]:
    """Returns the overflows absorbed in the forward pass of one step under `plan` in fp16."""
    still = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or model.parameters(), lr=0.0)
    with initialize(model, still, customize(plan, low=FP16).edit(Scaling("none"))) as session:
        watch = AbsorbedWatch(session.runtime.roots)
        try:
            with session.runtime.under(watch), watch:
                loss = compute_loss(closure, list(model.parameters()))
        except SessionError:
            raise
        except Exception as error:  # whatever the model raises
            evidence = f"a forward pass under {plan.name} in fp16 raises {type(error).__name__}: {error}"
            advice = "find the place and a cure with halfstep.check(session, closure) in a session with low='fp16'"
            return (Finding("warning", "step fails", "(model)", evidence, advice),)
        watch.end([loss])
        seen = tuple(watch.observations(0))
        if seen or bool(loss.isfinite()):
            return seen
        evidence = f"the loss of a forward pass under {plan.name} in fp16 is {float(loss.detach())}"
        advice = "find the operation and a cure with halfstep.blame(session, closure) in a session with low='fp16'"
        return (Finding("warning", NOT_FINITE, "(model)", evidence, advice),)
