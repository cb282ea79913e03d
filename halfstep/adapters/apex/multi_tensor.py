"""`apex.multi_tensor_apply` and `amp_C`: operations on lists of tensors, with apex's order of arguments.

Each operation is called as `multi_tensor_applier(op, noop_flag, tensor_lists, ...)`. The first argument of an
operation, `chunk_size`, has no effect here. `noop_flag` is an integer tensor of one element: 1 means that a value was
not finite. Results are computed in fp32 (in float64 for float64 tensors) and stored in the tensors' own dtypes; nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import SetupError

__all__ = [
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls operations of `amp_C` with a fixed chunk size."""

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """Calls `op` with the chunk size and then the other arguments of this call; returns the result of `op`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """Writes the first list times `scale` into the second; sets `noop_flag` to 1 if an input is not finite."""
    for given, out in _rows("multi_tensor_scale", tensor_lists, ("inputs", "outputs")):
        value = _wide(given)
        out.copy_(value * scale)
        _flag(noop_flag, value)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int = -1,
) -> None:
    """Writes `a * x + b * y` into the third list, where x is the first list and y the second.

    `noop_flag` is set to 1 if x (`arg_to_check` 0), y (1) or either (-1) has an element that is not finite.
    """
    if arg_to_check not in (-1, 0, 1):
        raise SetupError(f"multi_tensor_axpby got arg_to_check={arg_to_check!r}; pass 0 for x, 1 for y, -1 for both")
    for x, y, out in _rows("multi_tensor_axpby", tensor_lists, ("x", "y", "outputs")):
        left, right = _wide(x), _wide(y)
        out.copy_(left * a + right * b)
        for number, value in enumerate((left, right)):
            if arg_to_check in (-1, number):
                _flag(noop_flag, value)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns two fp32 tensors: the L2 norm over all tensors, of shape (1,), and the norm of each, of shape (N,).

    Without `per_tensor` the second one is empty. `noop_flag` is set to 1 if the norm over all tensors is not finite.
    """
    tensors = [t for (t,) in _rows("multi_tensor_l2norm", tensor_lists, ("tensors",))]
    device = tensors[0].device if tensors else noop_flag.device
    wide = torch.float32 if device.type == "mps" else torch.float64  # so that no square of a fp32 element overflows
    norms = [torch.linalg.vector_norm(t, dtype=wide) for t in tensors]
    each = torch.stack(norms) if norms else torch.zeros(0, dtype=wide, device=device)
    total = torch.linalg.vector_norm(each).to(torch.float32).reshape(1)
    _flag(noop_flag, total)
    return total, each.to(torch.float32) if per_tensor else torch.empty(0, dtype=torch.float32, device=device)


