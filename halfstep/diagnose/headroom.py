"""Whether a trial stays clear of the ends of its formats: what only just fits them overflows on the next batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep.edits import Scaling
from halfstep.formats import Format
from halfstep.observe.nonfinite import finite_range
from halfstep.observe.recorder import OpRecorder

_OF_RANGE = 4.0  # times as large as on this batch, an output still fits
OF_FLOOR = 2.0  # times the least loss scale: a dynamic one at its floor skips whenever it tries the next larger
_CASTS = ("_to_copy", "copy_")


class CastRecorder(OpRecorder):  # type: ignore[no-untyped-call]  # torch's class has no annotations
    """Records as any recorder, and keeps the largest magnitude that a cast wrote to `low` in the forward pass."""

    def __init__(self, roots: Sequence[nn.Module], low: Format) -> None:
        super().__init__(roots)
        self._low = low
        self.largest = 0.0

    @property
    def has_room(self) -> bool:
        """Whether all that was cast could be several times as large."""
        return self.largest * _OF_RANGE <= self._low.max

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        note = self.notes[-1] if self.notes else None
        if note is not None and note.aten in _CASTS and note.phase == "forward" and isinstance(result, Tensor):
            span = finite_range(result) if result.dtype is self._low.dtype else None
            if span is not None:
                below = 0.0 if span[0] == -self._low.max else -span[0]  # which is a mask's
                self.largest = max(self.largest, span[1], below)
        return result


def keeps_scale(scaling: Scaling, scale: float) -> bool:
    """Tells whether a loss scale that passes leaves a dynamic one room above its floor."""
    return not scaling.adapts or scale >= min(OF_FLOOR * scaling.min, scaling.max)
