"""What the Keras adapter says where Keras, its backend or the right release of it is missing; runs without Keras."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import halfstep
from halfstep.errors import SetupError

INSTALLED = Path(halfstep.__file__).parent / "adapters" / "keras" / "installed.py"


class Missing:
    """A finder that has no module of this name, even where it is installed."""

    def __init__(self, name, of):
        self.name, self.of = name, of

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {self.of!r}", name=self.of)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("keras", r"needs keras; run: pip install 'halfstep\[keras\]'"),
        ("tensorflow", r"run on tensorflow, which is not installed; run: pip install tensorflow, or .* = 'torch'"),
    ],
)
def test_what_is_missing_is_said_with_the_line_to_write(missing, words, monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing("keras", missing), *sys.meta_path])
    with pytest.raises(ImportError, match=words):
        runpy.run_path(str(INSTALLED))


def test_a_keras_before_3_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__="2.15.0"))
    with pytest.raises(SetupError, match=r"keras 2.15.0 is installed.*pip install 'keras>=3"):
        runpy.run_path(str(INSTALLED))
