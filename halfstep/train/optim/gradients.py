"""The gradients of a step: those that fit no parameter are refused; optimizers and hooks see them unscaled in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from halfstep.errors import SessionError
from halfstep.formats import is_narrow
from halfstep.sharded import is_sharded, is_wrapped
from halfstep.torch_internals import sparse_indices, sparse_values
from halfstep.train.processes.shards import like, local


def check_gradients(
    params: list[Parameter], grads: list[Tensor], name_of: Callable[[Parameter], str] | None = None
) -> None:
    """Refuses gradients that do not fit their parameters."""
    for p, grad in zip(params, grads, strict=True):
        if type(grad) is not Tensor and is_wrapped(grad):
            raise SessionError(_wrapped(grad, p, named(p, name_of)))
        own = local(p)
        if grad.shape != own.shape or grad.device != own.device:
            raise SessionError(
                f"the gradient of {named(p, name_of)} has shape {tuple(grad.shape)} on {grad.device}, but the "
                f"parameter has {tuple(p.shape)} on {p.device}; call zero_grad() after you reshape or move a parameter"
            )


def _wrapped(grad: Tensor, p: Parameter, name: str) -> str:
    """Returns the error message for a gradient of a tensor subclass that is not stored as `p` is, such as a DTensor."""
    if is_sharded(grad) and is_sharded(p):
        return (
            f"the gradient of {name} is placed over the processes as {grad.placements}, but the parameter as "
            f"{p.placements}; set p.grad = p.grad.redistribute(p.device_mesh, p.placements) before session.step()"
        )
    return (
        f"the gradient of {name} is of type {type(grad).__name__}, which has no plain "
        "storage; set p.grad to a plain tensor (.to_local(), .full_tensor())"
    )


def named(p: Parameter, name_of: Callable[[Parameter], str] | None) -> str:
    """Returns how an error message calls `p`: "the parameter 'NAME'", or "a parameter" if `name_of` is None."""
    return "a parameter" if name_of is None else f"the parameter {name_of(p)!r}"


@contextmanager
def true_gradients(params: list[Parameter], grads: list[Tensor], factor: Tensor | None) -> Iterator[None]:
    """Sets `p.grad` of each parameter to its gradient times `factor` within a `with` block, in fp32 if `p` is low."""
    # At the end of the block, `p.grad` becomes what it was before, even if code in the block assigned another
    # gradient.
    held: list[tuple[Parameter, Tensor | None]] = []
    try:
        for p, grad in zip(params, grads, strict=True):
            true = like(p, _unscaled(grad, torch.float32 if is_narrow(p.dtype) else p.dtype, factor))
            held.append((p, p.grad))
            _assign(p, true)
        yield
    finally:
        for p, previous in held:
            if p.grad is not None:
                _assign(p, previous)


def _unscaled(grad: Tensor, dtype: torch.dtype, factor: Tensor | None) -> Tensor:
    """Returns `grad`, dense or sparse, converted to `dtype` and multiplied by `factor`."""
    local = None if factor is None else factor.to(grad.device, non_blocking=True)
    if grad.is_sparse:
        values = _unscaled(sparse_values(grad), dtype, local)
        indices, coalesced = sparse_indices(grad), grad.is_coalesced()
        return torch.sparse_coo_tensor(
            indices, values, grad.shape, device=grad.device, is_coalesced=coalesced, check_invariants=False
        )
    full = grad.detach().to(dtype)
    return full if local is None else full * local


def widened(grad: Tensor) -> Tensor:
    """Returns a sparse gradient with low-precision values as fp32, so that the values of one row add up in fp32."""
    if not is_narrow(grad.dtype) or grad.is_coalesced():
        return grad
    return _unscaled(grad, torch.float32, None)


def _assign(p: Parameter, grad: Tensor | None) -> None:
    p.grad = None
    if grad is not None and p.grad_dtype not in (None, grad.dtype):
        p.grad_dtype = None  # any dtype, also those that hooks assign
    p.grad = grad
