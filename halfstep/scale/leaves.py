"""True gradients, from the backward pass of a scaled loss, for tensors that no optimizer of the session updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from halfstep.scale.loss import true_gradient
from halfstep.torch_internals import leaf_of


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
    """Returns the leaf tensors that get a gradient in a backward pass from `outputs`, each once.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> [leaf is w for leaf in leaves_of([(w * w).sum() + w.sum()])]
    [True]
    """
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
