"""Tells whether values stay well below the limits of their formats, so that the next batch will not overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep.edits import Scaling
from halfstep.formats import Format
from halfstep.observe.nonfinite import finite_range
from halfstep.observe.recorder import OpRecorder

_OF_RANGE = 4.0  # an output this many times as large as on this batch must still fit
OF_FLOOR = 2.0  # times the lowest loss scale: a dynamic scale at its floor skips each time it tries the next larger one
_CASTS = ("_to_copy", "copy_")


class CastRecorder(OpRecorder):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """A recorder that also keeps, as `largest`, the largest magnitude cast to `low` in the forward pass."""

    def __init__(self, roots: Sequence[nn.Module], low: Format) -> None:
        super().__init__(roots)
        self._low = low
        self.largest = 0.0

    @property
    def has_room(self) -> bool:
        """Whether the values that were cast could be several times as large and still fit."""
        return self.largest * _OF_RANGE <= self._low.max

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        note = self.notes[-1] if self.notes else None
        if note is not None and note.aten in _CASTS and note.phase == "forward" and isinstance(result, Tensor):
            span = finite_range(result) if result.dtype is self._low.dtype else None
            if span is not None:
                below = 0.0 if span[0] == -self._low.max else -span[0]  # the value of a mask
                self.largest = max(self.largest, span[1], below)
        return result


def keeps_scale(scaling: Scaling, scale: float) -> bool:
    """Tells whether a loss scale that works is well above the floor of a dynamic scaling; True for a static one."""
    return not scaling.adapts or scale >= min(OF_FLOOR * scaling.min, scaling.max)
