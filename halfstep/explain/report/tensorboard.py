"""Logs a session's steps and observations to TensorBoard; needs the extra [tensorboard]."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from halfstep.errors import LogError
from halfstep.explain.report.log import NumbersSink, name_of, path_of, reason
from halfstep.records import BIAS, Observation

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        f"halfstep.explain.report.tensorboard needs {error.name or 'tensorboard'}; "
        "run: pip install 'halfstep[tensorboard]'"
    ) from error


class TensorBoard(NumbersSink):
    """Logs a run to a TensorBoard folder: `initialize(..., sinks=[TensorBoard(folder)])`.

    The scalars of a step are its loss, gradient norm, loss scale, and whether it was skipped and a loss was not finite
    (1 or 0). Each observed tensor has two more scalars: the share of its values that the plan's low format rounds to
    zero, and the share beyond the format's range. Histograms show base-2 logarithms of the true magnitudes. Verdicts
    and findings are texts. No step waits for the device. `close()` writes what is left.

    Raises:
        LogError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        path = path_of(folder)
        self.where = str(path)
        try:
            self._writer = SummaryWriter(self.where)
        except (OSError, ValueError) as error:
            raise LogError(f"the folder {path} cannot be written: {reason(error)}; name another folder") from None

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def write_observation(self, seen: Observation) -> None:
        used = [entry for entry, count in enumerate(seen.stats.exponents) if count]
        if not used:
            return
        shift = math.log2(seen.scale) if 0 < seen.scale < math.inf else 0.0
        counts = list(seen.stats.exponents[used[0] : used[-1] + 1])
        starts = [entry - BIAS - shift for entry in range(used[0], used[-1] + 1)]
        histogram = {
            "min": starts[0],
            "max": starts[-1] + 1,
            "num": sum(counts),
            "sum": math.fsum((start + 0.5) * count for start, count in zip(starts, counts, strict=True)),
            "sum_squares": math.fsum((start + 0.5) ** 2 * count for start, count in zip(starts, counts, strict=True)),
            "bucket_limits": [start + 1 for start in starts],
            "bucket_counts": counts,
        }
        self._writer.add_histogram_raw(f"log2 of {name_of(seen)}", **histogram, global_step=seen.step)

    def finish(self) -> None:
        self._writer.close()
