"""Rounding inside recurrent layers, whose one call is hundreds of operations, each of which rounds in a low run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from halfstep.formats import Format
from halfstep.observe.rounding import rounded


@contextmanager
def recurrent_ranges(model: nn.Module) -> Iterator[list[range]]:
    """Gives the sequence numbers of the autograd nodes that recurrent layers make inside the `with`.

    They compute step by step meanwhile: oneDNN's kernel is one operation for all steps.
    """
    found: list[range] = []
    layers = [module for module in model.modules() if isinstance(module, (nn.RNNBase, nn.RNNCellBase))]
    starts: list[int] = []

    def before(module: nn.Module, args: Any) -> None:
        starts.append(torch._C._autograd._get_sequence_nr())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        found.append(range(starts.pop(), torch._C._autograd._get_sequence_nr()))

    with ExitStack() as undo:
        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
            undo.callback(layer.register_forward_hook(after).remove)
        if layers and all(p.device.type == "cpu" for layer in layers for p in layer.parameters()):
            undo.enter_context(_without_onednn())
        yield found


@contextmanager
def _without_onednn() -> Iterator[None]:
    with ExitStack() as undo:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.13 warns of its own TF32 switch here
            undo.enter_context(torch.backends.mkldnn.flags(enabled=False))
        yield


class RoundedInside(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """Inside, each fp32 result of the backward pass through nodes of these ranges is rounded to a format."""

    def __init__(self, ranges: Sequence[range], fmt: Format) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranges = tuple(ranges)
        self._fmt = fmt
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[Format]:
        """Gives the format to a hook that computes with fp32 values inside the backward pass, where nothing rounds."""
        self._paused = True
        try:
            yield self._fmt
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation and rounds what it computed."""
        result = func(*args, **(kwargs or {}))
        node = None if self._paused else torch._C._current_autograd_node()
        if node is None or not any(node._sequence_nr() in nodes for nodes in self._ranges):
            return result
        return tree_map_only(Tensor, lambda t: self._round(func, t), result)

    def _round(self, func: Any, t: Tensor) -> Tensor:
        if t.dtype is not torch.float32:
            return t
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return t.copy_(rounded(t, self._fmt)) if func._schema.is_mutable else t
        return rounded(t, self._fmt)
