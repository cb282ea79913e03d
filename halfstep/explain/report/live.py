"""A line in the terminal that shows a run's progress."""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from halfstep.errors import LogError
from halfstep.later import COLUMNS, AsyncReader
from halfstep.records import Finding, Observation, SessionStart, StepRecord, StepValues, Verdict, absorbed_finding
from halfstep.validate import with_near_misses

SPEED_OVER = 50  # steps
FORMS = {"loss": "loss {:.4f}", "grad_norm": "norm {:.3g}", "scale": "scale {:g}"}  # of the numbers of a step


@with_near_misses
class LiveLine(AbstractContextManager["LiveLine"]):
    """Shows step, loss, norm, scale and skips in one line: `initialize(..., sinks=[LiveLine()])`.

    The line is drawn at most `per_second` times per second, and only in a terminal. No step waits for the device;
    `close()` draws the last step. Verdicts, findings, absorbed overflows and text written to `sys.stdout` or
    `sys.stderr` appear above the line.

    A log handler that was set up earlier still writes to the original stream, and so into the line. To prevent that,
    give both the same console: `LiveLine(console=console)` and `rich.logging.RichHandler(console=console)`. Do not show
    a progress bar in the same terminal.

    Raises:
        LogError: `per_second` is not a positive number.
    """

    def __init__(self, *, console: Console | None = None, per_second: float = 4.0) -> None:
        if isinstance(per_second, bool) or not isinstance(per_second, (int, float)) or not per_second > 0:
            raise LogError(f"per_second (redraws per second) must be a number > 0, got {per_second!r}")
        self._console = console or Console(stderr=True, highlight=False, force_terminal=_at_terminal(sys.stderr))
        self._wait = 1.0 / per_second
        self._steps = AsyncReader()
        self._skipped = self._bad_losses = 0
        self._times: deque[tuple[int, float]] = deque(maxlen=SPEED_OVER)
        self._last: StepValues | None = None
        self._drawn = -1.0
        self._said: set[str] = set()  # the places of absorbed overflows
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=_at_terminal(sys.stdout),  # what is printed into a file stays there
            redirect_stderr=_at_terminal(sys.stderr),
        )
        self._finish = weakref.finalize(self, self._live.stop)  # the cursor comes back without close() too

    def __call__(self, record: StepRecord) -> None:
        """Receives a step's record without waiting for the device; does nothing after `close()`."""
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
        """Prints verdicts, findings and each place's first absorbed overflow above the line."""
        text = ""
        if isinstance(record, (Verdict, Finding)):
            text = str(record)
        elif isinstance(record, Observation) and record.absorbed is not None:
            found = absorbed_finding(record)
            text = "" if found.place in self._said else f"step {record.step:,}: {found}"
            self._said.add(found.place)
        if text:
            self._console.print(text, markup=False, soft_wrap=True)  # a file has no width to wrap at

    def close(self) -> None:
        """Draws the last step, waiting for the device, and releases the terminal; idempotent."""
        for values in self._steps.rest():
            self._take(values)
        if self._finish.alive and self._last is not None:
            self._draw(self._last)
        self._finish()

    def _take(self, values: StepValues) -> None:
        self._last = values
        self._skipped += values.skipped
        self._bad_losses += bool(values.bad_loss)
        self._times.append((values.step, values.time))

    def _draw(self, last: StepValues) -> None:
        if not self._console.is_terminal:
            return
        (first_step, first), (_, end) = self._times[0], self._times[-1]
        shown = {name: value for name in reversed(COLUMNS) if (value := getattr(last, name)) is not None}
        parts = [f"step {last.step:,}"]
        parts += [FORMS.get(name, f"{name} {{:.4g}}").format(value) for name, value in shown.items()]
        parts += [f"skipped {self._skipped:,}" + f" (loss not finite: {self._bad_losses:,})" * bool(self._bad_losses)]
        parts += [f"{(last.step - first_step) / (end - first):.3g} steps/s"] if end > first else []
        if not self._live.is_started:
            self._live.start()
        self._live.update(Text("  ".join(parts), no_wrap=True, overflow="ellipsis"), refresh=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def _at_terminal(stream: TextIO | None) -> bool:
    """Returns whether a standard stream is a terminal; the stream may be None or replaced by any object."""
    ask = getattr(stream, "isatty", None)
    return ask is not None and bool(ask())
