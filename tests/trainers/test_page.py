"""The code of docs/trainers.md runs as it stands there."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

lightning = pytest.importorskip("lightning", reason="Lightning is not installed; run ./dev adapters")
accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed; run ./dev adapters")
pytest.importorskip("transformers", reason="transformers is not installed; run ./dev adapters")

from halfstep.adapters.accelerate import session_of  # noqa: E402
from halfstep.adapters.lightning import Halfstep  # noqa: E402
from tests.test_readme import BLOCKS  # noqa: E402
from tests.trainers.loops import batches, loss_of, network, optimizer_of, schedule_of  # noqa: E402
from tests.trainers.test_lightning import Module, data  # noqa: E402
from tests.trainers.test_transformers import arguments, fresh_state, language_model, samples  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")


def test_lightning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = Module()
    before = module.net[0].weight.detach().clone()
    short = SimpleNamespace(Trainer=partial(lightning.Trainer, max_epochs=1))  # the page leaves its 1,000 epochs
    exec(BLOCKS["lightning"], {"lightning": short, "module": module, "loader": data("O0", 4)})
    assert not torch.equal(module.net[0].weight, before)


def test_fabric(tmp_path):
    def train(fabric, model, optimizer):
        fabric.backward(loss_of(model, batches(1, None)[0]))
        optimizer.step()

    model = network()
    names = {"lightning": lightning, "Halfstep": Halfstep, "train": train, "path": tmp_path / "at.ckpt"}
    exec(BLOCKS["fabric"], names | {"model": model, "optimizer": optimizer_of(model)})
    held = torch.load(tmp_path / "at.ckpt", weights_only=True)
    assert held["halfstep"]["steps"] == 1
    assert held["model"]["0.weight"].dtype is torch.float32


def test_accelerate():
    model = network()
    optimizer = optimizer_of(model)
    loader = torch.utils.data.DataLoader(batches(4, None), batch_size=None)
    names = {"Accelerator": accelerate.Accelerator, "model": model, "optimizer": optimizer, "loader": loader}
    exec(BLOCKS["accelerate"], names := names | {"scheduler": schedule_of(optimizer)})
    assert session_of(names["accelerator"]).plan.name == "O2"
    session_of(names["accelerator"]).close()


def test_transformers(tmp_path):
    args = arguments(tmp_path, max_steps=2, save_strategy="no")
    names = {"model": language_model(), "args": args, "data": samples()}
    exec(BLOCKS["transformers"], names)
    assert names["trainer"].state.global_step == 2
