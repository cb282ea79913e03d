"""Watches products in a forward and gradients in a backward pass, and rounds a backward pass as a low format would."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from halfstep.explain.diagnose.rehearsal import compute_loss
from halfstep.explain.tape.locator import Locator
from halfstep.formats import TF32, Format, round_nearest, saturate
from halfstep.modes import OpMode, run_uncompiled
from halfstep.plan.matching import uncompiled
from halfstep.torch_internals import (
    NO_BACKWARD,
    backward_task,
    next_sequence_number,
    running_node,
    schema_of,
    sequence_number,
    tree_map_only,
    version_of,
)
from halfstep.train.cast.products import PRODUCTS
from halfstep.train.probe.hooks import dense, tensors_in
from halfstep.train.probe.rows import owned
from halfstep.train.scale.loss import graph_nodes

_PRODUCTS = {schema_of(op).name for op in PRODUCTS}  # names on every device; attention is matched by the prefix below
_ATTENTION = "aten::_scaled_dot_product"


class TensorName(NamedTuple):
    """Identifies a tensor: its module's dotted name, one of `records.TENSOR_KINDS`, and its name within that kind."""

    module: str
    kind: str
    name: str


See = Callable[[TensorName, Tensor], Tensor | None]
"""Called with each tensor; if it returns one for an `activation_grad`, the backward pass continues with that."""


def step(model: nn.Module, closure: Callable[[], Any], see: See, *, backward: Callable[[Tensor], None]) -> Tensor:
    """Runs the closure, then `backward(loss)`; passes every tensor to `see` and returns the detached loss."""
    with watching(model, see):
        loss = compute_loss(closure, list(model.parameters()))
        backward(loss)
    show_weight_grads(model, see)
    return loss.detach()


@contextmanager
def watching(model: nn.Module, see: See) -> Iterator[None]:
    """Passes to `see` the weights at once, then each module's output and, in the backward pass, its gradient."""
    # Compiled code runs eagerly meanwhile, because torch.compile would leave out the hooks.
    for place, parameter in parameters(model):
        see(place, parameter.detach())
    seen: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()
    with ExitStack() as undo:
        for name, module in model.named_modules():
            undo.callback(module.register_forward_hook(_hook(uncompiled(name), see, seen, undo)).remove)
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
                show = partial(show_gradient, TensorName(module, "activation_grad", name))
                undo.callback(leaf.register_hook(show).remove)  # type: ignore[no-untyped-call]

    def show_gradient(place: TensorName, grad: Tensor) -> Tensor | None:
        return see(place, grad.detach()) if grad.layout is torch.strided else None

    return look


def parameters(model: nn.Module) -> Iterator[tuple[TensorName, nn.Parameter]]:
    """Yields each floating-point parameter once, with the first module that has it."""
    for parameter, module, name in owned(dict(model.named_modules())).values():
        if parameter.is_floating_point():
            yield TensorName(uncompiled(module), "weight", name), parameter


@dataclass(frozen=True)
class Nodes:
    """The autograd nodes that a forward made, as ranges of their sequence numbers."""

    model: list[range] = field(default_factory=list)  # of the whole model
    full: list[range] = field(default_factory=list)  # of modules that compute full, and of recurrent layers

    def forward_ended(self) -> None:
        """Counts all nodes made from now on as nodes of the model, because checkpoints repeat its forward later."""
        self.model.append(range(next_sequence_number(), sys.maxsize))


@contextmanager
def noting_nodes(model: nn.Module, full: Collection[str]) -> Iterator[Nodes]:
    """Yields the nodes that forwards inside the `with` make; `full` names the modules that compute full."""
    # Meanwhile recurrent layers compute step by step, because oneDNN's kernel is one operation for all steps.
    nodes = Nodes()
    layers = [module for module in model.modules() if isinstance(module, (nn.RNNBase, nn.RNNCellBase))]
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if module in layers or uncompiled(name) in full:
                _note(module, nodes.full, undo)
        _note(model, nodes.model, undo)
        if layers and all(p.device.type == "cpu" for layer in layers for p in layer.parameters()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of its own TF32 switch here
                undo.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield nodes


def _note(module: nn.Module, into: list[range], undo: ExitStack) -> None:
    starts: list[int] = []

    def before(module: nn.Module, args: Any) -> None:
        starts.append(next_sequence_number())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        into.append(range(starts.pop(), next_sequence_number()))

    undo.callback(module.register_forward_pre_hook(before, prepend=True).remove)
    undo.callback(module.register_forward_hook(after).remove)


@contextmanager
def watching_gradients(loss: Tensor, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Passes to `see` each gradient that reaches an autograd node of the loss in a backward pass inside the `with`."""

    def show(grads: Sequence[Tensor | None]) -> None:
        for grad in grads:
            if grad is not None and grad.layout is torch.strided:
                see(grad.detach())

    with ExitStack() as undo:
        for node in graph_nodes([loss]):
            undo.callback(node.register_prehook(show).remove)
        yield


class ProductsSeen(OpMode):
    """A mode that calls `see(name, result)` for each fp32 product, with the name of the module that computes it."""

    def __init__(self, model: nn.Module, see: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._locator = Locator([model])
        self._see = see

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.compute(func, args, kwargs)
        if _is_product(func) and schema_of(func).name != "aten::baddbmm":  # baddbmm may have added a mask
            module = self._locator.here().module
            if module is not None and isinstance(result, Tensor) and result.dtype is torch.float32:
                self._see(module, result.detach())
        return result


def _is_product(func: Any) -> bool:
    name: str = schema_of(func).name
    return name in _PRODUCTS or name.startswith(_ATTENTION)


class RoundedBackward(OpMode):
    """A mode that rounds products of the backward pass to a format, except in recurrent layers, which compute full."""

    def __init__(self, nodes: Nodes, fmt: Format) -> None:
        super().__init__()
        self.fmt = fmt
        self._nodes = nodes

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self.compute(func, args, kwargs)
        node = running_node()
        if node is None or not _is_product(func):
            return result
        number = sequence_number(node)
        if any(number in each for each in self._nodes.full) or not any(number in each for each in self._nodes.model):
            return result
        return tree_map_only(Tensor, lambda t: self._round(func, t), result)

    def _round(self, func: Any, t: Tensor) -> Tensor:
        if t.dtype is not torch.float32:
            return t
        if any(returned.alias_info is not None for returned in schema_of(func).returns):
            return t.copy_(rounded(t, self.fmt)) if schema_of(func).is_mutable else t
        return rounded(t, self.fmt)


def rounded(values: Tensor, fmt: Format) -> Tensor:
    """Returns an fp32 tensor as `round_nearest` rounds it, by torch's own cast, which is many times faster."""
    if fmt is TF32:  # no dtype is TF32
        return round_nearest(values, fmt)
    if not fmt.has_inf:  # else some releases turn values beyond the format into NaN
        values = saturate(values, fmt)
    return values.to(fmt.dtype).float()
