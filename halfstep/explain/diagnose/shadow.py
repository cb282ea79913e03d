"""Makes calls of modules again in fp32, and measures how far their results in a low format are from that."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from halfstep.torch_internals import (
    buffers_of,
    forward_hooks_of,
    forward_pre_hooks_of,
    in_backward,
    tree_leaves,
    tree_map,
)
from halfstep.train.cast.copies import plain_class, plain_copies
from halfstep.train.probe.rows import Errors, Shadows
from halfstep.validate import named

_LOG = logging.getLogger("halfstep")

_FLAT = 1e-6  # of the largest value: a spread below it is none
_APART = 8.0  # times the spread of all else is what a mask is away from it
_SMALL = 2**16  # elements of a buffer that is put back
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
        error, kept = _error(low.to(dtype), exact.to(dtype))
        off = float(torch.linalg.vector_norm(error)) / math.sqrt(
            float(kept.sum()) if kept is not None else error.numel()
        )
        if math.isfinite(off):
            return off
    return None


def _error(low: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns `low - wide` over the spread of `wide`, and where it counts (0 elsewhere); None: everywhere."""
    whole = _spread(wide)
    kept = _unmasked(low, wide, whole)
    error = (low - wide).div_(whole if kept is None else _spread(wide, kept))
    return (error, None) if kept is None else (torch.where(kept, error, 0.0), kept)


def _unmasked(low: Tensor, wide: Tensor, whole: Tensor) -> Tensor | None:
    """Returns where values are no mask: one number, more than once, far below or above all else; None: everywhere."""
    # Of a spread `whole`, which is below the gap between a mask and all else. No host waits for a device.
    kept = None
    on_host = wide.device.type == "cpu"
    for sign, extreme in zip((1, -1), wide.aminmax(), strict=True):
        at = wide == extreme
        if on_host and (float(extreme) == 0.0 or int(at.sum()) < 2):
            continue
        gap, got = (
            torch.where(at, math.inf, x * sign).amin() - torch.where(at, x * sign, -math.inf).amax()
            for x in (wide, low)
        )
        if on_host and float(gap) <= float(whole) < math.inf:
            continue
        spread, largest = _spread_of(wide, ~at)
        far = (spread > _FLAT) & (torch.minimum(gap, got) > _APART * spread * largest)
        masked = at & (far & (extreme != 0.0) & (at.sum() > 1))
        kept = ~masked if kept is None else kept & ~masked
    return kept


def _spread(wide: Tensor, kept: Tensor | None = None) -> Tensor:
    """Returns the spread of values; where they have none, the largest magnitude; 0-dim."""
    spread, largest = _spread_of(wide, kept)
    return torch.where(spread > _FLAT, spread, 1.0) * largest


