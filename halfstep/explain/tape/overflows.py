"""Looks for absorbed overflows in the training forwards of one step: infinities that later became finite but wrong."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.explain.tape.absorbed import OverflowTrail
from halfstep.explain.tape.locator import Locator, Place
from halfstep.explain.tape.opnames import public_name
from halfstep.explain.tape.schemas import aten_name
from halfstep.later import is_capturing
from halfstep.modes import OpMode, put_on_top
from halfstep.records import ABSORBED, Observation
from halfstep.torch_internals import TorchDispatchMode, in_backward
from halfstep.train.probe.rows import measure

_LOG = logging.getLogger("halfstep")
Under = Callable[[TorchDispatchMode], AbstractContextManager[None]]
"""Puts a mode above the one that emulates a format, so that it sees operations as the model called them."""


@dataclass(frozen=True, eq=False)
class _Here:
    """The place from which an operation was called, and its public name."""

    place: Place
    operator: str


class AbsorbedWatch(OpMode):
    """Reports overflows that training forwards absorb, if a loss given to `end` depends on them; never raises."""

    # Gradients can be off in parts of a training forward: in a `no_grad` block, a custom function, a reentrant
    # checkpoint. While all models are in eval mode, operations without gradients are ignored.

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__()
        self._roots = [weakref.ref(root) for root in roots]  # weak: the stack of modes must keep no session alive
        self._trail: OverflowTrail[_Here] = OverflowTrail()

    def sees(self) -> bool:
        """Tells whether the running operation may be part of a training forward."""
        may_train = self.on and (torch.is_grad_enabled() or any(root.training for root in self._live_roots()))
        return may_train and not in_backward() and not is_capturing()

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._trail.run(self.compute, func, args, kwargs, lambda: self._here(func, args))

    def failed(self, error: Exception) -> bool:
        self.on = False
        said = "a probe stops looking for absorbed overflows in this step, because of an error: %s"
        _LOG.warning(said, error, exc_info=error)
        return True

    def end(self, losses: Sequence[Tensor]) -> None:
        """Notes the overflows that the losses, from which a backward pass will start, depend on."""
        self._trail.end(losses)

    def _live_roots(self) -> list[nn.Module]:
        return [root for each in self._roots if (root := each()) is not None]

    def _here(self, func: Any, args: Sequence[Any]) -> _Here:
        locator = Locator(self._live_roots())
        place, aten = locator.here(), aten_name(func, args)
        module = None if place.module is None else locator.module(place.module)
        return _Here(place, public_name(aten, call=[aten], function=place.function, module=module))

    def observations(self, step: int) -> list[Observation]:
        """Returns the absorbed overflows as observations, one for each line of each module where they began."""
        found: dict[tuple[str | None, str | None], Observation] = {}
        for each in self._trail.found:
            origin, by = each.origin.of, each.by
            place = origin.place.module, origin.place.line
            if place not in found:
                said = each.said(origin.operator, place[1], by.operator, by.place.line)
                found[place] = Observation(
                    step=step,
                    module=(place[0] or "").replace(":", ".", 1).rstrip("."),  # of several models: as in others
                    kind=ABSORBED,
                    name=said.operator,
                    format=said.format,
                    scale=1.0,
                    stats=measure(each.origin.values),
                    absorbed=said,
                )
        return list(found.values())


def watch_absorbed(
    roots: Sequence[nn.Module], under: Under, undo: list[Callable[[], None]]
) -> tuple[AbsorbedWatch, Callable[[], None]]:
    """Returns a watch that sees all operations from now on, and a function that leaves the context `under(watch)`."""
    watch = AbsorbedWatch(roots)
    undo.append(put_on_top(watch))
    over = ExitStack()
    over.enter_context(under(watch))
    return watch, over.close
