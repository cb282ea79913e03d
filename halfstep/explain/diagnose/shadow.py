"""Makes calls of modules again in fp32, and measures how far their results in a low format are from that."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.explain.diagnose.rewind import random_state_now
from halfstep.explain.tape.nonfinite import unwrapped
from halfstep.formats import is_low
from halfstep.later import is_capturing
from halfstep.plan.matching import first_device, uncompiled, unwrap
from halfstep.torch_internals import in_backward, tree_leaves, tree_map
from halfstep.train.cast.copies import plain_class, plain_copies
from halfstep.train.probe.rows import Errors, Shadows

_LOG = logging.getLogger("halfstep")

_FLAT = 1e-6  # of the largest value: a spread below it is none
_FEW = 8  # elements that say nothing
_FIRST_CALLS = 8  # of a module in one forward are all made again; of later ones, each whose number is a power of 2


def off_by(low: Any, exact: Any) -> float | None:
    """Returns the root mean square of `low - exact` over the spread of `exact`; None if that would say nothing."""
    return ratio(low, exact) if is_comparable(low, exact) and low.numel() > _FEW else None


def ratio(low: Tensor, exact: Tensor) -> float | None:
    """Returns `off_by` of two results of any size that `is_comparable`; None if they are not finite."""
    # The spread is about the mean over all but the last dimension, so that no offset and no scale hides an error.
    if not exact.is_floating_point():  # choices
        return float((low != exact).double().mean())
    for dtype in (torch.promote_types(exact.dtype, torch.float32), torch.float64):  # squares may leave fp32's range
        wide = exact.to(dtype)
        error = low.to(dtype, copy=True).sub_(wide).div_(_spread(wide))
        off = float(torch.linalg.vector_norm(error)) / math.sqrt(wide.numel())
        if math.isfinite(off):
            return off
    return None


def _spread(wide: Tensor) -> Tensor:
    """Returns the standard deviation of values about their mean over all but the last dimension, 0-dim."""
    # So neither an offset nor a scale hides an error. Without a spread it is the largest magnitude, of zeros tiny.
    least, most = wide.aminmax()
    largest = torch.maximum(most, -least).clamp_min(torch.finfo(wide.dtype).tiny)
    rows = (wide / largest).flatten(0, -2) if wide.dim() > 1 else wide / largest
    spread = torch.linalg.vector_norm(rows.sub_(rows.mean(0))) / math.sqrt(rows.numel())
    return torch.where(spread > _FLAT, spread, 1.0) * largest


def is_comparable(low: Any, exact: Any) -> bool:
    """Tells whether two results are of a form in which a difference says something."""
    if not (isinstance(low, Tensor) and isinstance(exact, Tensor)) or low.layout is not torch.strided:
        return False
    alike = low.is_floating_point() == exact.is_floating_point() and not (low.is_complex() or exact.is_complex())
    return alike and low.shape == exact.shape and low.numel() > 0


def has_code(module: nn.Module) -> bool:
    """Tells whether a module has a forward of its own, which does more than calling parts one after the other."""
    forward = getattr(plain_class(type(module)), "forward", None)
    return forward not in (nn.Sequential.forward, nn.Module.forward)


def worst_element(low: Tensor, exact: Tensor) -> tuple[float, float]:
    """Returns the element of `low` that is furthest from `exact`, and the exact one."""
    place = int((low.double() - exact.double()).abs().argmax())
    return float(low.flatten()[place]), float(exact.flatten()[place])


def _wide(leaf: Any) -> Any:
    """Returns a low tensor as an fp32 copy, a low format as fp32, and what a module may write to as a copy."""
    if isinstance(leaf, torch.dtype):
        return torch.float32 if is_low(leaf) else leaf
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, nn.Module) or callable(leaf) else copy.deepcopy(leaf)
    wide = unwrapped(leaf).detach()
    wide = wide.float() if is_low(wide.dtype) else wide.clone()
    return wide.requires_grad_().clone() if leaf.requires_grad else wide  # not a leaf: it may be written in place


@dataclass(frozen=True, eq=False)
class SecondCall:
    """A call of a module: the module's name, what it returned, and what the same call returned in fp32."""

    module: str
    number: int  # of the call of this module in the forward, from 1
    low: list[Any]
    exact: list[Any]

    def off_by(self) -> float | None:
        """Returns how far the worst of the results is from fp32; None if no result says anything."""
        ratios = [r for pair in zip(self.low, self.exact, strict=True) if (r := _off_by(*pair)) is not None]
        return max(ratios, default=None)

    def worst(self) -> tuple[float, float]:
        """Returns the furthest element of the result that is furthest from fp32, and the exact one."""
        pairs = zip(self.low, self.exact, strict=True)
        return worst_element(*max(pairs, key=lambda pair: _off_by(*pair) or 0.0))


def _off_by(low: Any, exact: Any) -> float | None:
    """Returns `off_by` of what a module returns; of a single number, such as a loss, over its size."""
    single = is_comparable(low, exact) and low.numel() == 1
    return ratio(low, exact) if single else off_by(low, exact)


