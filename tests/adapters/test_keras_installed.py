"""What the Keras adapter says where Keras, its backend or the right release of it is missing; runs without Keras."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import halfstep
from halfstep.errors import SetupError

BACKEND = Path(halfstep.__file__).parent / "adapters" / "keras" / "backend.py"


class Failing:
    """A finder of Keras whose import fails, even where it is installed."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name == "keras":
            raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError(name="keras"), r"needs keras; run: pip install 'halfstep\[keras\]'"),
        (
            ModuleNotFoundError(name="tensorflow"),
            r"run on tensorflow, which is not installed; run: pip install tensorflow, or .* = 'torch'",
        ),
        (
            ValueError("Unable to import backend : jaxx"),
            r"jaxx; choose tensorflow, jax or torch .* = 'torch'",
        ),
    ],
)
def test_what_is_missing_is_said_with_the_line_to_write(error, words, monkeypatch):
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Failing(error), *sys.meta_path])
    with pytest.raises(ImportError, match=words):
        runpy.run_path(str(BACKEND))


@pytest.mark.parametrize("version", ["2.15.0", "3.3.3"])
def test_a_keras_before_3_and_an_early_one_are_refused(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__=version))
    with pytest.raises(SetupError, match=rf"keras {version} is installed.*pip install 'keras>=3"):
        runpy.run_path(str(BACKEND))
