"""Models that were loaded in bf16 or fp16, whose weights become the initial values of fp32 masters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.cast.modules import cast_buffers
from halfstep.optim.masters import give_dtype
from halfstep.optim.state import widen_states
from halfstep.plan.compatibility import loaded_low, unwrap
from halfstep.plan.plan import Plan
from halfstep.processes.shards import reshard
from halfstep.processes.wrappers import refuse_wrapped
from halfstep.torch_internals import parameters_of

_LOG = logging.getLogger("halfstep")
FOR_INFERENCE = "; for inference only, call model.requires_grad_(False) first, which keeps the parameters as they are"


@contextmanager
def widened(
    models: Sequence[nn.Module], plan: Plan, made_low: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Converts trainable parameters that were loaded in bf16 or fp16 to fp32; an error inside the context undoes this.

    Also converts the state that `optimizers` have for them, and the buffers of their modules, since a low format rounds
    away most changes of running statistics. Logs what was converted. `made_low` are parameters that are low because of
    a session; they are left alone. Without optimizers, the log also says how to keep the formats for inference.

    Raises:
        SetupError: a model with such parameters is already wrapped in DistributedDataParallel.
    """
    reshard(models)  # else the low weights that FSDP2 gathered for an evaluation would be taken for the model's
    loaded = {id(p): p for p in loaded_low(models, plan, made_low)}
    roots = [unwrap(model) for model in models]
    if loaded:
        refuse_wrapped(roots, "its trainable weights in low precision become fp32")
    put_back: list[Callable[[], None]] = [partial(give_dtype, p, p.dtype) for p in loaded.values()]
    message = _what_became(list(loaded.values()), plan) + ("" if optimizers else FOR_INFERENCE)
    try:
        for module in {id(module): module for root in roots for module in root.modules()}.values():
            own = [p for p in parameters_of(module).values() if p is not None and id(p) in loaded]
            for parameter in own:
                give_dtype(parameter, torch.float32)
            if own:
                put_back.append(cast_buffers(module, torch.float32))
        put_back += [widen_states(optimizer, loaded.values()) for optimizer in optimizers]
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
        what = "each now has an fp32 master, which starts from the loaded value and is what is trained"
    elif plan.param == "low":
        what = f"{plan.name} trains them without fp32 masters, which loses small updates; O2 keeps masters"
    else:
        size = sum(p.numel() * (4 - p.itemsize) for p in loaded) / 2**20
        what = f"they are fp32 now, which takes {size:.1f} MiB more (O2 stores them low, with an fp32 master for each)"
    return (
        f"{len(loaded)} trainable parameters were loaded in {formats}: {what}. state_dict() is fp32; to get the "
        "original format back, call model.to(...) after session.close()"
    )
