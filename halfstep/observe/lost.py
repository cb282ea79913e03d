"""The share of updates that are too small for the format in which a weight is stored."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.records import UPDATE, Observation, TensorStats


def lost_by_module(observations: Iterable[Observation]) -> dict[str, float]:
    """Returns for each module the share of lost updates, over all its parameters and all steps in `observations`."""
    merged: dict[str, TensorStats] = {}
    for seen in observations:
        if seen.kind == UPDATE:
            old = merged.get(seen.module)
            merged[seen.module] = seen.stats if old is None else old + seen.stats
    return {module: stats.below(0.5) / stats.nonzero if stats.nonzero else 0.0 for module, stats in merged.items()}
