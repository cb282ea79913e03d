"""True gradients, unscaled and fp32, for optimizers and hooks, which know nothing of loss scales and low weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.formats import is_narrow
from halfstep.processes.shards import like
from halfstep.torch_internals import sparse_indices, sparse_values


@contextmanager
def true_gradients(params: list[Parameter], grads: list[Tensor], factor: Tensor | None) -> Iterator[None]:
    """Sets `p.grad` of each parameter to its gradient times `factor` within a `with` block, in fp32 if `p` is low."""
    # At the end of the block, `p.grad` becomes what it was before, even if code in the block assigned another
    # gradient.
    held: list[tuple[Parameter, Tensor | None]] = []
    try:
        for p, grad in zip(params, grads, strict=True):
            true = like(p, unscaled(grad, torch.float32 if is_narrow(p.dtype) else p.dtype, factor))
            held.append((p, p.grad))
            _assign(p, true)
        yield
    finally:
        for p, previous in held:
            if p.grad is not None:
                _assign(p, previous)


def unscaled(grad: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """Returns `grad`, dense or sparse, converted to `dtype` and multiplied by `factor`."""
    local = None if factor is None else factor.to(grad.device, non_blocking=True)
    if grad.is_sparse:
        values = unscaled(sparse_values(grad), dtype, local)
        indices, coalesced = sparse_indices(grad), grad.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, grad.shape, device=grad.device, is_coalesced=coalesced, check_invariants=False
        )
    full = grad.detach().to(dtype)
    return full if local is None else full * local


def _assign(p: Parameter, grad: Tensor | None) -> None:
    p.grad = None
    if grad is not None and p.grad_dtype not in (None, grad.dtype):
        p.grad_dtype = None  # any dtype, also those that hooks assign
    p.grad = grad