class Shadow:
    """Hooks on modules that make each call again, on an fp32 copy and with the same random numbers.

    `tell` gets each `SecondCall`, `fail` the name of a module and why its call could not be made again. Calls in a
    backward pass, which checkpoints make, are not made again, nor are those after `most` (0: any number). The copy is
    made before the call, of the buffers and attributes of that moment; nothing of the user's state changes.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        tell: Callable[[SecondCall], None],
        fail: Callable[[str, Exception], None],
        *,
        device_type: str,
        most: int = 0,
    ) -> None:
        self._modules, self._tell, self._fail, self._most = modules, tell, fail, most
        self._device_type = device_type
        self._open: list[tuple[nn.Module, int, Callable[[], list[Any]] | None]] = []
        self._calls: dict[str, int] = {}
        self.on = True

    def begin(self, name: str, number: int) -> None:
        """A call begins; for subclasses, as the next two."""

    def end(self, name: str) -> None:
        """It ends."""

    def again(self, name: str, number: int) -> AbstractContextManager[None]:
        """Returns the context of the second call."""
        return nullcontext()

    def put_on(self) -> Callable[[], None]:
        """Attaches the hooks, and returns a function that removes them, and refers to no module."""
        handles = []
        for name, module in self._modules.items():  # functions, which copies of the modules share
            handles += [
                module.register_forward_pre_hook(
                    lambda *called, name=name: self._before(name, *called), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(lambda module, args, out, name=name: self._after(name, module, out)),
            ]

        def take_off() -> None:
            for handle in handles:
                handle.remove()

        return take_off

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.on or in_backward() or is_capturing():
            return
        number = self._calls[name] = self._calls.get(name, 0) + 1
        again = None
        early = number <= _FIRST_CALLS or number & (number - 1) == 0
        if early and not 0 < self._most < number:
            try:
                again = self._prepared(name, number, module, args, kwargs)
            except Exception as error:  # of copying whatever a module or its arguments hold
                self._fail(name, error)
        self._open.append((module, number, again))
        self.begin(name, number)

    def _prepared(self, name: str, number: int, module: nn.Module, args: Any, kwargs: Any) -> Callable[[], list[Any]]:
        (twin,) = plain_copies([module])
        for tensor in (*twin.parameters(), *twin.buffers()):
            if is_low(tensor.dtype):  # without a master, or cast by a rule
                tensor.data = tensor.data.float()
        with torch.enable_grad():
            args, kwargs = tree_map(_wide, (args, kwargs))
        random_state, with_grad = random_state_now(), torch.is_grad_enabled()

        def again() -> list[Any]:
            back = random_state_now()
            random_state()
            try:
                with ExitStack() as stack:
                    stack.enter_context(torch.autocast(self._device_type, enabled=False))
                    stack.enter_context(torch.set_grad_enabled(with_grad))
                    stack.enter_context(self.again(name, number))
                    return [
                        unwrapped(t).detach() if isinstance(t, Tensor) else t
                        for t in tree_leaves(twin(*args, **kwargs))
                    ]
            finally:
                back()

        return again

    def _after(self, name: str, module: nn.Module, out: Any) -> None:
        if not self.on or in_backward():
            return
        while self._open and self._open[-1][0] is not module:  # of calls that raised
            self._open.pop()
        if not self._open:
            return
        self.end(name)
        _, number, again = self._open.pop()
        if again is None:
            return
        low = [unwrapped(t).detach() if isinstance(t, Tensor) else t for t in tree_leaves(out)]
        self.on = False  # the copy shares hooks with the module
        try:
            exact = again()
        except Exception as error:  # whatever a second call raises
            self._fail(name, error)
            return
        finally:
            self.on = True
        if len(low) != len(exact):
            self._fail(name, ValueError(f"it returned {len(exact)} values, not {len(low)}"))
            return
        self._tell(SecondCall(name, number, low, exact))


def named_modules(roots: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Returns the modules of models by name, each once; if there are several models, as "1:encoder.attn"."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for number, root in enumerate(map(unwrap, roots)):
        model = f"{number}:" if len(roots) > 1 else ""
        for name, module in root.named_modules():
            found.setdefault(id(module), (model + uncompiled(name), module))
    return dict(found.values())


def shadows_in_turn() -> Shadows:
    """Returns what calls one module again in fp32 each time that it is begun; the modules take turns."""
    turn, said = count(), set[str]()

    def begin(
        modules: Mapping[str, nn.Module], errors: Errors, undo: list[Callable[[], None]]
    ) -> Callable[[bool], None]:
        own = [name for name, module in modules.items() if has_code(module)]
        chosen = own and [own[next(turn) % len(own)]]

        def tell(again: SecondCall) -> None:
            for place, (low, exact) in enumerate(zip(again.low, again.exact, strict=True)):
                if is_comparable(low, exact) and low.is_floating_point() and low.dim() > 1 and low.numel() > _FEW:
                    wide = exact.float()
                    errors(again.module, str(place), (low.float() - wide) / _spread(wide))

        def fail(name: str, error: Exception) -> None:
            if name in said:
                return
            said.add(name)
            _LOG.warning("a probe cannot call %s again in fp32: %s: %s", name, type(error).__name__, error)

        device_type = first_device([*modules.values()]).type
        shadow = Shadow({n: modules[n] for n in chosen}, tell, fail, device_type=device_type, most=1)
        undo.append(shadow.put_on())

        def switch(on: bool) -> None:
            shadow.on = on

        return switch

    return begin
