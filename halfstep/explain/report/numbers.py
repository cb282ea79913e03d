"""The numbers of a session's steps and observations for run loggers, under the same names in each logger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from halfstep.explain.report.log import reason
from halfstep.formats import FORMATS, FP16, Format
from halfstep.later import COLUMNS, FLAGS, AsyncReader
from halfstep.records import (
    BIAS,
    LIMITS,
    OPERAND,
    UPDATE,
    Finding,
    Observation,
    SessionStart,
    StepRecord,
    StepValues,
    Verdict,
    absorbed_finding,
)

_LOG = logging.getLogger("halfstep")


class NumbersSink(AbstractContextManager["NumbersSink"]):
    """The base class of sinks that write a session's steps, observations, verdicts and findings to a run logger.

    The numbers of a step are named `halfstep/loss`, `halfstep/grad_norm`, `halfstep/scale`, `halfstep/skipped` and
    `halfstep/bad_loss`. No step waits for the device. `close()` writes what is left. A failed write ends the logging,
    not the training.
    A subclass defines `write_numbers`, `write_text` and `finish`, and lists in `errors` the exceptions they may raise.
    """

    where = "the logger"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        self._failed = False
        self._steps = AsyncReader()
        self._last = 0
        self._low: Format = FP16

    def __call__(self, record: StepRecord) -> None:
        self._last = record.step
        self._steps.add(record)
        for values in self._steps.ready():
            self._write_step(values)

    def record(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Receives any other record: session starts, observations, verdicts and findings."""
        match record:
            case SessionStart():
                self._low = FORMATS.get(str(record.plan.get("low")), FP16)
            case Observation() if record.absorbed is not None:
                self._use(self.write_text, "finding", str(absorbed_finding(record)), record.step)
            case Observation():
                self._use(self.write_numbers, shares_of(record, self._low), record.step, None)
                self._use(self.write_observation, record)
            case Verdict() | Finding():
                self._use(self.write_text, type(record).__name__.lower(), str(record), self._last)

    def close(self) -> None:
        """Writes what is left, waiting for the device, and calls `finish`; idempotent."""
        for values in self._steps.rest():
            self._write_step(values)
        self._use(self.finish)

    def write_numbers(self, numbers: Mapping[str, float], step: int, time: float | None) -> None:
        """Writes a step's numbers by name; `time` is in seconds since 1970, None means now."""
        raise NotImplementedError

    def write_text(self, name: str, text: str, step: int) -> None:
        raise NotImplementedError

    def write_observation(self, seen: Observation) -> None:
        """Writes an observation's histogram, if the logger supports histograms; by default does nothing."""

    def finish(self) -> None:
        """Closes the logger's files or waits for its threads; by default does nothing."""

    def _write_step(self, values: StepValues) -> None:
        found = {f"halfstep/{name}": getattr(values, name) for name in (*COLUMNS, *FLAGS)}
        numbers = {name: float(value) for name, value in found.items() if value is not None}
        self._use(self.write_numbers, numbers, values.step, values.time)

    def _use(self, write: Callable[..., object], *given: object) -> None:
        """Calls `write`; if it fails (full disk, lost server), logging ends with a warning and training goes on."""
        if self._failed:
            return
        try:
            write(*given)
        except self.errors as error:
            self._failed = True
            why = reason(error) if isinstance(error, OSError) else error
            _LOG.warning("%s can no longer be written (%s); the run goes on without it", self.where, why)

    def __exit__(self, *_: object) -> None:
        self.close()


def name_of(seen: Observation) -> str:
    """Returns the full name of an observed tensor: its kind, its module and its name in the module."""
    return f"{seen.kind}/{'.'.join(filter(None, [seen.module or 'model', seen.name]))}"


def shares_of(seen: Observation, low: Format) -> dict[str, float]:
    """Returns the shares of an observed tensor's values that `low` cannot represent, by name."""
    shares: dict[str, float] = {}
    stats, own, name = seen.stats, LIMITS.get(seen.kind), name_of(seen)
    if stats.nonzero:
        shares[f"lost/{name}"] = stats.lost(low) if own is None else stats.below(own.zero) / stats.nonzero
    if seen.kind != UPDATE:
        beyond = stats.exponents[BIAS + 2] / stats.count if seen.kind == OPERAND else stats.saturated(low)
        shares[f"saturated/{name}"] = beyond
    return shares
