"""A user's closure: the loss it computes, the leaves of the loss, and whether all runs get the same inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.diagnose.rewind import is_readable
from halfstep.errors import SessionError
from halfstep.observe.nonfinite import unwrapped
from halfstep.scale.loss import leaves_of
from halfstep.stack import begin_pass
from halfstep.torch_internals import tree_leaves, without_modes

_NEAR = 0.05  # of the largest element: how far equal inputs may differ if a model computed them in low precision

_CLOSURE = "pass a function without arguments that computes the loss and returns it: lambda: loss_fn(model(x), y)"


def check_closure(function: str, closure: object) -> None:
    """Checks that the public function named `function` can call the closure that was passed to it."""
    if not callable(closure):
        raise SessionError(
            f"{function}() takes a function that returns the loss, not {type(closure).__name__}; {_CLOSURE}"
        )
    try:
        inspect.signature(closure).bind()
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise SessionError(f"{function}() calls the closure without arguments, but it is {error}; {_CLOSURE}") from None


def compute_loss(closure: Callable[[], Any], params: Sequence[nn.Parameter]) -> Tensor:
    """Calls the closure and returns the loss that it computed."""
    loss = begin_pass(closure)
    if not isinstance(loss, Tensor):
        raise SessionError(f"the closure returned {type(loss).__name__}, not the loss; {_CLOSURE}")
    if loss.numel() != 1 or loss.is_complex():
        raise SessionError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}, not one real number; {_CLOSURE}"
        )
    if any(param.grad is not None for param in params):
        raise SessionError(
            "the closure ran the backward pass; remove that call: a closure only computes and returns the loss, and "
            "halfstep runs the backward pass"
        )
    if not loss.requires_grad:
        raise SessionError(
            "the loss of the closure requires no gradient: it was detached, or computed under torch.no_grad() or from "
            "nothing trainable; compute it with gradients enabled, from parameters that require them"
        )
    return loss


@contextmanager
def leaves_kept(loss: Tensor, params: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Yields all leaves that a backward pass writes gradients of; puts back those of leaves outside of `params`."""
    leaves = {id(leaf): leaf for leaf in [*params, *leaves_of([loss])]}
    own = {id(p) for p in params}
    kept = [(leaf, leaf.grad) for leaf in leaves.values() if id(leaf) not in own]
    for leaf, _ in kept:
        leaf.grad = None
    try:
        yield list(leaves.values())
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


class Inputs:
    """Compares the inputs of the first module that each run of a closure calls.

    `same` is True if these inputs were equal in all runs: then all runs got the same batch.
    """

    def __init__(self) -> None:
        self.same = True
        self._first: list[Tensor] | None = None
        self._noted = False

    def begin_run(self) -> None:
        """Marks the start of another run."""
        self._noted = False

    def note(self, given: Any) -> None:
        """Compares the inputs of the first module called in this run with those of the first run."""
        if self._noted:
            return
        self._noted = True
        with without_modes(), torch.no_grad():
            tensors = [unwrapped(leaf) for leaf in tree_leaves(given) if is_readable(leaf)]
            if self._first is None:
                self._first = [t.clone() for t in tensors]
            elif len(tensors) != len(self._first) or not all(map(_is_same, tensors, self._first)):
                self.same = False


@contextmanager
def noting_inputs(roots: Sequence[nn.Module]) -> Iterator[Inputs]:
    """Yields an `Inputs` that observes, through hooks, what the runs of a closure pass to the modules."""
    inputs = Inputs()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:  # a function, which copies of the modules share
        inputs.note((args, kwargs))

    modules = {id(module): module for root in roots for module in root.modules()}.values()
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(note, prepend=True, with_kwargs=True).remove)
        yield inputs


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.device != other.device:
        return False
    if not (one.is_floating_point() and other.is_floating_point()):
        return one.dtype == other.dtype and torch.equal(one, other)
    one, other = one.float(), other.float()
    finite = other[torch.isfinite(other)]
    room = _NEAR * float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=room, equal_nan=True)
