"""`halfstep report`."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from halfstep.explain.report.log import RunLog
from tests.report.logs import START, seen, step, write


@pytest.fixture
def report(halfstep):
    """Runs the command and returns exit code, output and errors."""
    return partial(halfstep, "report")


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "run.jsonl", [START, step(1, loss=1.0), seen(1, "head", {0: 1})])


def test_the_page_lies_beside_the_log(report, log):
    assert report(log) == (0, f"{log.with_suffix('.html')}\n", "")
    page = log.with_suffix(".html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "https://cdn" not in page.partition("Plotly")[0]


def test_a_folder_is_enough_and_the_page_goes_where_it_is_told(report, log, tmp_path):
    page = tmp_path / "elsewhere.html"
    assert report(tmp_path, "--output", page) == (0, f"{page}\n", "")
    assert page.exists()


def test_what_the_log_lacks_is_said(report, tmp_path):
    path = write(tmp_path / "run.jsonl", [step(1)])
    code, out, _ = report(path)
    assert code == 0
    assert "note: no session is in the log" in out
    assert "note: no tensor was observed" in out


def test_logs_of_several_processes_have_a_row_each(report, tmp_path):
    paths = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    open_logs = [RunLog(path) for path in paths]  # at the same time
    for process, log in enumerate(open_logs):
        log.record(replace(START, process=process))
        log(step(1, loss=1.0 if process == 0 else math.inf, skipped=True))
        log.close()
    code, out, _ = report(*reversed(paths))
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["0", str(paths[0]), "1", "to", "1", "1", "1"] in rows
    assert ["1", str(paths[1]), "1", "to", "1", "1", "1", "step", "1:", "its", "loss"] in rows
    assert out.endswith(f"first not finite, at step 1: process 1: its loss\n{tmp_path / '0.html'}\n")
    assert "<td>step 1: its loss</td>" in (tmp_path / "0.html").read_text(encoding="utf-8")
    paths[1].write_bytes(paths[0].read_bytes())
    code, out, err = report(*paths)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "are both of process 0" in err


def test_another_format_can_judge(report, log):
    assert report(log, "--low", "e4m3")[0] == 0
    assert "what e4m3 can hold" in log.with_suffix(".html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "there is no file nowhere"),
        (("LOG", "--output", "NOWHERE/page.html"), "cannot be written"),
        (("LOG", "--output", "LOG"), "would overwrite the log"),
        (("LOG", "--low", "fp12"), "unknown format 'fp12'"),
        (("EMPTY",), "is empty"),
        (("OTHER",), "schema 7"),
    ],
)
def test_what_cannot_be_done_is_one_message(report, log, tmp_path, arguments, message):
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_text('{"type":"start","schema":7}\n', encoding="utf-8")
    names = {"LOG": log, "EMPTY": tmp_path / "empty", "OTHER": tmp_path / "other", "NOWHERE": tmp_path / "nowhere"}
    for name, path in names.items():
        arguments = [str(argument).replace(name, str(path)) for argument in arguments]
    before = log.read_bytes()
    code, out, err = report(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert log.read_bytes() == before


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_extra_is_named(report, log, monkeypatch, package):
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(()))  # no part of plotly.js was fetched
    monkeypatch.delitem(sys.modules, "halfstep.explain.report.html", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(package), *sys.meta_path])
    code, _, err = report(log)
    assert code == 2
    assert err == f"halfstep: halfstep report needs {package}; run: pip install 'halfstep[report]'\n"


class Absent:
    """An importer for which a package is not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
