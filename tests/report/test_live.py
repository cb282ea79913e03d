"""The live line: what it shows, how often, and that it is silent where no one looks."""

import io
import logging
import sys

import pytest
from rich.console import Console
from rich.logging import RichHandler

import halfstep.explain.report.live
from halfstep.errors import LogError
from halfstep.explain.report.live import LiveLine
from halfstep.records import Finding
from tests.report.logs import START, seen, step


class Clock:
    """Time that passes when told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(halfstep.explain.report.live.time, "monotonic", lambda: self.now)


def screen(*, terminal=True):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, color_system=None)


def text(console):
    return console.file.getvalue()


def test_the_line_has_step_loss_norm_scale_and_skips():
    console = screen()
    with LiveLine(console=console) as line:
        line(step(1, skipped=True, scale=65536, norm=float("inf"), loss=2))
        line(step(2, scale=32768, norm=0.5, loss=1.25))
        line(step(3, skipped=True, bad=True))
    assert "skipped 2 (loss not finite: 1)" in text(console)


def test_it_is_drawn_as_often_as_told(monkeypatch):
    clock, console = Clock(monkeypatch), screen()
    line = LiveLine(console=console, per_second=2)
    for number in range(1, 101):  # eight a second
        line(step(number))
        clock.now += 0.125
    line.close()
    drawn = [number for number in range(1, 101) if f"step {number} " in text(console)]
    assert drawn == [*range(1, 100, 4), 100]


def test_where_there_is_no_terminal_it_is_silent():
    console = screen(terminal=False)
    with LiveLine(console=console) as line:
        line(step(1))
    assert text(console) == ""


def test_findings_go_above_the_line_and_other_records_nowhere():
    console = screen()
    with LiveLine(console=console) as line:
        line.record(START)
        line.record(seen(1, "m", {0: 1}))
        line(step(1))
        line.record(Finding("warning", "eps", "norm[0]", "1e-8", "use 1e-6"))
    assert "warning: eps at norm[0]" in text(console)
    assert "norm[0]" in text(console).rpartition("step 1 ")[0]


def test_a_finding_keeps_its_lines_in_a_file():
    console = screen(terminal=False)
    with LiveLine(console=console) as line:
        line.record(Finding("warning", "eps", "norm", "word " * 50, "use 1e-6"))
    assert text(console).splitlines()[1:] == ["  seen: " + "word " * 50, "  do: use 1e-6"]


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_the_cursor_comes_back_once_however_often_it_is_closed(closed):
    console = screen()
    line = LiveLine(console=console)
    line(step(1))
    assert text(console).count("\x1b[?25l") == 1
    for _ in range(closed):
        line.close()
    del line
    assert text(console).count("\x1b[?25h") == 1


def test_after_close_nothing_is_drawn_and_the_cursor_stays():
    console = screen()
    line = LiveLine(console=console, per_second=1e9)
    line(step(1))
    line.close()
    before = text(console)
    line(step(2))
    line.close()
    assert text(console) == before


class Terminal(io.StringIO):
    """A standard stream that says it is a terminal."""

    def isatty(self):
        return True


def test_what_is_logged_to_standard_error_goes_above_the_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    stream = sys.stderr
    with LiveLine() as line:
        line(step(1))
        logging.lastResort.handle(logging.makeLogRecord({"msg": "something"}))  # which takes what no handler does
    assert sys.stderr is stream
    assert "step 1  scale 1  skipped 0\r\x1b[2Ksomething\nstep 1" in stream.getvalue()


def test_a_log_handler_with_the_same_console_goes_above_the_line():
    console = screen()
    handler = RichHandler(console=console, show_time=False, show_path=False)
    with LiveLine(console=console) as line:
        line(step(1))
        handler.handle(logging.makeLogRecord({"msg": "something", "levelno": 30, "levelname": "WARNING"}))
    shown = text(console)
    before, _, after = shown.partition("something")
    assert before.count("step 1 ") == 1
    assert before.rpartition("step 1 ")[2].endswith("skipped 0\r\x1b[2KWARNING  ")
    assert "step 1  scale 1  skipped 0" in after


@pytest.mark.parametrize("setting", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_is_no_terminal_whatever_the_environment_says(monkeypatch, setting):
    monkeypatch.setenv(setting, "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with LiveLine() as line:
        line(step(1))
    assert sys.stderr.getvalue() == ""


def test_a_process_without_standard_streams_has_no_line(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with LiveLine() as line:
        line(step(1))


@pytest.mark.parametrize("often", [0, -1.0, "x", None, True])
def test_a_line_that_is_never_drawn_is_refused(often):
    with pytest.raises(LogError, match="must be a number > 0"):
        LiveLine(per_second=often)
