"""Models that were loaded in bf16 or fp16, whose weights become the initial values of fp32 masters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from halfstep.cast.modules import cast_buffers
from halfstep.errors import SetupError
from halfstep.optim.masters import give_dtype
from halfstep.plan.compatibility import loaded_low, unwrap
from halfstep.plan.plan import Plan
from halfstep.processes.replicas import living_wrappers_of
from halfstep.processes.shards import reshard
from halfstep.torch_internals import parameters_of

_LOG = logging.getLogger("halfstep")
FOR_INFERENCE = "; for inference alone call model.requires_grad_(False) before, which keeps them as they are"


@contextmanager
def widened(
    models: Sequence[nn.Module], plan: Plan, made_low: Sequence[nn.Parameter], *, training: bool = True
) -> Iterator[None]:
    """Turns trainable parameters that came in bf16 or fp16 into fp32 ones, and back if an error comes inside.

    Buffers beside them too, as running statistics, which hardly move in a low format. Says what it did. `made_low` are
    parameters that a session has made low. `training` is False where no optimizer is there yet.

    Raises:
        SetupError: a model with such parameters is wrapped in DistributedDataParallel already.
    """
    reshard(models)  # else the low weights that FSDP2 gathered for an evaluation would be taken for the model's
    loaded = {id(p): p for p in loaded_low(models, plan, made_low)}
    roots = [unwrap(model) for model in models]
    if loaded and living_wrappers_of(roots):
        raise SetupError(
            "the model has been wrapped in DistributedDataParallel, and its trainable weights are low: they become "
            "fp32, which would silently end its gradient reduction. Initialize the plain model first and wrap it after"
        )
    put_back: list[Callable[[], None]] = [partial(give_dtype, p, p.dtype) for p in loaded.values()]
    message = _what_became(list(loaded.values()), plan) + ("" if training else FOR_INFERENCE)
    try:
        for module in {id(module): module for root in roots for module in root.modules()}.values():
            own = [p for p in parameters_of(module).values() if p is not None and id(p) in loaded]
            for parameter in own:
                give_dtype(parameter, torch.float32)
            if own:
                put_back.append(cast_buffers(module, torch.float32))
        yield
        if loaded:
            _LOG.warning(message)
    except BaseException:
        for undo in put_back:
            undo()
        raise


def _what_became(loaded: Sequence[nn.Parameter], plan: Plan) -> str:
    formats = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in loaded}))
    if plan.master != "none":
        what = "they are the low half of fp32 values now, which start from them and are trained"
    elif plan.param == "low":
        what = f"{plan.name} trains them without fp32 values beside them, which loses small updates; O2 keeps them"
    else:
        size = sum(p.numel() * (4 - p.itemsize) for p in loaded) / 2**20
        what = f"they are fp32 now, which takes {size:.1f} MiB more (O2 stores them low, beside what fp32 has beyond)"
    return (
        f"{len(loaded)} trainable parameters came in {formats}: {what}; state_dict() is fp32, and model.to(...) after "
        "session.close() gives the format that they came in"
    )
