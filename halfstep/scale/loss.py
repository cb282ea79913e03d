"""A loss on its way into the backward pass, and gradients on their way out of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SessionError
from halfstep.formats import LOW_DTYPES
from halfstep.scale.scaling import Scale

FP16_LOSS_CEILING = 32768.0  # the backward pass of an fp16 loss starts with the scale itself, and 65,504 is the largest


def check_loss(loss: Any, kwargs: dict[str, Any]) -> None:
    """Refuses what no backward pass can start from; `kwargs` are those of `Tensor.backward`.

    Raises:
        SessionError: not a tensor, not a scalar (and no `gradient` given), or nothing in it needs a gradient.
    """
    if not isinstance(loss, Tensor):
        raise SessionError(f"backward() takes the loss tensor, not {type(loss).__name__}")
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        raise SessionError(
            f"the loss has shape {tuple(loss.shape)}; reduce it to one number (loss.mean()) before backward()"
        )
    if loss.is_complex():
        raise SessionError(f"the loss is {loss.dtype}; give a real number, such as loss.abs() or loss.real")
    if not loss.requires_grad:
        raise SessionError(
            "the loss needs no gradient: it was computed under torch.no_grad(), detached, or from nothing trainable"
        )


def pair_outputs(outputs: Any, grad_outputs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Returns outputs, each with the direction of its gradient (None: 1), both as tuples.

    Raises:
        SessionError: an output is no tensor, there are not as many directions, or one that is no scalar has none.
    """
    paired = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs) if isinstance(outputs, (list, tuple)) else ()
    if not paired or not all(isinstance(out, Tensor) for out in paired):
        raise SessionError(f"grad() takes a tensor or a list of them, not {type(outputs).__name__}: {outputs!r:.60}")
    given = (None,) * len(paired) if grad_outputs is None else grad_outputs
    directions = (given,) if isinstance(given, Tensor) else tuple(given)
    if len(directions) != len(paired):
        raise SessionError(f"{len(paired)} outputs have {len(directions)} grad_outputs; give one for each output")
    for out, direction in zip(paired, directions, strict=True):
        if direction is None and out.numel() != 1:
            raise SessionError(
                f"an output has shape {tuple(out.shape)}; give grad_outputs for an output that is not a scalar"
            )
    return paired, directions


def overflowed(loss: Tensor) -> Tensor:
    """Returns whether any number of the loss is infinite or NaN (0-dim bool), from two small operations.

    >>> overflowed(torch.tensor(float("-inf"))), overflowed(torch.tensor(3.0))
    (tensor(True), tensor(False))
    """
    value = loss.detach()
    nothing = value - value  # 0 for a finite number, else NaN, which is not equal to itself
    bad = nothing.ne(nothing)
    return bad.any() if bad.dim() else bad


def poisoned(loss: Tensor) -> Tensor:
    """Returns the loss, whose gradients are NaN where it is not finite; those of a finite one stay bit for bit."""
    nothing = (loss - loss).detach()
    return loss * (nothing + 1)


def wide(loss: Tensor) -> Tensor:
    """Returns a loss in a format that takes any loss scale: fp32, or float64 where it is that."""
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()


def scaled(loss: Tensor, scale: Scale) -> Tensor:
    """Returns the loss times its scale, in fp32 (float64 stays); the loss itself where scaling is off."""
    if not scale.active:
        return loss
    loss = wide(loss)
    return loss * scale.value.to(loss.device, loss.dtype)


def true_gradient(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Returns a gradient divided by `scale`, in fp32 (float64 and complex stay), differentiably; None is no scale."""
    if gradient.dtype in LOW_DTYPES:
        gradient = gradient.float()
    return gradient if scale is None else gradient / scale.to(gradient.device)
