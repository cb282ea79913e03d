"""The ways to compute an update: compiled loops, Triton, torch's fused kernels, and the law itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_internals import foreach_add_, foreach_copy_, fused_adam_, fused_adamw_, fused_sgd_
from halfstep.train.kernels import devices, native
from halfstep.train.kernels.batch import Batch, Scratch, chunks, is_dense
from halfstep.train.optim.laws import Group, Row, write
from halfstep.train.optim.masters import storable
from halfstep.train.optim.moments import close, opened, rounded_weight

# Updates the weights, the extras (masters or remainders) and the optimizer states of a batch in place, with scratch
# memory. It first multiplies every gradient by a factor (0-dim fp32, or None for 1), rounded once to fp32. If a flag
# (0-dim bool) is true, weights, extras and states stay the same bit for bit. Otherwise `batch.steps` is incremented
# before the update. Nothing is read on the host.
Run = Callable[[Tensor | None, Tensor, Scratch], None]
Implementation = Callable[[Row, Batch, Group], Run | None]  # None: it cannot update this batch
Core = Callable[[Batch, Tensor], None]  # updates full weights and states in place from full, unscaled gradients

# Elements that are opened at a time: parts that stay in a CPU's cache, and few launches elsewhere.
_CHUNK = {"cpu": 2**19}
_CHUNK_ELSEWHERE = 2**23


@torch.no_grad()
def update(
    row: Row,
    batch: Batch,
    group: Group,
    factor: Tensor | None,
    found: Tensor,
    scratch: Scratch,
    implementations: Mapping[str, Implementation],
) -> None:
    """Makes one update of `batch` with the first of `implementations` that takes it."""
    runs = (implementation(row, batch, group) for implementation in implementations.values())
    next(run for run in runs if run is not None)(factor, found, scratch)


def _native(row: Row, batch: Batch, group: Group) -> Run | None:
    if row.native is None or not row.compiled(group):
        return None
    options = row.options(group)
    return partial(native.update, row.native, batch, options) if native.fits(batch, options) else None


def _triton(row: Row, batch: Batch, group: Group) -> Run | None:
    kernels = devices.triton_on(batch.device) if row.triton is not None and row.compiled(group) else None
    if kernels is None or not kernels.fits(batch):
        return None
    return partial(kernels.update, row.triton, batch, row.options(group))


def _fused(row: Row, batch: Batch, group: Group) -> Run | None:
    if row.fused is None or not row.compiled(group):
        return None
    if batch.device.type not in ("cpu", "cuda") or batch.dtype not in (torch.float32, torch.float64):
        return None
    if batch.layout == "full" and not all(map(is_dense, batch.weights)):  # they walk over raw memory
        return None
    return partial(_run_opened, partial(_FUSED[row.fused], group), batch)


# In order of preference. The last one takes everything; it is the reference that the others are tested against.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "native": _native,
    "triton": _triton,
    "fused": _fused,
    "eager": lambda row, batch, group: partial(_run_opened, partial(write, row.law, group), batch),
}


def _fused_adam(group: Group, batch: Batch, found: Tensor) -> None:
    kernel = fused_adamw_ if group["decoupled_weight_decay"] else fused_adam_
    kernel(
        batch.weights,
        batch.grads,
        batch.states["exp_avg"],
        batch.states["exp_avg_sq"],
        batch.states["max_exp_avg_sq"] if group["amsgrad"] else [],
        batch.steps,
        lr=_rate(group, batch),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        found_inf=found.to(torch.float32),
    )


def _fused_sgd(group: Group, batch: Batch, found: Tensor) -> None:
    fused_sgd_(
        batch.weights,
        batch.grads,
        batch.states.get("momentum_buffer", []),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=_rate(group, batch),
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,  # on a skipped first step it would keep uninitialised memory as momentum
        found_inf=found.to(torch.float32),
    )


def _rate(group: Group, batch: Batch) -> Any:
    """Returns the learning rate as torch's kernels take it."""
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return lr.to(batch.device, non_blocking=True) if on_device else lr


