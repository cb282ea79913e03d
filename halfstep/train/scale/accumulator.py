"""Tracks which loss scale an optimizer's gradients carry, so that several backward passes add up as in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef

from halfstep.formats import is_low
from halfstep.sharded import is_sharded
from halfstep.torch_internals import foreach_mul_, version_of
from halfstep.train.kernels.batch import Alike, Scratch, resolved
from halfstep.train.processes.collectives import NOT_FINITE
from halfstep.train.processes.shards import local, part_of
from halfstep.train.processes.wrappers import WideSums
from halfstep.train.scale.norm import read

_GRADIENT = attrgetter("grad")


@dataclass(eq=False)
class Collected:
    """The gradients of one step as stored in `p.grad`: each gradient times `inverse` is the true gradient.

    The step must be skipped if `found` is true or a present gradient is not finite.
    """

    params: list[Parameter]
    grads: list[Tensor]
    scale: Tensor  # of the last backward pass (0-dim fp32)
    found: Tensor | None  # any of `flags` (0-dim bool), None if there are none
    losses: tuple[int, ...]  # ids of those that contributed
    flags: Mapping[int, Tensor] = field(repr=False)  # of losses: overflowed; at `NOT_FINITE`: not finite
    scales: Mapping[int, Tensor] = field(repr=False)  # of each loss's last backward pass
    true: bool = field(repr=False)
    absent: Sequence[Parameter] = field(default=(), repr=False)  # without a gradient
    changed: Parameter | None = None  # by other code while its gradient was scaled

    @property
    def inverse(self) -> Tensor:
        """The factor that makes `grads` true gradients (0-dim fp32): 1 if they are true already."""
        return torch.ones_like(self.scale) if self.true else self.scale.reciprocal()

    @property
    def carried(self) -> Tensor:
        """The scale that `grads` carry (0-dim fp32): 1 if they are true gradients."""
        return torch.ones_like(self.scale) if self.true else self.scale

    def overflowed(self, found: Tensor) -> dict[int, Tensor]:
        """Returns, by loss id, whether the scale of that loss must back off (0-dim bool)."""
        least = torch.zeros_like(found) if self.true else found
        own = {loss: self.flags[loss].to(found.device) for loss in self.losses if loss in self.flags}
        return {loss: own[loss] | least if loss in own else least for loss in self.losses}


class GradientAccumulator:
    """Lets backward passes add up in one optimizer's `p.grad`, even under different loss scales or after `unscale_`.

    Call `before_backward`, then `after_backward` or, if the pass raised, `undo_backward`. `left_over` is True if the
    last pass added to the previous step's gradients, which were never zeroed.
    """

    # A first pass leaves its scaled gradients in `p.grad`; a second adds to them, with `full_accumulate` in fp32.
    # Before a pass under another scale, or after `unscale_`, the gradients so far are unscaled and set aside; after the
    # pass they are added to it. If `reduced()` is true, gradients are all-reduced over processes, perhaps first by a
    # later pass: they are not unscaled between passes, and add up in the parameters' dtype, except those that the hook
    # `sums` all-reduces.

    def __init__(
        self,
        params: Callable[[], list[Parameter]],
        full_accumulate: bool,
        reduced: Callable[[], bool] = lambda: False,
        sums: WideSums | None = None,
    ) -> None:
        self._params = params
        self._full_accumulate = full_accumulate
        self._reduced = reduced
        self._sums = WideSums() if sums is None else sums
        self._stash: dict[Parameter, Tensor] = {}
        self._widened: set[Parameter] = set()
        self._named: set[Parameter] = set()  # whose gradients have their dtype by name
        self._opened: list[Parameter] = []  # low ones that `unscale_` found without a gradient
        self._flags: dict[int, Tensor] = {}
        self._losses: tuple[int, ...] = ()
        self._losses_before: tuple[int, ...] = ()
        self._scales: dict[int, Tensor] = {}
        self._mark: tuple[int, int] | None = None
        self._present: list[Parameter] = []  # the parameters of the backward pass that runs
        self._turn = 0  # counts steps: each looks at another gradient
        self._left: tuple[Parameter, tuple[int, int] | None] | None = None  # that gradient after a backward pass
        self._first: TensorWeakRef | None = None  # the first gradient
        self.left_over = False
        self._scratch = Scratch()
        self._alike = Alike()
        self._one = torch.ones((), dtype=torch.float32, device="cpu")
        self._copied = self._one, 0, self._one  # a scale, the count of writes to it, and what it was
        self._forget()
        for param in self.parameters():
            narrow = param.grad is None or param.grad.dtype is param.dtype
            if param.grad_dtype is None and narrow:  # as an earlier session has left it
                param.grad_dtype = param.dtype
                self._named.add(param)

    def before_backward(self, loss_id: int, scale: Tensor) -> Tensor | None:
        """Prepares `p.grad` for a backward pass of loss `loss_id` times `scale` (0-dim fp32 tensor).

        Returns whether gradients of finite losses overflowed and were cleared before a step; None if nobody read them.
        """
        self._present = self.parameters()
        if self._opened:
            self._end_opened()
        lost = None
        self._left = None
        held = [param for param in self._present if param.grad is not None]
        self.left_over = bool(held) and self._stale and self._mark == _mark_of(held)
        if held and self._first is not None and self._stale and self._first() is not held[0].grad:
            self._forget()  # code made it that scales no loss
        if not held:
            lost = self._overflowed() if self._flags else None
            self._narrow(self._widened)
            self._forget()
            self._carry(scale)
        elif self._stale or (self._carries and self._is_copied(scale)) or self._reduced():
            lost = self._drop_cleared_flags(held)
            self._join(held, scale)
        else:
            lost = self._drop_cleared_flags(held)
            if not self._true:
                self._make_true(held)
            for param in held:
                if param.grad is not None:
                    self._stash[param], param.grad = param.grad, None
        if self._widened:
            self._sum_in(torch.float32)
        self._losses_before = self._losses
        if loss_id not in self._losses:
            self._losses += (loss_id,)
        return lost

    def after_backward(
        self, loss_id: int, scale: Tensor, noted: Mapping[int, Tensor] | None = None, *, watch: bool = False
    ) -> None:
        """Adds the gradients that `before_backward` took out of `p.grad` to those that the backward pass left there."""
        # `noted` are further flags, as in `Collected.flags`. With `watch` a change of the gradients before the step is
        # noticed.
        for key, flag in noted.items() if noted and _first_gradient(self._present) is not None else ():
            self._flag(key, flag)
        for param, held in self._sums.release(self._present).items():  # what the all-reduce has not included
            new, param.grad = param.grad, None
            self._set_wide(param, held if new is None else held.add_(new))
        if self._stash:
            self._add_apart(loss_id, scale)
        if self._widened:
            self._sum_in(None)
        self._scales[loss_id] = self._scale
        self._mark = _mark_of(self._present)
        if watch and self._present:
            watched = self._present[self._turn % len(self._present)]
            grad = watched.grad
            if not (is_sharded(grad) and is_sharded(watched) and grad.placements != watched.placements):
                self._left = watched, _mark_of([watched])
            first = _first_gradient(self._present)
            self._first = None if first is None else TensorWeakRef(first)

    def undo_backward(self) -> None:
        """Puts the gradients back after a backward pass that raised."""
        # Gradients that the pass has already added in place stay, as in torch; gradients that were held apart come
        # back unchanged.
        if self._stash:
            for param in self._params():
                param.grad = None
            self._losses = self._losses_before
        self._put_back()
        for param, held in self._sums.release(self._present).items():
            param.grad = None
            self._set_wide(param, held)
        self._sum_in(None)

    def unscale_(self) -> None:
        """Turns `p.grad` into the true gradients: unscaled, and in fp32 for parameters in low precision."""
        params = self.parameters()
        held = [param for param in params if param.grad is not None]
        if held and not self._true:
            self._make_true(held)
        if len(held) < len(params):  # code that makes gradients of its own from the true ones may assign fp32
            self._opened = [param for param in params if param.grad is None and is_low(param.dtype)]
            for param in self._opened:
                param.grad_dtype = None
        self._mark = _mark_of(params)

    def _end_opened(self) -> None:
        for param in self._opened:
            if param.grad is None:
                param.grad_dtype = param.dtype
                self._named.add(param)
            else:
                self._widened.add(param)
        self._opened = []

    def collect(self) -> Collected:
        """Returns the gradients for one step, with their scales and the overflows noted so far."""
        params, absent = self.parameters(), list[Parameter]()
        grads: list[Any] = list(map(_GRADIENT, params))
        if set(map(type, grads)) != {Tensor}:
            absent = [param for param, grad in zip(params, grads, strict=True) if grad is None]
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            present = zip(params, [grad for grad in grads if grad is not None], strict=True)
            grads = [grad if type(grad) is Tensor else part_of(grad, param) for param, grad in present]
        grads = self._alike.of(grads)
        if "lazy" not in grads.memory:
            grads.memory["lazy"] = any(resolved(grad) is not grad for grad in grads)
        if grads.memory["lazy"]:
            grads = list(map(resolved, grads))
        device = grads[0].device if grads else self._scale.device
        found = None
        for flag in self._flags.values():
            here = flag if flag.device == device else flag.to(device, non_blocking=True)
            found = here if found is None else found | here
        flags, scales = dict(self._flags), dict(self._scales)
        changed, left = self._left or (None, None)
        if changed is None or self._true or _mark_of([changed]) in (None, left):
            changed = None
        return Collected(params, grads, self._scale, found, self._losses, flags, scales, self._true, absent, changed)

    def consumed(self) -> None:
        """Ends the step: a later backward pass adds to gradients left in `p.grad`; past overflows no longer count."""
        self._flags, self._losses, self._scales, self._stale = {}, (), {}, True
        self._turn += 1

    def close(self) -> None:
        """Leaves true gradients in `p.grad`; from then on autograd makes gradients in the parameter's dtype again."""
        self.unscale_()
        self._narrow(self._widened)
        for param in self._named:
            param.grad_dtype = None  # a fixed one would outlive the session and a later model.double()
        self._named.clear()
        self._forget()

    def _forget(self) -> None:
        """Forgets scales, losses and overflows; a gradient that a caller then puts into `p.grad` counts as true."""
        self._flags, self._losses, self._scales, self._stale = {}, (), {}, True
        self._scale, self._carries, self._true = self._one, False, False  # whether `p.grad` carries what was copied
        self._mark = None

    def parameters(self) -> list[Parameter]:
        """Returns the optimizer's present parameters, each once."""
        return list({id(param): param for param in self._params()}.values())

    def _held(self) -> list[Parameter]:
        return [param for param in self.parameters() if param.grad is not None]

    def _carry(self, scale: Tensor) -> None:
        """Notes that `p.grad` carries the present value of `scale`; keeps a copy, since `scale` changes in place."""
        if not self._is_copied(scale):
            self._copied = scale, version_of(scale), scale.clone()
        self._scale, self._carries = self._copied[2], True
        self._true = self._stale = False

    def _is_copied(self, scale: Tensor) -> bool:
        return self._copied[0] is scale and self._copied[1] == version_of(scale)

    def _join(self, held: list[Parameter], scale: Tensor) -> None:
        """Makes the gradients of `held` carry `scale`, so that the backward pass can add to them in place."""
        carried = self._carries and self._is_copied(scale)
        reduced = self._reduced()
        summed = [param for param in held if param in self._sums] if reduced else held
        if not carried or self._full_accumulate:
            self._widen(summed if carried else held)
        if not carried:
            factor = scale.detach() if self._true else scale.detach() * self._scale.reciprocal().to(scale.device)
            _multiply_(held, factor)
        if reduced:
            for param in self._widened.intersection(summed):
                self._sums.hold(param)
                self._named.add(param)
                self._widened.discard(param)
            for param in self._widened.intersection(held):
                grad, param.grad = param.grad, None
                self._narrow([param])
                param.grad = None if grad is None else grad.to(param.dtype)
        self._carry(scale)

    def _sum_in(self, dtype: torch.dtype | None) -> None:
        """Has a backward pass sum the uses of a weight that has an fp32 gradient in `dtype`; None: in that of each."""
        for param in self._widened:
            if param.grad is None or param.grad.dtype is torch.float32:
                param.grad_dtype = dtype

    def _set_wide(self, param: Parameter, grad: Tensor) -> None:
        param.grad_dtype = None  # any: code that makes gradients itself assigns them in the parameter's dtype
        param.grad = grad
        self._widened.add(param)

    def _add_apart(self, loss_id: int, scale: Tensor) -> None:
        """Unscales the new gradients in fp32 and adds those that `before_backward` took out of `p.grad`."""
        new = self._held()
        self._flag(loss_id, self._widen_and_multiply(new, scale.detach().reciprocal()))
        with torch.no_grad():
            for param in new:
                old = self._stash.pop(param, None)
                if old is not None and param.grad is not None:
                    param.grad = _sum(old, param.grad)
        self._put_back()
        self._scale = scale.detach().clone()

    def _put_back(self) -> None:
        for param, grad in self._stash.items():
            param.grad = grad
        self._stash.clear()

    def _make_true(self, held: list[Parameter]) -> None:
        """Unscales the gradients of `held` in fp32, and notes for each contributing loss whether they overflowed."""
        found = self._widen_and_multiply(held, self._scale.reciprocal())
        for loss in self._losses:
            self._flag(loss, found)
        self._true, self._carries = True, False

    def _widen_and_multiply(self, params: list[Parameter], factor: Tensor) -> Tensor:
        grads = [resolved(local(param.grad)) for param in params if param.grad is not None]
        reading = read(grads, device=factor.device, scratch=self._scratch)
        self._widen(params)
        _multiply_(params, factor)
        return reading.found

    def _widen(self, params: Iterable[Parameter]) -> None:
        """Converts low-precision gradients to fp32 and makes autograd add to them in fp32."""
        for param in params:
            grad = param.grad
            if grad is not None and is_low(grad.dtype):
                param.grad = None
                if grad.shape == param.shape:  # else somebody reshaped its data; it fits nowhere
                    self._set_wide(param, grad.float())

    def _narrow(self, params: Iterable[Parameter]) -> None:
        """Makes autograd produce gradients in a parameter's own dtype again, if it has no fp32 gradient now."""
        # With None as `p.grad_dtype` a gradient would keep the dtype in which it is computed, which is fp32 for an
        # LSTM.
        for param in self._widened.intersection(params):
            if param.grad is None or param.grad.dtype is param.dtype:
                param.grad_dtype = param.dtype
                self._named.add(param)
                self._widened.discard(param)

    def _flag(self, loss_id: int, found: Tensor) -> None:
        old = self._flags.get(loss_id)
        self._flags[loss_id] = found if old is None else old | found.to(old.device, non_blocking=True)

    def _overflowed(self) -> Tensor | None:
        """Returns whether gradients that were read overflowed though no loss did; None if none were."""
        found = [self._flags[loss] for loss in self._losses if loss in self._flags]
        bad = self._flags.get(NOT_FINITE)
        lost = torch.stack([each.to(found[0].device) for each in found]).any() if found else None
        return lost if lost is None or bad is None else lost > bad.to(lost.device)

    def _drop_cleared_flags(self, held: list[Parameter]) -> Tensor | None:
        """Forgets overflows if all gradients are zero now, as after `zero_grad(set_to_none=False)`; returns them."""
        if not self._flags or self._mark == _mark_of(self._params()):
            return None
        norm = read(
            [resolved(local(param.grad)) for param in held if param.grad is not None], scratch=self._scratch
        ).norm
        lost = self._overflowed()
        for loss, flag in self._flags.items():
            self._flags[loss] = flag & (norm != 0).to(flag.device, non_blocking=True)
        return None if lost is None else lost & (norm == 0).to(lost.device, non_blocking=True)


