"""FSDP2: the mixed precision policy to pass to `fully_shard` for a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfstep.formats import FP32, Format, as_format
from halfstep.machine import read_facts
from halfstep.plan.io import choose_plan
from halfstep.plan.plan import Plan
from halfstep.validate import with_near_misses

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@with_near_misses
def fsdp_policy(
    plan: Plan | str = "O1",
    *,
    low: Format | torch.dtype | str | None = None,
    reduce: Format | torch.dtype | str = FP32,
) -> MixedPrecisionPolicy:
    """Returns the `mp_policy` of `fully_shard` for a model that `halfstep.initialize` will train under a plan.

    Weights are stored and updated as fp32 shards, which are the masters. They are gathered in the low format; at O0, in
    fp32. Gradients are summed over the processes in the format `reduce`. The formats of the inputs and outputs of
    modules are set by the plan, not by this policy. `plan` and `low` are those of `initialize`. Call `fully_shard`
    first, then create the optimizer, then call `initialize`:

        policy = halfstep.fsdp_policy("O2", low="bf16")
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        session = halfstep.initialize(model, optimizer, "O2", low="bf16")

    All weights are gathered in the low format, even those of norms and embeddings that the plan uses in fp32; they are
    widened after the gather. To keep the weights of some modules exact, shard these modules first, as a separate group:
    `fully_shard([*norms], mp_policy=halfstep.fsdp_policy("O0"))`.

    Raises:
        PlanError: `plan` is not a known level, a Plan, or a plan file that can be read.
        FormatError: `low` or `reduce` is not a known format.
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
