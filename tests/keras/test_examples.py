"""The examples for Keras run at small size."""

import pytest

pytest.importorskip("keras", reason="Keras is not installed; run ./dev adapters keras")

from halfstep.explain.report.html import page_html
from halfstep.explain.report.run import read_log
from tests.keras.common import BACKEND
from tests.test_examples import data, run  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = {
    "keras_fit": ("--steps 2 --width 4 --batch 16 --low fp16 --data DATA --out DATA/fit", "fit/run.jsonl", ""),
    "keras_gradient_tape": ("--steps 2 --data DATA --out DATA/tape.jsonl", "tape.jsonl", "tensorflow"),
    "keras_jax_step": ("--steps 2 --data DATA --out DATA/jax.jsonl", "jax.jsonl", "jax"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name, data, monkeypatch, capsys):  # noqa: F811
    arguments, log, backend = EXAMPLES[name]
    if backend not in ("", BACKEND):
        pytest.skip(f"of {backend}; this is {BACKEND}")
    (data / "fit").mkdir(exist_ok=True)
    assert 0 < run(name, arguments.split(), data, monkeypatch, capsys) < 10
    written = read_log(data / log)
    assert len(written.steps) == 2
    assert page_html(written).startswith("<!DOCTYPE html>")
