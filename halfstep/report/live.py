"""A line in the terminal that shows how a run goes."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from halfstep.errors import LogError
from halfstep.records import Finding, Observation, SessionStart, StepRecord, StepValues, Verdict
from halfstep.report.late import LateReader

SPEED_OVER = 50  # steps


class LiveLine:
    """Shows step, loss, norm, scale and skips in one line: `initialize(..., sinks=[LiveLine()])`.

    It is drawn at most `per_second` times a second, and not at all where there is no terminal; what else is printed or
    logged goes above it, as verdicts and findings do. No step waits for the device. `close()` draws the last step.
    Another line that draws itself anew, such as a progress bar, needs a terminal of its own.

    Raises:
        LogError: `per_second` is no positive number.
    """

    def __init__(self, *, console: Console | None = None, per_second: float = 4.0) -> None:
        if isinstance(per_second, bool) or not isinstance(per_second, (int, float)) or not per_second > 0:
            raise LogError(f"per_second is {per_second!r}; give how often a second the line may be drawn, above 0")
        self._console = console or Console(stderr=True, highlight=False, force_terminal=_at_terminal(sys.stderr))
        self._wait = 1.0 / per_second
        self._steps = LateReader()
        self._skipped = 0
        self._times: deque[tuple[int, float]] = deque(maxlen=SPEED_OVER)
        self._last: StepValues | None = None
        self._drawn = -1.0
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=_at_terminal(sys.stdout),  # what is printed into a file stays there
            redirect_stderr=_at_terminal(sys.stderr),
        )
        self._undo = ExitStack()
        self._finish = weakref.finalize(self, self._undo.close)

    def __call__(self, record: StepRecord) -> None:
        """Takes what a step did; does not wait for the device. After `close()` it does nothing."""
        if not self._finish.alive:
            return
        self._steps.add(record)
        for values in self._steps.ready():
            self._take(values)
        now = time.monotonic()
        if self._last is not None and now - self._drawn >= self._wait:
            self._drawn = now
            self._draw(self._last)

    def record(self, record: SessionStart | Observation | Verdict | Finding) -> None:
        """Prints verdicts and findings above the line."""
        if isinstance(record, (Verdict, Finding)):
            self._console.print(str(record), markup=False, soft_wrap=True)  # a file has no width to wrap at

    def close(self) -> None:
        """Draws the last step, waiting for the device, and leaves the line; twice is once."""
        for values in self._steps.rest():
            self._take(values)
        if self._finish.alive and self._last is not None:
            self._draw(self._last)
        self._finish()

    def _take(self, values: StepValues) -> None:
        self._last = values
        self._skipped += values.skipped
        self._times.append((values.step, values.time))

    def _draw(self, last: StepValues) -> None:
        if not self._console.is_terminal:
            return
        (first_step, first), (_, end) = self._times[0], self._times[-1]
        parts = [f"step {last.step:,}"]
        parts += [f"loss {last.loss:.4f}"] if last.loss is not None else []
        parts += [f"norm {last.grad_norm:.3g}"] if last.grad_norm is not None else []
        parts += [f"scale {last.scale:g}", f"skipped {self._skipped:,}"]
        parts += [f"{(last.step - first_step) / (end - first):.3g} steps/s"] if end > first else []
        if not self._live.is_started:
            self._start()
        self._live.update(Text("  ".join(parts), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _start(self) -> None:
        before = sys.stdout, sys.stderr
        self._undo.callback(self._live.stop)
        self._live.start()
        for handler in _stream_handlers():  # they hold the streams as they were when logging was set up
            for old, new in zip(before, (sys.stdout, sys.stderr), strict=True):
                if new is not old and handler.stream is old:
                    handler.setStream(new)
                    self._undo.callback(handler.setStream, old)
                    break

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _at_terminal(stream: TextIO | None) -> bool:
    """Returns whether a standard stream, which may be absent or replaced by anything, is a terminal."""
    ask = getattr(stream, "isatty", None)
    return ask is not None and bool(ask())


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a place for a logger that is not there yet has none
            if isinstance(handler, logging.StreamHandler):
                yield handler