@torch.no_grad()
def multi_tensor_sgd(  # noqa: PLR0913  # apex's
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """Makes one step of SGD on lists of gradients, weights and momenta, unless `noop_flag` is 1.

    If there is a fourth list, of copies of the weights in low precision, the new weights are written to it too.
    Gradients are multiplied by `scale`. With `first_run` the momentum starts as the gradient. Weight decay is added to
    the gradient, or with `wd_after_momentum` to the update.
    """
    names = ("gradients", "weights", "momenta", "low weights")[: 4 if len(tensor_lists) == 4 else 3]
    for grad, weight, held, *copies in _rows("multi_tensor_sgd", tensor_lists, names):
        w, g = _wide(weight), _wide(grad) * scale
        if wd and not wd_after_momentum:
            g = g + w * wd
        m = held
        if momentum:
            m = g if first_run else _wide(held) * momentum + g * (1 - dampening)
            g = g + m * momentum if nesterov else m
        if wd and wd_after_momentum:
            g = g + w * wd
        w = w - g * lr
        _store(noop_flag, (weight, w), (held, m), *((copy, w) for copy in copies))


@torch.no_grad()
def multi_tensor_adam(  # noqa: PLR0913  # apex's
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Makes one step of Adam on lists of gradients, weights, means and mean squares, unless `noop_flag` is 1.

    `step` counts from 1. `mode` 0 adds weight decay to the gradient, 1 to the update (AdamW).
    """
    if mode not in (0, 1):
        raise SetupError(f"multi_tensor_adam got mode={mode!r}; pass 0 for L2 weight decay, 1 for AdamW's")
    of_mean, of_square = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    names = ("gradients", "weights", "means", "mean squares")
    for grad, weight, mean, square in _rows("multi_tensor_adam", tensor_lists, names):
        w, g = _wide(weight), _wide(grad)
        if mode == 0:
            g = g + w * weight_decay
        m = _wide(mean) * beta1 + g * (1 - beta1)
        v = _wide(square) * beta2 + g * g * (1 - beta2)
        update = (m / of_mean) / ((v / of_square).sqrt() + epsilon)
        if mode == 1:
            update = update + w * weight_decay
        _store(noop_flag, (weight, w - update * lr), (mean, m), (square, v))


@torch.no_grad()
def update_scale_hysteresis(  # noqa: PLR0913  # apex's
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Adapts a loss scale in place after a step, and returns it; all tensors have one element.

    `found_inf` is above 0 if the step overflowed. The scale is multiplied by `backoff_factor` at the `hysteresis`-th
    overflow in a row and at each further one; a step without overflow restarts that count. The scale is multiplied by
    `growth_factor` after `growth_interval` steps in a row without overflow, unless the result would be infinite.
    `growth_tracker` counts these steps, and `hysteresis_tracker` counts down from `hysteresis`; both are updated in
    place.
    """
    found = found_inf > 0
    left = torch.where(found, hysteresis_tracker - 1, torch.full_like(hysteresis_tracker, hysteresis))
    clean = torch.where(found, torch.zeros_like(growth_tracker), growth_tracker + 1)
    grows = clean == growth_interval
    grown = current_scale * growth_factor
    value = torch.where(grows & torch.isfinite(grown), grown, current_scale)
    value = torch.where(found & (left <= 0), current_scale * backoff_factor, value)
    current_scale.copy_(value)
    growth_tracker.copy_(torch.where(grows, torch.zeros_like(clean), clean))
    hysteresis_tracker.copy_(left)
    return current_scale


def _rows(op: str, tensor_lists: Lists, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
    """Returns a tuple for each position in the lists, with the tensors at this position, such as (gradient, weight).

    `names` tells for error messages what each list contains.

    Raises:
        SetupError: there are not as many lists as `names`, the lists differ in length, or the tensors at one position
            differ in shape.
    """
    lengths = [len(each) for each in tensor_lists]
    if len(lengths) != len(names) or len(set(lengths)) > 1:
        raise SetupError(
            f"{op} got lists of the lengths {lengths}; pass {len(names)} lists of equal length: {', '.join(names)}"
        )
    rows = list(zip(*tensor_lists, strict=True))
    for number, row in enumerate(rows):
        shapes = [tuple(t.shape) for t in row]
        if len(set(shapes)) > 1:
            raise SetupError(
                f"{op}: the tensors at index {number} of the lists have shapes {shapes}; pass lists whose tensors have "
                "the same shapes"
            )
    return rows


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float64 else t.float()


def _flag(noop_flag: Tensor, value: Tensor) -> None:
    bad = (~torch.isfinite(value)).any().to(noop_flag.device, noop_flag.dtype)
    noop_flag.copy_(torch.maximum(noop_flag, bad.expand_as(noop_flag)))


def _store(noop_flag: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    """For each pair (tensor, new value), writes the value into the tensor, unless `noop_flag` is 1."""
    for held, value in pairs:
        skip = (noop_flag != 0).any().to(held.device)
        held.copy_(torch.where(skip, held, value.to(held.dtype)))
