"""What the guardian counts: skipped steps, in a row and of the latest ones, and at which loss scale; growth.

How a result of the backward pass grows with the loss scale, and how far weights have grown in this session.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_bool, c_float
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.explain.tape.recorder import Note, reached_from
from halfstep.later import Later, is_capturing
from halfstep.train.processes.shards import local

WINDOW = 8  # steps, a power of two: as many skips in a row divide a dynamic scale by 256
_LONGEST_PAUSE = 64 * WINDOW  # steps
_OFTEN, _HALF, _SPAN = 4, 40, 80  # 4 skips in 80 steps, one in twenty: the rate of a scale that lives at its floor
LONGEST_GAP = _SPAN // (_OFTEN - 1)  # steps between two such skips

Watched = tuple[tuple[int, ...], int | None]  # the ids of optimizers that step together, and a loss that they step on
Scales = Mapping[Any, Tensor]  # keyed by loss id, or by None
# what has stepped, whether it was skipped, whether for a loss that was not finite, and the scales of its losses
_Step = tuple[Sequence[object], Tensor, Tensor | None, Scales]

# who is meant, how often its steps are skipped (in words), and whether less than half are, and not many in a row
Alarm = tuple[Watched, str, bool]


@dataclass
class _Streak:
    """The skipped steps of one set of optimizers on one loss."""

    length: int = 0  # steps skipped in a row up to now
    left_out: int = 0  # the next steps, which raise no alarm
    pause: int = WINDOW  # what the next call of `Counter.rest` makes of `left_out`
    steps: int = 0
    told: bool = False  # by a mild alarm
    # The numbers of the latest skips at a scale just above its floor, but not of those directly after another skip,
    # and of those that no falling scale ends: for a loss that was not finite, or at a fixed scale.
    near: deque[int] = field(default_factory=lambda: deque(maxlen=_OFTEN))
    odd: deque[int] = field(default_factory=lambda: deque(maxlen=_HALF))

    def lately(self, skips: deque[int], number: int) -> bool:  # so many within 80 steps
        return len(skips) >= number and self.steps - skips[-number] < _SPAN

    @property
    def lives_at_floor(self) -> bool:
        return self.lately(self.near, _OFTEN)


class Counter:
    """Counts skipped steps, separately per set of optimizers and per loss, without waiting for the device.

    Steps are examined `WINDOW` at a time, in a later step, once their values have arrived on the host.
    """

    def __init__(self, floor: float, growth: float = 1.0) -> None:  # floor 0: a fixed scale
        self._floor, self._near = floor, floor * growth
        self._steps: list[_Step] = []
        self._coming: tuple[list[_Step], Later] | None = None
        self._runs: dict[Watched, _Streak] = {}  # empty until a step is skipped

    def count(self, parts: Sequence[object], skipped: Tensor, bad: Tensor | None, scales: Scales) -> Alarm | None:
        """Counts a step of the optimizers `parts`; returns an alarm about these and a loss, or None."""
        # Steps inside a CUDA graph capture are not counted, because a later read would give the values of replays.
        if is_capturing():
            self._steps, self._coming = [], None
            return None
        found = None
        if self._coming is not None:
            steps, coming = self._coming
            if coming.arrived():
                self._coming = None
                found = self._look(steps, coming.read())
        self._steps.append((parts, skipped, bad, scales))
        if self._coming is None and len(self._steps) >= WINDOW:
            steps, self._steps = self._steps, []  # first: a Ctrl-C in the next lines leaves no list that grows
            numbers = [t for _, skipped, bad, own in steps for t in (skipped, bad, *own.values()) if t is not None]
            self._coming = steps, Later(numbers)
        return found

    def rest(self, watched: Watched) -> None:
        """Raises no alarm for some steps of the optimizers and loss in `watched`; each call doubles their number."""
        run = self._runs[watched]
        run.left_out, run.pause, run.told = run.pause, min(2 * run.pause, _LONGEST_PAUSE), False

    def lives_at_floor(self, watched: Watched) -> bool:
        """Tells whether gradients of the loss in `watched` overflow whenever the loss scale grows from its floor."""
        return watched in self._runs and self._runs[watched].lives_at_floor

    def _look(self, steps: Sequence[_Step], host: Sequence[Tensor]) -> Alarm | None:
        numbers = map(_number, host)
        values = [
            (parts, bool(next(numbers)), bad is not None and next(numbers), dict(zip(scales, numbers, strict=False)))
            for parts, _, bad, scales in steps
        ]
        if not self._runs and not any(skipped for _, skipped, *_ in values):
            return None
        found: Alarm | None = None
        for parts, skipped, bad, scales in values:
            who = tuple(map(id, parts))
            for loss_id, scale in scales.items():
                run = self._runs.setdefault((who, loss_id), _Streak())
                run.length = run.length + 1 if skipped else 0
                run.left_out -= 1
                run.steps += 1
                if not skipped:
                    continue
                if bad or not self._floor:
                    run.odd.append(run.steps)
                elif run.length == 1 and self._floor < scale <= self._near:
                    run.near.append(run.steps)
                if run.left_out < 0 and (found is None or found[2]):  # one that is not mild comes first
                    at_floor = not bad and (scale <= self._floor or run.lives_at_floor)
                    found = _alarm((who, loss_id), run, at_floor=at_floor) or found
        if found is not None:
            self._runs[found[0]].length = 0
        return found


def _alarm(about: Watched, run: _Streak, *, at_floor: bool) -> Alarm | None:
    if run.length >= WINDOW or at_floor:
        return about, "like those before it", False
    if run.lately(run.odd, _HALF):
        run.odd.clear()
        return about, "like half of those before it", False
    if run.told or run.length >= _OFTEN or not run.lately(run.odd, _OFTEN):  # these may be many in a row
        return None
    run.told = True
    return about, "like at least one in twenty of those before it", True


def _number(t: Tensor) -> float:
    """Returns the value of a 0-dim bool or fp32 tensor on the host, read from memory without a torch operation."""
    return float((c_bool if t.dtype is torch.bool else c_float).from_address(t.data_ptr()).value)


# ---- growth: of a result with the loss scale, of weights in this session
_BILINEAR = (
    "mul", "mm", "bmm", "mv", "dot", "vdot", "outer", "ger",
    "addmm", "baddbmm", "addbmm", "addmv", "addr",  # these add a product to their first argument
)  # fmt: skip
_CONSTANT = (
    "sign", "sgn", "heaviside", "signbit", "angle", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "argsort",
    "isfinite", "isnan", "isinf", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "fill",
    "zero", "rand_like", "randn_like",
)  # fmt: skip
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_FACTOR = 30.0  # larger than training makes the weights of a layer
_LARGE = 1.0  # weights that begin near 0 may grow by any factor up to here


def degree(note: Note) -> float:
    """Returns k such that a result is proportional to loss_scale**k."""
    known: dict[int, float] = {}
    for each in reached_from([note], "sources"):
        known[each.index] = _degree(each, [0.0 if s is None else known.get(s.index, 0.0) for s in each.sources])
    return known[note.index]


def _degree(note: Note, of: Sequence[float]) -> float:
    if note.root or note.phase != "backward":
        return 1.0 if note.root else 0.0
    name = note.aten if note.aten.startswith("__") else note.aten.rstrip("_")
    if name in _CONSTANT or not of:
        return 0.0
    first, others = of[0], sum(of[1:])
    known = {
        **dict.fromkeys(_BILINEAR, max(first, others) if name.startswith(("add", "badd")) else first + others),
        **dict.fromkeys(("div", "true_divide"), first - others),
        **dict.fromkeys(("pow", "float_power"), first * (note.scalars[0] if note.scalars else 2.0)),
        **{power: first * by for power, by in _POWERS.items()},
    }
    return known.get(name, max(of))


@dataclass(frozen=True)
class Growth:
    """A parameter whose values have grown, and their root mean square at the start of the session and now."""

    name: str
    first: float
    now: float  # infinite if the sum of the squares exceeds fp32's range


def sizes_of(roots: Sequence[nn.Module], full: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Returns the root mean square of each trainable matrix of weights, on its device, keyed by name."""
    sizes: dict[str, Tensor] = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            value = local(full(parameter)).detach()
            if (
                parameter.requires_grad
                and value.dim() > 1
                and value.is_floating_point()
                and value.numel()
                and not value.is_meta
            ):
                norm = torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32))
                sizes.setdefault(name, norm / value.numel() ** 0.5)
    return sizes


def outgrown(first: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Growth | None:
    """Returns the parameter that has grown by the largest factor, or is NaN; None if training makes all these sizes."""
    both = [Growth(name, float(first[name]), float(size)) for name, size in now.items() if name in first]
    sound = [each for each in both if math.isfinite(each.first)]
    grown = [each for each in sound if not each.now <= max(_FACTOR * each.first, _LARGE)]
    return max(grown, key=lambda each: (math.isnan(each.now), each.now / max(each.first, 1e-9)), default=None)
