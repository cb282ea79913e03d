"""Finds fp32 inputs and buffers that turn all later values into fp32, which modules then cast again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfstep.explain.diagnose.words import in_model, which_model
from halfstep.explain.tape.locator import Locator
from halfstep.explain.tape.recorder import Note
from halfstep.formats import is_low

INPUT = "an input"
ENOUGH = 2  # modules that must cast the widened values: with only one there is no stream
ADDED = ("add", "add_", "sub", "sub_", "rsub")


@dataclass
class Stream:
    """A chain of fp32 values that began when an operation combined low and fp32 values."""

    note: Note  # that operation
    source: str  # of its fp32 operand: an input or a buffer, in words
    casts: dict[str, None] = field(default_factory=dict)  # modules that have cast values of the chain to low since then

    def evidence(self) -> str:
        """Returns a sentence on what was observed: where the stream starts, and how many modules cast its values."""
        note, source = self.note, self.source
        what = f"{source} is added" if note.aten in ADDED else f"{source} meets low values in {note.aten}"
        return (
            f"values are fp32 from here on, because {what} here; {len(self.casts)} modules cast them to the low "
            f"format, first {in_model(next(iter(self.casts)))[1]}{which_model(note.module)}"
        )

    def advice(self) -> str:
        cure = f"to keep activations low, cast {self.source} where it is used"
        plan = ", or set input='low' in the plan, which rounds all inputs"
        return cure + plan * self.source.startswith((INPUT, "the input"))


class Streams:
    """Finds streams in a traced forward: an operation turns low values into fp32, and later values stay fp32."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator
        self._outside: dict[int, str] = {}  # by the index of the note that was computed from outside values only
        self._wide: dict[int, Stream] = {}  # by the index of the note
        self._streams: list[Stream] = []

    def look(self, note: Note, given: Sequence[Tensor]) -> None:
        """Examines one operation of a forward and its input tensors; skips views and non-floating-point results."""
        if note.dtype is None:
            return
        pairs = [(t, source) for t, source in zip(given, note.sources, strict=True) if t.is_floating_point()]
        wide = next((self._wide[s.index] for _, s in pairs if s is not None and s.index in self._wide), None)
        if wide is not None:
            if note.dtype is torch.float32:
                self._wide[note.index] = wide
            elif is_low(note.dtype) and note.module is not None:
                wide.casts[note.module] = None
            return
        if note.dtype is not torch.float32:
            return
        full = [(t, source) for t, source in pairs if t.dtype is torch.float32]
        known = [self._from_outside(t, source) for t, source in full]
        if any(is_low(t.dtype) for t, _ in pairs):
            found = next((each for (t, _), each in zip(full, known, strict=True) if each is not None and t.dim()), None)
            if found is not None and note.module is not None:
                stream = Stream(note, found)
                self._streams.append(stream)
                self._wide[note.index] = stream
        elif None not in known and (known or note.module is None):  # what the closure makes is an input
            self._outside[note.index] = next(filter(None, known), INPUT)

    def _from_outside(self, tensor: Tensor, source: Note | None) -> str | None:
        """Returns the outside source of a tensor; None if a module computed the tensor or it is a parameter."""
        if source is not None:
            return self._outside.get(source.index)
        kind, name, _ = self._locator.tensor(tensor) or ("input", "", tensor)
        if kind not in ("input", "buffer"):
            return None
        return f"the {kind} {name!r}" if name else INPUT

    def wide(self) -> list[Stream]:
        return [stream for stream in self._streams if len(stream.casts) >= ENOUGH]
