"""Makes probabilities leave the model in fp32: they are computed again from what the model gave to the operation.

A low sigmoid is exactly 1 from a logit of 6.2 on in bf16, and code outside of the model takes the logarithm of it. Only
a result that leaves the model, as it is, as a view of it or as a copy of parts of it, is replaced.

While a model's forward runs, the storage of each low result has a `Kept`: how to compute the result again. In training
a large input that nothing else needs would live on with it. That happens once: a place in the code that gives large
results which do not leave the model is remembered, and keeps no input again.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from halfstep.formats import is_low
from halfstep.later import Later, is_capturing
from halfstep.plan.optable import PICKING
from halfstep.torch_internals import DispatchKey, compiled_inside, version_of
from halfstep.train.cast.tree import map_tensors

if TYPE_CHECKING:
    from halfstep.train.cast.opkernels import Act, OpSite

_LOG = logging.getLogger("halfstep")
in_dynamo = torch.compiler.is_dynamo_compiling
SMALL = 2**14  # elements of an input that is always kept: of most outputs, and of no activation that counts
_KEPT = "_halfstep_kept"  # the attribute of a storage
_FRAMES = 16  # that tell one place in the code from another
_NODES = 32  # views between a result and an output
_NODE_NAMES = {"sigmoid": "SigmoidBackward0", "softmax": "SoftmaxBackward0", "log_softmax": "LogSoftmaxBackward0"}
_TRACING = DispatchKey.PythonDispatcher
_WATCHED = 128  # outputs of a session that `Stuck` looks at
_PUSHED = 1e6  # a gradient that only the log of a probability of 0 gives: 1e12 by an element of nn.BCELoss's mean
_STUCK = (
    "a loss outside of the model takes the logarithm of a sigmoid that is exactly 0 or 1 in fp32 too (a logit beyond "
    "17): its gradient there is 0, and training may stand still. Return the logits and use "
    "binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), or scale the inputs"
)


class Kept:
    """How to compute a low result again in fp32, and the layout of the result, which fills its storage.

    `again` is None if the inputs `given` were not kept. `node` is the name of the result's autograd node, `left` tells
    whether the result was found in an output.
    """

    def __init__(self, result: Tensor, node: str, given: Sequence[Tensor], again: Callable[[], Tensor] | None) -> None:
        self.given, self.again, self.node = given, again, node
        self.dtype, self.shape, self.stride = result.dtype, result.shape, result.stride()
        self.counted = not result.is_inference()  # in inference mode nobody counts what is written into a tensor
        self.versions = [version_of(each) for each in (result, *given)] if self.counted else []
        self.left = self.corrected = False
        self.full: dict[bool, Tensor] = {}  # the whole result in fp32, by whether it has a gradient

    def correct(self, value: Tensor) -> None:
        """Has the operation's own node give the gradient of the result in fp32, whatever lies behind it."""
        node, again = _node_of(value, self.node, through=True), self.again
        if self.corrected or node is None or not self.counted or getattr(again, "func", None) is not _again:
            return
        self.corrected = True
        op, given, rest = again.args  # type: ignore[union-attr]
        version = self.versions[1]  # before the model wrote into it, if it did

        def correct(low: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
            written = version_of(given) != version
            if low[0] is None or grads[0] is None or grads[0].requires_grad or written:
                return None
            with torch.enable_grad():
                x = given.detach().float().requires_grad_()
                (full,) = torch.autograd.grad(op(x, *rest), x, grads[0].float())
            return (full.to(low[0].dtype), *low[1:])

        node.register_hook(correct)


class Stuck:
    """Says once that a loss pushes sigmoids that are exactly 0 or 1, whose gradient is 0; waits for no device."""

    def __init__(self) -> None:
        self._left = _WATCHED
        self._coming: Later | None = None

    def watch(self, full: Tensor) -> None:
        """Looks at the gradient of a sigmoid that leaves the model, and at what was seen of an earlier one."""
        if self._coming is not None and self._coming.arrived():
            (stuck,), self._coming = self._coming.read(), None
            if stuck:
                self._left = 0
                _LOG.warning(_STUCK)
        if self._left > 0 and self._coming is None:
            self._left -= 1
            assert full.grad_fn is not None  # whose hook, unlike one of the tensor, no copy of the output takes along
            full.grad_fn.register_prehook(partial(self._look, full.detach(), full.output_nr))

    def _look(self, full: Tensor, number: int, grads: tuple[Tensor | None, ...]) -> None:
        if (grad := grads[number]) is not None and not is_capturing() and not in_dynamo():
            self._coming = Later([(((full == 0) | (full == 1)) & (grad.abs() > _PUSHED)).any()])


class Forward:
    """The results of one forward that may leave the model.

    `leaves` is what forwards of the session have learned: whether a large result of a place in the code ever left the
    model. `caller` is the function that runs the forward; what calls that one does not count as part of a place.
    """

    def __init__(self, leaves: dict[int, bool], stuck: Stuck, caller: CodeType) -> None:
        self.leaves, self.stuck, self.caller = leaves, stuck, caller
        self.kept: list[tuple[int | None, weakref.ref[Kept]]] = []

    def end(self) -> None:
        """Drops all inputs, and learns which places need none next time."""
        for place, ref in self.kept:
            kept = ref()
            if place is not None:
                self.leaves[place] = self.leaves.get(place, False) or (kept is not None and kept.left)
            if kept is not None:
                kept.again, kept.given = None, ()
                kept.full.clear()
        self.kept.clear()


class _Thread(threading.local):
    now: Forward | None = None  # the forward that the thread is in
    ended: Forward | None = None  # the one whose outputs it casts next


THREAD = _Thread()


@compiled_inside
def widened(outputs: Any) -> Any:
    """Returns the outputs of the forward that has just ended, with the probabilities in them computed in fp32."""
    if torch.compiler.is_compiling():
        return map_tensors(_widen_traced, outputs)
    forward, THREAD.ended = THREAD.ended, None
    if forward is None or not forward.kept:
        return outputs
    try:
        return map_tensors(partial(widen, stuck=forward.stuck), outputs)
    finally:
        forward.end()


def widen(value: Tensor, stuck: Stuck | None = None) -> Tensor:
    """Returns a low probability, or a view or copy of parts of one, computed in fp32; any other tensor as it is."""
    kept = _kept_of(value)
    if kept is None or kept.dtype is not value.dtype:
        return value
    kept.left = True
    if kept.again is None:
        return value
    full = _full(kept, value)
    if stuck is not None and kept.node == _NODE_NAMES["sigmoid"] and full.requires_grad:
        stuck.watch(full)
    return full


@compiled_inside
def _widen_traced(value: Tensor) -> Tensor:
    return torch.ops.halfstep.to_full(value) if is_low(value.dtype) else value


def define_traced() -> torch.library.Library:
    """Returns a library with the operation that stands in traced code for `widen` and its cast; it leaves no trace."""
    library = torch.library.Library("halfstep", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("to_full(Tensor value) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("to_full", lambda value: widen(value).float(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return library


def probability(site: OpSite) -> Act:
    """Returns a function that runs an operation as written, and keeps how to compute its low result again in fp32."""
    into_first, node = site.name.endswith("_"), _NODE_NAMES[site.name.rstrip("_")]
    op = torch.sigmoid if into_first else site.overload

    def act(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_dynamo():  # which, after a break of its graph, may trace this function
            return site.excluded(keyset, args, kwargs)
        forward, given = THREAD.now, args[0]
        if not is_low(given.dtype) or (forward is None and not keyset.has(_TRACING)):
            return site.excluded(keyset, args, kwargs)
        place = None if forward is None or given.numel() <= SMALL else _place(forward.caller)
        keep = place is None or forward is None or forward.leaves.get(place, True)
        if into_first and keep:
            given = given.clone()
        out = site.excluded(keyset, args, kwargs)
        if is_low(out.dtype):
            again = partial(_again, op, given, args[1:2]) if keep else None
            _keep(forward, out, node, (given,) if keep else (), again, place)
        return out

    return act


def carrying(site: OpSite, act: Act) -> Act:
    """Returns a function that does what `act` does; what a moved probability is can be computed again too."""

    def carry(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = THREAD.now
        if in_dynamo() or ((not forward.kept) if forward is not None else (not keyset.has(_TRACING))):
            return act(keyset, args, kwargs)
        given = [each for arg in args for each in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        if not any(_kept_of(each) is not None for each in given):
            return act(keyset, args, kwargs)
        out = act(keyset, args, kwargs)
        moved, again = out, lambda: site.overload(*map(_wide, args), **kwargs)
        if site.overload_name in PICKING:
            dim = {**dict(zip(site.arguments, args, strict=False)), **kwargs}.get("dim", -1)
            moved, again = out[0], partial(_picked_again, given[0], out[1], dim)
        if is_low(moved.dtype):
            node = "" if moved.grad_fn is None else moved.grad_fn.name()
            _keep(forward, moved, node, [each for each in given if isinstance(each, Tensor)], again, None)
        return out

    return carry


def _again(op: Callable[..., Tensor], given: Tensor, rest: Sequence[Any]) -> Tensor:
    return op(given.float(), *rest)


def _wide(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return [_wide(each) for each in given]
    return widen(given).float() if isinstance(given, Tensor) and is_low(given.dtype) else given


def _picked_again(given: Tensor, indices: Tensor, dim: int) -> Tensor:
    """Returns the elements at these indices, so that each index still tells where its element was."""
    whole = indices.dim() == given.dim()
    picked: Tensor = _wide(given).gather(dim, indices if whole else indices.unsqueeze(dim))
    return picked if whole else picked.squeeze(dim)


def _keep(
    forward: Forward | None,
    out: Tensor,
    node: str,
    given: Sequence[Tensor],
    again: Callable[[], Tensor] | None,
    place: int | None,
) -> None:
    """Notes at the storage of a low result how to compute it again, if the result is plain and fills its storage."""
    storage = _storage_of(out)
    if storage is None:
        return
    if forward is not None and (type(out) is not Tensor or storage.nbytes() != out.numel() * out.element_size()):
        return
    kept = Kept(out, node, given, again)
    if forward is not None:
        forward.kept.append((place, weakref.ref(kept)))
    setattr(storage, _KEPT, kept)


def _kept_of(value: Any) -> Kept | None:
    if not isinstance(value, Tensor) or not is_low(value.dtype):
        return None
    return getattr(_storage_of(value), _KEPT, None)


def _storage_of(value: Tensor) -> torch.UntypedStorage | None:
    try:
        return value.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of torch.func
        return None


def _full(kept: Kept, value: Tensor) -> Tensor:
    """Returns an output computed again, with a gradient that goes the way of the output's own, where it has one."""
    with_gradient = torch.is_grad_enabled() and value.requires_grad
    whole = kept.full.get(with_gradient)
    if whole is None:
        assert kept.again is not None
        with torch.set_grad_enabled(with_gradient):
            whole = kept.full[with_gradient] = kept.again()
    full = _as_viewed(kept, whole, value)
    exact = kept.counted and [version_of(each) for each in (value, *kept.given)] == kept.versions
    if not exact:  # something was written into the result or the inputs
        full = torch.where(_is_same(full.detach(), value.detach()), full, value.float())
    if with_gradient and not (full.requires_grad and _node_of(value, kept.node)):
        wide = value.float()  # a function of the user's may change the gradient on its way
        full = wide + (full - wide).detach()
        kept.correct(value)
    return full


def _is_same(full: Tensor, value: Tensor) -> Tensor:
    """Tells for each element whether the low value is what an operation gives for what is `full` in fp32."""
    error, most = (full - value).abs(), 2 * torch.finfo(value.dtype).eps
    near_zero = (full <= 0) & (value <= 0) & (error <= most)  # of logarithms, which are small differences
    return (full.to(value.dtype) == value) | (error <= most * full.abs()) | near_zero


def _as_viewed(kept: Kept, full: Tensor, value: Tensor) -> Tensor:
    """Returns the part of `full` that `value` is of the low result."""
    if value.shape == kept.shape and value.stride() == kept.stride and value.storage_offset() == 0:
        return full
    if full.stride() != kept.stride or full.storage_offset():
        full = full.new_empty_strided(kept.shape, kept.stride).copy_(full)
    return full.as_strided(value.shape, value.stride(), value.storage_offset())


def _node_of(value: Tensor, name: str, *, through: bool = False) -> Any:
    """Returns the autograd node of this name behind a value and torch's own views, `through` users' functions too."""
    node: Any = value.grad_fn
    for _ in range(_NODES):
        if node is None or node.name() == name:
            return node
        if len(node.next_functions) != 1 or (isinstance(node, BackwardCFunction) and not through):
            return None
        node = node.next_functions[0][0]
    return None


def _place(caller: CodeType) -> int:
    """Returns a number for the place in the model's code that runs an operation, and for whether gradients are on."""
    found: list[int] = [torch.is_grad_enabled()]
    frame: FrameType | None = sys._getframe(3)  # below the kernel and what runs it
    for _ in range(_FRAMES):
        if frame is None or frame.f_code is caller:
            break
        found += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return hash(tuple(found))
