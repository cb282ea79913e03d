"""What a script saves under `halfstep run` is what plain Python would have saved, whichever way."""

import copy
import io
import pickle
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import nn

from tests.adapters.under_run import under_run

X = torch.linspace(-1, 1, 32).reshape(8, 4)
LOWS = ["bf16", "fp16"]


class Saving(nn.Sequential):
    """Saves itself as models of Hugging Face do: the weights, and in a config the format that it finds them in."""

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def save_pretrained(self):
        self.seen = [self.dtype]
        return {"config": str(self.dtype), "weights": self.state_dict()}

    def save(self):
        return self.save_pretrained() | {"raw": [p.detach().clone() for p in self.parameters()]}


def trained():
    torch.manual_seed(0)
    model = Saving(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fit(model, optimizer)
    return model, optimizer


def fit(model, optimizer):
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


def stored(write):
    file = io.BytesIO()
    write(file)
    file.seek(0)
    return file


def values(model):
    return [value.clone() for value in model.state_dict().values()]


WAYS = {
    "state_dict": lambda m: list(m.state_dict().values()),
    "torch.save": lambda m: list(torch.load(stored(lambda f: torch.save(m, f)), weights_only=False).parameters()),
    "pickle": lambda m: list(pickle.loads(pickle.dumps(m)).parameters()),
    "parameters": lambda m: torch.load(stored(lambda f: torch.save(list(m.parameters()), f))),
    "detached": lambda m: torch.load(stored(lambda f: torch.save([p.detach() for p in m.parameters()], f))),
    "data": lambda m: pickle.loads(pickle.dumps([p.data for p in m.parameters()])),
    "deepcopy": lambda m: list(copy.deepcopy(m).parameters()),
    "deepcopy of a list": lambda m: copy.deepcopy(list(m.parameters())),
    "numpy": lambda m: [torch.as_tensor(p.detach().numpy().copy()) for p in m.parameters()],
    "tolist": lambda m: [torch.tensor(p.tolist()) for p in m.parameters()],
    "asarray": lambda m: [torch.as_tensor(np.asarray(p.data)) for p in m.parameters()],
    "save_pretrained": lambda m: list(m.save_pretrained()["weights"].values()),
    "save": lambda m: m.save()["raw"],
}


@pytest.mark.parametrize("low", LOWS)
def test_each_way_saves_the_fp32_values(low):
    with under_run("O2", low):
        model, optimizer = trained()
        expected = values(model)
        assert model[0].weight.dtype is not torch.float32
        for way, save in WAYS.items():
            saved = save(model)
            assert [value.dtype for value in saved] == [torch.float32] * 6, way
            assert all(map(torch.equal, saved, expected)), way
        row = model[0].weight.detach()[1:3, ::2]
        assert np.array_equal(row.numpy(), expected[0][1:3, ::2].numpy())
        assert model[0].weight.dtype is not torch.float32
        fit(model, optimizer)


def joblibs(model):
    joblib = pytest.importorskip("joblib")
    file = stored(lambda f: joblib.dump([model, dict(model.named_parameters())], f))
    copied, named = joblib.load(file)
    assert all(map(torch.equal, copied.parameters(), named.values()))
    return copied.state_dict()


def safetensors(model):
    safe = pytest.importorskip("safetensors.torch")
    with TemporaryDirectory() as folder:
        safe.save_model(model, f"{folder}/model")
        return safe.load_file(f"{folder}/model")


def onnxs(model):
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxscript")
    with TemporaryDirectory() as folder:
        torch.onnx.export(model, (X,), f"{folder}/model", verbose=False)
        graph = onnx.load(f"{folder}/model").graph
    return {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("way", [joblibs, safetensors, onnxs])
def test_libraries_save_the_fp32_values_and_training_goes_on(way):
    with under_run("O2", "bf16"):
        model, optimizer = trained()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        saved = way(model)
        assert saved.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in saved.items())
        fit(model, optimizer)
        assert model[0].weight.dtype is torch.bfloat16


def test_a_method_that_saves_finds_fp32_weights_and_leaves_them_as_they_were():
    with under_run("O2", "bf16"):
        model, optimizer = trained()
        model(X).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        assert model.save_pretrained()["config"] == "torch.float32"
        assert model.save()["config"] == "torch.float32"
        assert model.dtype is torch.bfloat16
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        optimizer.step()


def test_numbers_of_a_scripts_own_low_tensors_stay_as_they_are():
    with under_run("O2", "fp16"):
        trained()
        assert torch.ones(2, dtype=torch.float16).numpy().dtype == np.float16


EXPORTS = {
    "jit.trace": lambda model: torch.jit.trace(model, X),
    "export": lambda model: torch.export.export(nn.Sequential(*model), (X,)).module(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("how", EXPORTS)
def test_an_exported_program_is_that_of_plain_python_and_training_goes_on(how):
    with under_run("O2", "bf16") as run:
        model, optimizer = trained()
        program = EXPORTS[how](model)
        assert {p.dtype for p in program.parameters()} == {torch.float32}
        assert torch.equal(program(X), nn.Sequential(*copy.deepcopy(model))(X))
        fit(model, optimizer)
        assert model[0].weight.dtype is torch.bfloat16
    assert run.trained.steps == 2
