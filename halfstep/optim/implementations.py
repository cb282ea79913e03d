"""Updates a batch of parameters with the first of several implementations that supports the batch and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels import devices, native
from halfstep.kernels.batch import Batch, Options, Scratch, chunks
from halfstep.optim import eager, fused
from halfstep.optim.split import storable
from halfstep.optim.table import OptimizerRow
from halfstep.torch_internals import foreach_add_, foreach_copy_, foreach_mul_

Core = Callable[[Any, Batch, Options, Tensor], None]
Run = Callable[[Any, Batch, Options, Tensor | None, Tensor, Scratch], None]

# Elements that are opened at a time: parts that stay in a CPU's cache, and few launches elsewhere.
_CHUNK = {"cpu": 2**19}
_CHUNK_ELSEWHERE = 2**23


@dataclass(frozen=True)
class Implementation:
    """One way to compute updates, for example with compiled loops.

    `kernel(row, options)` returns the kernel that updates optimizers of this row of the table, or None if this
    implementation has no kernel for them. `fits(batch, options)` says whether this implementation supports the batch.

    `run(kernel, batch, options, factor, found, scratch)` updates the weights, the extras (masters or remainders) and
    the optimizer states of `batch` in place, with `scratch` as working memory. It first multiplies every gradient by
    `factor` (0-dim fp32, or None for 1), rounded once to fp32. If `found` (0-dim bool) is true, weights, extras and
    states stay the same bit for bit. Otherwise `batch.steps` is incremented before the update, and `batch.fresh` (1 for
    parameters without an update so far) is set to 0 after it. Nothing is read on the host.
    """

    kernel: Callable[[OptimizerRow, Options], Any]
    fits: Callable[[Batch, Options], bool]
    run: Run


@torch.no_grad()
def update(
    row: OptimizerRow,
    batch: Batch,
    options: Options,
    factor: Tensor | None,
    found: Tensor,
    scratch: Scratch,
    implementations: Mapping[str, Implementation],
) -> None:
    """Makes one update of `batch` with the first of `implementations` that takes it."""
    for implementation in implementations.values():
        kernel = implementation.kernel(row, options)
        if kernel is not None and implementation.fits(batch, options):
            implementation.run(kernel, batch, options, factor, found, scratch)
            return
    raise LookupError(
        f"none of the implementations {list(implementations)} can update parameters of {batch.dtype} on {batch.device} "
        f"with layout {batch.layout!r} and {type(options).__name__}"
    )


def opened(core: Core) -> Run:
    """Returns the `run` of an implementation whose `core` supports only full weights and full, unscaled gradients."""

    def run(
        kernel: Any, batch: Batch, options: Options, factor: Tensor | None, found: Tensor, scratch: Scratch
    ) -> None:
        if batch.steps:  # with lists: the overloads that take one tensor may read it on the host
            foreach_add_(batch.steps, [(~found).to(torch.float32)] * len(batch.steps))
        for part in chunks(batch, _CHUNK.get(batch.device.type, _CHUNK_ELSEWHERE)):
            full = _open(part, scratch)
            grads = _unscaled(part, factor, scratch)
            core(kernel, replace(part, layout="full", weights=full, extras=[], grads=grads), options, found)
            _store(part, full, scratch)
        if batch.fresh:
            foreach_mul_(batch.fresh, [found.to(torch.float32)] * len(batch.fresh))

    return run


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
        flat.view(torch.int32).add_(low_bits)
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


# In order of preference. The last one takes everything; it is the reference that the others are tested against.
IMPLEMENTATIONS = {
    "native": Implementation(lambda row, options: row.native_of(options), native.fits, native.update),
    "triton": Implementation(lambda row, options: row.triton_of(options), devices.triton_fits, devices.triton_update),
    "fused": Implementation(lambda row, options: row.fused(options), fused.fits, opened(fused.update)),
    "eager": Implementation(lambda row, options: row.eager, lambda batch, options: True, opened(eager.update)),
}
