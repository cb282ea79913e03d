"""How a result of the backward pass depends on the loss scale, derived from the operations that led to it."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.observe.recorder import Note

_BILINEAR = (
    "mul", "mm", "bmm", "mv", "dot", "vdot", "outer", "ger",
    "addmm", "baddbmm", "addbmm", "addmv", "addr",  # these add a product to their first argument
)  # fmt: skip
_CONSTANT = (
    "sign", "sgn", "heaviside", "signbit", "angle", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "argsort",
    "isfinite", "isnan", "isinf", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "fill",
    "zero", "rand_like", "randn_like",
)  # fmt: skip


def degree(note: Note) -> float:
    """Returns k such that a result is proportional to loss_scale**k."""
    known: dict[int, float] = {}
    waiting = [note]
    while waiting:
        last = waiting[-1]
        missing = [each for each in _behind(last) if each.index not in known]
        if missing and last.index not in known:
            waiting += missing
            continue
        waiting.pop()
        known[last.index] = _degree(last, [0.0 if s is None else known.get(s.index, 0.0) for s in last.sources])
    return known[note.index]


def _behind(note: Note) -> list[Note]:
    """Returns the operations that wrote the arguments of `note`."""
    if note.root or note.phase != "backward":
        return []
    return [each for each in note.sources if each is not None and each.index < note.index]


def _degree(note: Note, of: Sequence[float]) -> float:
    if note.root or note.phase != "backward":
        return 1.0 if note.root else 0.0
    name = note.aten if note.aten.startswith("__") else note.aten.rstrip("_")
    first = of[0] if of else 0.0
    if name in _CONSTANT or not of:
        return 0.0
    if name == "square":
        return 2 * first
    if name in _BILINEAR:
        return max(first, sum(of[1:])) if name.startswith(("add", "badd")) else sum(of)
    if name in ("div", "true_divide"):
        return first - sum(of[1:])
    if name in ("pow", "float_power"):
        return first * (note.scalars[0] if note.scalars else 2.0)
    return first * _POWERS[name] if name in _POWERS else max(of)


_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
