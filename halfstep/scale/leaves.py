"""Gradients of tensors that no optimizer of a session updates, in a backward pass that starts from a loss scale."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor

from halfstep.scale.loss import true_gradient
from halfstep.torch_internals import leaf_of


@contextmanager
def unscaled_leaves(outputs: Iterable[Tensor], scale: Tensor, but: Collection[int]) -> Iterator[None]:
    """Leaves true gradients at the leaves of the outputs' graphs, `but` for those with these ids, within a `with`.

    The backward pass inside is to start from `scale` (0-dim fp32). What is added to a gradient is divided before it is
    added, so that a gradient that was there stays what it was.
    """
    value = scale.clone()  # which a step of an optimizer within the pass may change
    with ExitStack() as stack:
        for leaf in leaves_of(outputs):
            if id(leaf) not in but:
                stack.callback(leaf.register_hook(partial(_divided, value)).remove)  # type: ignore[no-untyped-call]
        yield


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Returns the leaves that a backward pass from these outputs leaves gradients at, each once.

    >>> import torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> [leaf is w for leaf in leaves_of([(w * w).sum() + w.sum()])]
    [True]
    """
    found: dict[int, Tensor] = {id(out): out for out in outputs if out.is_leaf and out.requires_grad}
    nodes = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = leaf_of(node)
        if leaf is not None:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(found.values())


def _divided(scale: Tensor, gradient: Tensor) -> Tensor:
    return true_gradient(gradient, scale).to(gradient.dtype)
