"""A session's steps and observations for TensorBoard; needs the extra [tensorboard]."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from types import TracebackType

from halfstep.errors import LogError
from halfstep.formats import FORMATS, FP16, Format
from halfstep.records import (
    BIAS,
    UPDATE,
    Finding,
    Observation,
    SessionStart,
    StepRecord,
    StepValues,
    Verdict,
    absorbed_finding,
)
from halfstep.report.late import LateReader
from halfstep.report.log import path_of, reason

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise ImportError(
        f"halfstep.report.tensorboard needs {error.name or 'tensorboard'}; run: pip install 'halfstep[tensorboard]'"
    ) from error

_LOG = logging.getLogger("halfstep")


class TensorBoard:
    """Writes a run into a folder of TensorBoard: `initialize(..., sinks=[TensorBoard(folder)])`.

    Scalars are loss, gradient norm, loss scale, skipped, and of each observed tensor the share that the plan's low
    format rounds to zero and the share beyond it; histograms are those of the base-2 logarithms of true magnitudes;
    verdicts and findings are texts. No step waits for the device. `close()` writes what is left.

    Raises:
        LogError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = path_of(folder)
        try:
            self._writer = SummaryWriter(str(self._folder))
        except (OSError, ValueError) as error:
            raise LogError(f"the folder {self._folder} cannot be written: {reason(error)}; name another") from None
        self._failed = False
        self._steps = LateReader()
        self._last = 0
        self._low: Format = FP16

    def __call__(self, record: StepRecord) -> None:
        """Takes what a step did; does not wait for the device."""
        self._last = record.step
        self._steps.add(record)
        for values in self._steps.ready():
            self._write(values)

    def record(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Takes any other record."""
        match record:
            case SessionStart():
                self._low = FORMATS.get(str(record.plan.get("low")), FP16)
            case Observation():
                self._write_observation(record)
            case Verdict() | Finding():
                name = type(record).__name__.lower()
                self._use(lambda: self._writer.add_text(name, f"```\n{record}\n```", self._last))

    def close(self) -> None:
        """Writes what is left, waiting for the device, and closes the files; idempotent."""
        for values in self._steps.rest():
            self._write(values)
        self._use(self._writer.close)

    def _use(self, write: Callable[[], object]) -> None:
        """Writes; a disk that is full ends that, not the training."""
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            why = reason(error)
            _LOG.warning("%s cannot be written any more (%s); the run goes on without TensorBoard", self._folder, why)

    def _scalar(self, name: str, value: float, step: int, time: float | None = None) -> None:
        self._use(lambda: self._writer.add_scalar(name, value, step, walltime=time))

    def _write(self, values: StepValues) -> None:
        for name in ("loss", "grad_norm", "scale", "skipped"):
            value = getattr(values, name)
            if value is not None:
                self._scalar(f"step/{name}", float(value), values.step, values.time)

    def _write_observation(self, seen: Observation) -> None:
        if seen.absorbed is not None:
            text = f"```\n{absorbed_finding(seen)}\n```"
            self._use(lambda: self._writer.add_text("finding", text, seen.step))
            return
        tensor = f"{seen.kind}/{'.'.join(filter(None, [seen.module or 'model', seen.name]))}"
        stats = seen.stats
        if stats.nonzero:
            lost = seen.lost_updates
            self._scalar(f"lost/{tensor}", stats.lost(self._low) if lost is None else lost, seen.step)
        if seen.kind != UPDATE:
            self._scalar(f"saturated/{tensor}", stats.saturated(self._low), seen.step)
        used = [entry for entry, count in enumerate(stats.exponents) if count]
        if not used:
            return
        shift = math.log2(seen.scale) if 0 < seen.scale < math.inf else 0.0
        counts = list(stats.exponents[used[0] : used[-1] + 1])
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
        self._use(lambda: self._writer.add_histogram_raw(f"log2 of {tensor}", **histogram, global_step=seen.step))

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
