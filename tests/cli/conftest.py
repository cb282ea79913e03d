"""The command line, called as a user does."""

import sys

import pytest

from halfstep.__main__ import main


@pytest.fixture
def halfstep(monkeypatch, capsys):
    """Runs the command and returns exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["halfstep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run
