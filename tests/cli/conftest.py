"""The command line, called as a user does."""

import sys

import pytest

from halfstep.__main__ import main
from halfstep.machine import AVX512_BF16


@pytest.fixture(autouse=True)
def with_units(on_processor, peers_here):
    """Has rows named alike on every machine: bf16 is native. A test may ask for another class."""
    on_processor(AVX512_BF16)


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