def _first_gradient(params: Iterable[Parameter]) -> Tensor | None:
    return next((param.grad for param in params if param.grad is not None), None)


def _mark_of(params: Iterable[Parameter]) -> tuple[int, int] | None:
    """Returns the id and version counter of the first gradient, to see later whether it was replaced or changed."""
    grad = _first_gradient(params)
    own = None if grad is None else local(grad)  # of a DTensor, which `redistribute` may put into another one
    return None if own is None else (id(own), version_of(own))


@torch.no_grad()
def _multiply_(params: Iterable[Parameter], factor: Tensor) -> None:
    """Multiplies the gradients of `params` by a 0-dim tensor, in place unless they require a gradient themselves."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if resolved(grad) is not grad:
            grad = param.grad = resolved(grad)
        if grad.requires_grad:
            with torch.enable_grad():
                param.grad = grad * factor.to(grad.device, non_blocking=True)
            continue
        grad = local(grad)
        if grad.layout is not torch.strided:
            grad.mul_(factor.to(grad.device, non_blocking=True))
        else:
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in groups.items():
        foreach_mul_(grads, factor.to(device, non_blocking=True))


def _sum(old: Tensor, new: Tensor) -> Tensor:
    """Returns the sum of two gradients, each dense or sparse, in the memory of one of them if possible."""
    if old.layout is not torch.strided and new.layout is torch.strided:
        old, new = new, old
    if old.requires_grad or new.requires_grad or old.layout is not torch.strided:
        return old + new
    return old.add_(new)
