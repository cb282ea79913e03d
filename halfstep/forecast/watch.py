"""Observes weights, activations and the gradients of both in a training step, module by module, through hooks.

The hooks are removed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from halfstep.diagnose.closure import compute_loss
from halfstep.modes import run_uncompiled
from halfstep.observe.outputs import dense, tensors_in
from halfstep.observe.window import owned
from halfstep.plan.matching import uncompiled
from halfstep.torch_internals import NO_BACKWARD, backward_task, version_of


class TensorName(NamedTuple):
    """Identifies a tensor: its module's dotted name, one of `records.TENSOR_KINDS`, and its name within that kind."""

    module: str
    kind: str
    name: str


See = Callable[[TensorName, Tensor], Tensor | None]
"""Called with each tensor; if it returns one for an `activation_grad`, the backward pass continues with that."""


def step(model: nn.Module, closure: Callable[[], Any], see: See, *, backward: Callable[[Tensor], None]) -> Tensor:
    """Runs the closure, then `backward(loss)`; passes every tensor of the step to `see` and returns the detached loss.

    Raises:
        SessionError: the closure returns no scalar loss that needs a gradient, or has called backward itself.
    """
    with watching(model, see):
        loss = compute_loss(closure, list(model.parameters()))
        backward(loss)
    show_weight_grads(model, see)
    return loss.detach()


@contextmanager
def watching(model: nn.Module, see: See) -> Iterator[None]:
    """Passes to `see` the weights at once, then each module's output and, in the backward pass, the output's gradient.

    If a container returns a tensor of a module inside it, the tensor counts for the inner module. Outputs that a
    checkpoint recomputes in the backward pass are not passed again. Compiled code runs eagerly meanwhile, because
    torch.compile would leave out the hooks.
    """
    for place, parameter in parameters(model):
        see(place, parameter.detach())
    seen: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
    with ExitStack() as undo:
        for name, module in model.named_modules():
            hook = _hook(uncompiled(name), see, seen, undo)
            undo.callback(module.register_forward_hook(hook).remove)
        undo.callback(run_uncompiled())
        yield


def show_weight_grads(model: nn.Module, see: See) -> None:
    """Passes the gradients that the parameters hold to `see`."""
    for place, parameter in parameters(model):
        if parameter.grad is not None:
            see(place._replace(kind="weight_grad"), dense(parameter.grad))


def _hook(
    module: str, see: See, seen: WeakValueDictionary[tuple[int, int], Tensor], undo: ExitStack
) -> Callable[..., None]:
    def look(_: nn.Module, args: Any, output: Any) -> None:
        again = backward_task() != NO_BACKWARD
        for name, leaf in tensors_in(output):
            if not leaf.is_floating_point():
                continue
            version = 0 if leaf.is_inference() else version_of(leaf)  # in-place modules return what they got
            if seen.get((id(leaf), version)) is leaf:
                continue
            seen[id(leaf), version] = leaf
            if not again:
                see(TensorName(module, "activation", name), leaf.detach())
            if leaf.requires_grad:
                show = _gradient_hook(TensorName(module, "activation_grad", name), see)
                undo.callback(leaf.register_hook(show).remove)  # type: ignore[no-untyped-call]

    return look


def _gradient_hook(place: TensorName, see: See) -> Callable[[Tensor], Tensor | None]:
    return lambda grad: see(place, grad.detach()) if grad.layout is torch.strided else None


def parameters(model: nn.Module) -> Iterator[tuple[TensorName, nn.Parameter]]:
    """Yields each floating-point parameter once, with the first module that has it."""
    for parameter, module, name in owned(dict(model.named_modules())).values():
        if parameter.is_floating_point():
            yield TensorName(uncompiled(module), "weight", name), parameter