def _spread_of(wide: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the deviation from the mean of all but the last dimension, over the largest magnitude, and the latter."""
    # So neither an offset nor a scale hides an error. The largest of zeros is tiny.
    wide = wide if kept is None else torch.where(kept, wide, 0.0)
    least, most = wide.aminmax()
    largest = torch.maximum(most, -least).clamp_min(torch.finfo(wide.dtype).tiny)
    rows = (wide / largest).flatten(0, -2) if wide.dim() > 1 else wide / largest
    if kept is None:
        return torch.linalg.vector_norm(rows.sub_(rows.mean(0))) / math.sqrt(rows.numel()), largest
    counted = kept.reshape(rows.shape)
    away = (rows - rows.sum(0) / counted.sum(0).clamp_min(1)) * counted
    return torch.linalg.vector_norm(away) / counted.sum().clamp_min(1).sqrt(), largest


def is_comparable(low: Any, exact: Any) -> bool:
    """Tells whether two results are of a form in which a difference says something."""
    if not (isinstance(low, Tensor) and isinstance(exact, Tensor)) or low.layout is not torch.strided:
        return False
    alike = low.is_floating_point() == exact.is_floating_point() and not (low.is_complex() or exact.is_complex())
    return alike and low.shape == exact.shape and low.numel() > 0


def has_code(module: nn.Module) -> bool:
    """Tells whether a module has a forward of its own, which does more than calling parts one after the other."""
    return getattr(plain_class(type(module)), "forward", None) not in (nn.Sequential.forward, nn.Module.forward)


def worst_element(low: Tensor, exact: Tensor) -> tuple[float, float]:
    """Returns the element of `low` that is furthest from `exact`, and the exact one."""
    apart = _error(low.double(), exact.double())[0] if exact.is_floating_point() else low.double() - exact.double()
    place = int(apart.abs().argmax())
    return float(low.flatten()[place]), float(exact.flatten()[place])


def _widened(given: Any) -> Any:
    """Returns the arguments of a call with low tensors and formats as fp32, and copies of what it may write to."""
    copies: dict[int, Any] = {}  # each argument once, since code may ask whether two are the same

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return torch.float32 if is_low(leaf) else leaf
        if not isinstance(leaf, Tensor):
            stateless = isinstance(leaf, nn.Module) or callable(leaf) or not getattr(leaf, "__dict__", True)
            return leaf if stateless or type(leaf) is object else copy.deepcopy(leaf, copies)
        copied = unwrapped(leaf).detach()
        copied = copied.float() if is_low(copied.dtype) else copied.clone()
        return copied.requires_grad_().clone() if leaf.requires_grad else copied  # no leaf: it may be written in place

    def once(leaf: Any) -> Any:
        return copies[id(leaf)] if id(leaf) in copies else copies.setdefault(id(leaf), wide(leaf))

    return tree_map(once, given)


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
    return ratio(low, exact) if is_comparable(low, exact) and low.numel() == 1 else off_by(low, exact)


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
            args, kwargs = _widened((args, kwargs))
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


class _Recurring(Shadow):
    """A shadow in training: buffers that code of a second call writes to outside of the copy are put back."""

    def __init__(self, whole: Iterable[nn.Module], *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._buffers = [b for module in whole for b in buffers_of(module).values() if b is not None]

    @contextmanager
    def again(self, name: str, number: int) -> Iterator[None]:
        small = [(buffer, buffer.clone()) for buffer in self._buffers if buffer.numel() <= _SMALL]
        yield
        for buffer, value in small:  # with no new version, which a graph would refuse; BatchNorm's kernels make none
            buffer.data.copy_(value)


def _is_hooked(module: nn.Module) -> bool:
    """Tells whether forward hooks of the user's are in a module, which a second call would run once more."""
    hooks = (
        h for each in module.modules() for of in (forward_pre_hooks_of, forward_hooks_of) for h in of(each).values()
    )
    return any(getattr(hook, "__module__", "").partition(".")[0] not in ("torch", "halfstep") for hook in hooks)


def shadows_in_turn() -> Shadows:
    """Returns what calls one module again in fp32 each time that it is begun; the modules take turns."""
    turn, said = count(), set[str]()

    def begin(
        modules: Mapping[str, nn.Module], errors: Errors, undo: list[Callable[[], None]]
    ) -> Callable[[bool], None]:
        coded = [name for name, module in modules.items() if has_code(module)]
        own = [name for name in coded if not _is_hooked(modules[name])]
        if hooked := [name for name in coded if name not in own and name not in said]:
            said.update(hooked)
            names = named(name or "the model itself" for name in hooked)
            _LOG.warning("a probe does not compare modules with fp32 whose hooks would run twice: %s", names)
        chosen = own and [own[next(turn) % len(own)]]

        def tell(again: SecondCall) -> None:
            for place, (low, exact) in enumerate(zip(again.low, again.exact, strict=True)):
                if is_comparable(low, exact) and low.is_floating_point() and low.dim() > 1 and low.numel() > _FEW:
                    errors(again.module, str(place), _error(low.float(), exact.float())[0])

        def fail(name: str, error: Exception) -> None:
            if name in said:
                return
            said.add(name)
            _LOG.warning("a probe cannot call %s again in fp32: %s: %s", name, type(error).__name__, error)

        device_type = first_device([*modules.values()]).type
        shadow = _Recurring(
            modules.values(), {n: modules[n] for n in chosen}, tell, fail, device_type=device_type, most=1
        )
        undo.append(shadow.put_on())

        def switch(on: bool) -> None:
            shadow.on = on

        return switch

    return begin
