"""The share of updates that are too small for the format that a weight is stored in."""

from __future__ import annotations

from collections.abc import Iterable

from halfstep.records import UPDATE, Observation, TensorStats


def lost_by_module(observations: Iterable[Observation]) -> dict[str, float]:
    """Returns for each module the share of lost updates among those of all its parameters and steps that are given.

    Observations of other kinds are passed over; `Observation.lost_updates` says what is lost.
    """
    merged: dict[str, TensorStats] = {}
    for seen in observations:
        if seen.kind == UPDATE:
            old = merged.get(seen.module)
            merged[seen.module] = seen.stats if old is None else old + seen.stats
    return {module: stats.below(0.5) / stats.nonzero if stats.nonzero else 0.0 for module, stats in merged.items()}
