"""The examples of trainers run at small size."""

import pytest

for package in ("lightning", "accelerate", "transformers", "peft"):
    pytest.importorskip(package, reason=f"{package} is not installed; run ./dev adapters")

from tests.test_examples import data, run  # noqa: E402, F401
from tests.trainers.test_accelerate import fresh_state  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = {
    "lightning_cifar": ["--steps", "2", "--width", "4", "--batch", "16", "--data", "DATA", "--out", "DATA/lightning"],
    "fabric_char_lm": ["--steps", "2", "--width", "16", "--text", "DATA/text", "--out", "DATA/fabric.ckpt"],
    "accelerate_imdb": ["--steps", "2", "--data", "DATA"],
    "hf_trainer_finetune": ["--steps", "2", "--data", "DATA", "--out", "DATA/hf"],
    "peft_lora": ["--steps", "2", "--data", "DATA", "--out", "DATA/lora"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains(name, data, monkeypatch, capsys):  # noqa: F811
    assert 0 < run(name, EXAMPLES[name], data, monkeypatch, capsys) < 10
