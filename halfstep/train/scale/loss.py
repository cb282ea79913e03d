"""Checks and scales a loss before its backward pass, and unscales gradients that no optimizer of the session gets."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from halfstep.errors import SessionError
from halfstep.formats import is_low
from halfstep.torch_internals import leaf_of
from halfstep.validate import check_keywords

BACKWARD = ("loss", "loss_id", "gradient", "retain_graph", "create_graph", "inputs")  # of a session
GRAD = ("loss_id", *inspect.signature(torch.autograd.grad).parameters)
FP16_LOSS_CEILING = 32768.0  # the backward pass of an fp16 loss starts with the scale itself, and 65,504 is the largest


def check_loss(loss: Any, kwargs: dict[str, Any]) -> None:
    """Refuses a loss that no backward pass can start from; `kwargs` are those of `Tensor.backward`."""
    if kwargs:
        check_keywords("backward()", kwargs, BACKWARD)
    if not isinstance(loss, Tensor):
        raise SessionError(
            f"backward() expected the loss as a tensor, got {type(loss).__name__}; pass what the loss function "
            "returned, not loss.item() or a list"
        )
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        raise SessionError(
            f"the loss has shape {tuple(loss.shape)}; reduce it to one number (loss.mean()) before backward()"
        )
    if loss.is_complex():
        raise SessionError(f"the loss is complex ({loss.dtype}); pass a real one, such as loss.abs() or loss.real")
    if not loss.requires_grad:
        raise SessionError(
            "the loss requires no gradient: it was detached, or computed under torch.no_grad() or from nothing "
            "trainable; pass it as it was computed from the model's output, with gradients enabled"
        )


def pair_outputs(outputs: Any, grad_outputs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Returns the outputs and their `grad_outputs` (None means 1), as two tuples of the same length."""
    paired = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs) if isinstance(outputs, (list, tuple)) else ()
    if not paired or not all(isinstance(out, Tensor) for out in paired):
        raise SessionError(
            f"grad() expected a tensor or a list of tensors as outputs, got {type(outputs).__name__}: {outputs!r:.60}"
        )
    if not all(out.requires_grad for out in paired):
        raise SessionError(
            "grad() got an output that requires no gradient: it was computed under torch.no_grad(), detached, or from "
            "nothing trainable; pass it as it was computed, with gradients on"
        )
    given = (None,) * len(paired) if grad_outputs is None else grad_outputs
    directions = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not all(direction is None or isinstance(direction, Tensor) for direction in directions):
        kinds = [type(direction).__name__ for direction in directions]
        raise SessionError(
            f"grad() got grad_outputs of types {kinds}; pass a tensor for each output, or None where its gradient is 1"
        )
    if len(directions) != len(paired):
        raise SessionError(
            f"grad() got {len(directions)} grad_outputs for {len(paired)} outputs; pass one for each output"
        )
    for out, direction in zip(paired, directions, strict=True):
        if direction is None and out.numel() != 1:
            raise SessionError(
                f"an output of shape {tuple(out.shape)} has no grad_outputs; pass one for every output that is not a "
                "scalar"
            )
    return paired, directions


def grad_inputs(inputs: Any) -> tuple[Any, ...]:
    """Returns what `grad` differentiates with respect to, as a tuple."""
    listed = [inputs] if isinstance(inputs, (Tensor, GradientEdge)) or not isinstance(inputs, Iterable) else inputs
    found = tuple(listed)
    for each in found:
        if not isinstance(each, GradientEdge) and not (isinstance(each, Tensor) and each.requires_grad):
            came = "a tensor that requires no gradient" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise SessionError(
                f"grad() got {came} as an input; pass tensors that the outputs were computed from, such as the "
                "weights, or data after data.requires_grad_()"
            )
    return found


def check_losses(losses: Iterable[Any]) -> None:
    """Refuses losses that are not tensors, for a backward pass that the caller runs."""
    for loss in losses:
        if not isinstance(loss, Tensor):
            raise SessionError(
                f"scaling() expected the losses as tensors, got {type(loss).__name__}; pass those that the "
                "block scales: with session.scaling(loss) as scale: (loss * scale).backward()"
            )


def overflowed(loss: Tensor) -> Tensor:
    """Returns whether any element of a detached loss is infinite or NaN (0-dim bool), with two small operations."""
    bad = (loss - loss).isnan()  # 0 for a finite number, else NaN; torch 2.11 compares no DTensor by `ne`
    return bad.any() if bad.dim() else bad


def wide(loss: Tensor) -> Tensor:
    """Returns the loss in a format that can hold any loss scale: fp32, or float64 if it is float64 already."""
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()


def scaled(loss: Tensor, scale: Tensor) -> Tensor:
    """Returns the loss times its scale, in fp32 (float64 if the loss is)."""
    loss = wide(loss)
    return loss * scale.to(loss.device, loss.dtype)


def true_gradient(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Returns the gradient divided by `scale`, as a differentiable operation; with `scale=None` it is not divided."""
    if is_low(gradient.dtype):
        gradient = gradient.float()
    return gradient if scale is None else gradient / scale.to(gradient.device)


@contextmanager
def unscaled_leaves(outputs: Collection[Tensor], scale: Tensor, but: Collection[int]) -> Iterator[None]:
    """Within a `with` block, unscales the gradients of the leaves of `outputs`, except leaves whose id is in `but`."""
    value = scale.clone()  # which a step of an optimizer within the pass may change
    with ExitStack() as stack:
        for leaf in leaves_of(outputs):
            if id(leaf) not in but:
                stack.callback(leaf.register_hook(partial(_divided, value)).remove)  # type: ignore[no-untyped-call]
        yield


def leaves_of(outputs: Collection[Tensor]) -> list[Tensor]:
    """Returns the leaf tensors that get a gradient in a backward pass from `outputs`, each once."""
    leaves = [out for out in outputs if out.is_leaf and out.requires_grad]
    leaves += [leaf for node in graph_nodes(outputs) if (leaf := leaf_of(node)) is not None]
    return list({id(leaf): leaf for leaf in leaves}.values())


def graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yields the autograd nodes that a backward pass from `outputs` goes through."""
    waiting, seen = [out.grad_fn for out in outputs], set()
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _divided(scale: Tensor, gradient: Tensor) -> Tensor:
    return true_gradient(gradient, scale).to(gradient.dtype)