_FUSED: dict[str, Callable[[Group, Batch, Tensor], None]] = {"adam": _fused_adam, "sgd": _fused_sgd}


def _run_opened(core: Core, batch: Batch, factor: Tensor | None, found: Tensor, scratch: Scratch) -> None:
    """Makes an update by a `core` that supports only full weights and full, unscaled gradients."""
    if batch.steps:  # with lists: the overloads that take one tensor may read it on the host
        foreach_add_(batch.steps, [(~found).to(torch.float32)] * len(batch.steps))
    for part in chunks(batch, _limit(batch)):
        full = _open(part, scratch)
        grads = _unscaled(part, factor, scratch)
        coded = part.kept is not None and part.kept.kind != "full"
        states = opened(part) if coded else part.states
        core(replace(part, layout="full", weights=full, extras=[], grads=grads, states=states), found)
        if part.kept is None or not part.kept.rounds:
            _store(part, full, scratch)
        if part.kept is not None:
            _keep(part, full, states if coded else {}, found)


def _limit(batch: Batch) -> int:
    return _CHUNK.get(batch.device.type, _CHUNK_ELSEWHERE)


def _keep(batch: Batch, full: list[Tensor], states: Mapping[str, list[Tensor]], found: Tensor) -> None:
    """Rounds what is kept in fewer bits; by parts, as random bits take more memory than what they round."""
    old, new = replace(batch, whole=False), replace(batch, whole=False, weights=full, states=states)
    for part, values in zip(*(chunks(each, _limit(batch)) for each in (old, new)), strict=True):
        assert part.kept is not None
        if part.kept.rounds:
            for weight, value, place, step in zip(
                part.weights, values.weights, part.kept.places, part.steps, strict=True
            ):
                weight.copy_(torch.where(found, weight, rounded_weight(value, place, step)))
        close(part, values.states, found)


def _open(part: Batch, scratch: Scratch) -> list[Tensor]:
    if part.layout == "full":
        return part.weights
    if part.layout == "copy":
        return part.extras
    flat, full = scratch.views("full", torch.float32, part.weights)
    foreach_copy_(full, part.weights)  # bf16 to fp32 is the shift by 16 bits
    if part.layout == "split":
        low_bits, views = scratch.views("bits", torch.int32, part.extras)
        foreach_copy_(views, part.extras)
        bits = flat.view(torch.int32)
        least = (bits & 0x7FFFFFFF).neg_().clamp_(min=-1).bitwise_left_shift_(15)  # 0 beside a zero, as in `join`
        bits.add_(torch.maximum(low_bits, least, out=low_bits))
    return full


def _unscaled(part: Batch, factor: Tensor | None, scratch: Scratch) -> list[Tensor]:
    ready = all(grad.dtype is part.dtype for grad in part.grads)
    if ready and factor is None:
        return part.grads
    flat, grads = scratch.views("grads", part.dtype, part.grads)
    foreach_copy_(grads, part.grads)
    if factor is not None:
        flat.mul_(factor)
    return grads


def _store(part: Batch, full: list[Tensor], scratch: Scratch) -> None:
    if part.layout == "full":
        return
    dtype = part.weights[0].dtype
    if dtype is not torch.bfloat16:
        foreach_copy_(part.weights, full)
        return
    flat, views = scratch.views("full", torch.float32, full)
    if part.layout == "copy":
        foreach_copy_(views, full)
    bits = flat.view(torch.int32)
    bits.copy_(storable(bits))
    _, bit_views = scratch.views("full", torch.int32, full)
    if part.layout == "split":
        foreach_copy_(part.extras, bit_views)  # integers are cast by dropping the high bits
    bits.add_(0x8000).bitwise_right_shift_(16)  # round_half_away, as bits: a cast of floats would make all NaN one
    foreach_copy_([weight.view(torch.int16) for weight in part.weights], bit_views)
