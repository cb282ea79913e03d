"""FSDP2: the mixed precision policy that `fully_shard` is given for a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.formats import FP32, Format, as_format
from halfstep.machine import read_facts
from halfstep.plan.choose import choose_plan
from halfstep.plan.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fsdp_policy(
    plan: Plan | str = "O1",
    *,
    low: Format | torch.dtype | str | None = None,
    reduce: Format | torch.dtype | str = FP32,
) -> MixedPrecisionPolicy:
    """Returns the `mp_policy` of `fully_shard` for a model that `halfstep.initialize` is to train under a plan.

    Weights are stored and updated in fp32 shards, which are the masters, and gathered in the low format; gradients are
    summed over the processes in `reduce`. What goes into and out of the modules is left to the plan. `plan` and `low`
    are those of `initialize`. The order is `fully_shard`, optimizer, `initialize`:

        policy = halfstep.fsdp_policy("O2", low="bf16")
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        session = halfstep.initialize(model, optimizer, "O2", low="bf16")

    All weights are gathered low, those of norms and embeddings too, and widened where the plan reads them in fp32.
    Modules whose weights are to be exact get a group of their own before the others:
    `fully_shard([*norms], mp_policy=halfstep.fsdp_policy("O0"))`.

    Raises:
        PlanError: no such level, no plan, or a plan file that cannot be read.
        FormatError: an unknown format.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # which takes a second to import

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, _ = choose_plan(plan, low, read_facts(device))
    return MixedPrecisionPolicy(
        param_dtype=None if chosen.ops == "none" else chosen.low.dtype,
        reduce_dtype=as_format(reduce).dtype,
        output_dtype=None,
        cast_forward_inputs=False,
    )
