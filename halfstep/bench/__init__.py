"""The same work under several plans and under torch.amp, side by side: speed, memory, accuracy."""

from halfstep.bench.bench import bench
from halfstep.bench.contenders import Entry, entries

__all__ = ["Entry", "bench", "entries"]
