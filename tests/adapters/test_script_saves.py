"""What a script saves under `halfstep run` is what plain Python would have saved, whichever way."""

import copy
import io
import pickle
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

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


class Wrapper(nn.Module):
    """Is never called."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def save_weights(self):
        return [p.detach().clone() for p in self.parameters()]


def copied_into(model):
    tensors = [torch.zeros(p.shape) for p in model.parameters()]
    for t, p in zip(tensors, model.parameters(), strict=True):
        t.copy_(p.data)
    return tensors


def filled(model):
    tensors = [torch.zeros(2 * len(p), *p.shape[1:]) for p in model.parameters()]
    for t, p in zip(tensors, model.parameters(), strict=True):
        t[: len(p)] = p.data
    return [t[: len(t) // 2] for t in tensors]


def foreach(name, *args):
    def written(model):
        tensors = [torch.zeros(p.shape) for p in model.parameters()]
        getattr(torch, name)(tensors, [p.data for p in model.parameters()], *args)
        return tensors

    return written


def vector(model):
    parts = nn.utils.parameters_to_vector(model.parameters()).detach().split([p.numel() for p in model.parameters()])
    return [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]


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
    "dlpack": lambda m: [torch.from_dlpack(p.detach()) for p in m.parameters()],
    "clone": lambda m: [p.detach().clone() for p in m.parameters()],
    "clone with a gradient": lambda m: [p.cpu().clone() for p in m.parameters()],
    "float": lambda m: [p.data.float() for p in m.parameters()],
    "to": lambda m: [p.data.to("cpu", copy=True) for p in m.parameters()],
    "deepcopy of data": lambda m: copy.deepcopy([p.data for p in m.parameters()]),
    "copy_": copied_into,
    "lerp_": lambda m: [torch.zeros(p.shape).lerp_(p.detach(), 1.0) for p in m.parameters()],
    "add_": lambda m: [torch.zeros(p.shape).add_(p.data) for p in m.parameters()],
    "a slice": filled,
    "_foreach_copy_": foreach("_foreach_copy_"),
    "_foreach_lerp_": foreach("_foreach_lerp_", 1.0),
    "parameters_to_vector": vector,
    "a wrapper": lambda m: Wrapper(m).save_weights(),
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


def safetensors_of_weights(model):
    safe = pytest.importorskip("safetensors.torch")
    return safe.load(safe.save({name: p.data for name, p in model.named_parameters()}))


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("way", [joblibs, safetensors, safetensors_of_weights, onnxs])
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


def test_a_saved_low_tensor_of_a_weights_shape_is_told_once(caplog):
    with under_run("O2", "bf16"):
        model, _ = trained()
        pickle.dumps([list(model.parameters()), torch.zeros(3, 3).bfloat16(), copy.deepcopy(model)])
        assert "the script saves" not in caplog.text
        pickle.dumps([p.data * 1 for p in model.parameters()])
    assert caplog.text.count("the script saves a bf16 tensor of shape (4, 4), as a weight has") == 1


@pytest.mark.parametrize("low", LOWS)
def test_weights_that_are_kept_and_put_back_are_exact_and_train_on(low):
    with under_run("O2", low):
        (model, optimizer), (twin, other) = trained(), trained()
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            kept = [p.data.clone() for p in model.parameters()]
            for p, value in zip(model.parameters(), kept, strict=True):
                p.data.add_(p.grad)
                p.data = value
            assert all(map(torch.equal, values(model), values(twin)))
            optimizer.step()
            fit(twin, other)
            assert all(map(torch.equal, values(model), values(twin)))


def test_a_copy_of_a_weight_has_its_gradient_and_a_forward_reads_what_is_stored():
    with under_run("O2", "bf16"):
        model, optimizer = trained()
        optimizer.zero_grad()
        weight = model[0].weight
        seen = []
        model[0].register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone().dtype))
        (weight.clone().square().sum() + nn.utils.parameters_to_vector(model.parameters()).sum()).backward()
        torch.testing.assert_close(weight.grad.float(), 2 * weight.float() + 1, rtol=0.01, atol=0.01)
        model(X)
        assert seen == [torch.bfloat16]
        before = weight.detach().clone()
        assert torch.equal(weight, before)
        assert torch.allclose(before, weight.data, rtol=0, atol=0)
        optimizer.step()
        assert not torch.equal(weight.detach(), before)


def test_weights_that_did_not_move_equal_their_copies():
    with under_run("O2", "bf16"):
        model, optimizer = trained()
        p, other = model[0].weight, model[3].weight
        kept = p.clone()
        assert (p == kept).all()
        assert (kept == p).all()
        assert not (p != kept).any()
        assert p.equal(kept)
        assert not (p - kept).any()
        assert not kept.sub(p).any()
        assert kept.isclose(p, 0, 0).all()
        assert torch.equal(kept.lerp(p, 0.5), kept)
        assert p.allclose(kept, 0, 0)
        assert torch.equal(p[:1] - other, kept[:1] - other.clone())
        fit(model, optimizer)
        assert (p - kept).abs().max() < 0.011
        assert not torch.equal(p, kept)


def arithmetic(a, b):
    a[:] = torch.cat((a, b))[: len(a)].clone()
    return a.copy_(b).lerp_(b, 0.5).add_(torch.stack([b - a, b.sub(a)]).sum(0)).lerp(b, 0.5) + b * b.isclose(a) * (
        a == b
    )


def close(a, b):
    return bool(torch.allclose(a, b))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_calls_of_tensors_are_patched_only_where_weights_are_low(level):
    before = vars(torch.Tensor).copy()
    with under_run(level, "bf16"):
        assert (dict(vars(torch.Tensor)) == before) == (level == "O1")
    assert dict(vars(torch.Tensor)) == before


@pytest.mark.slow_but("O2")
@pytest.mark.filterwarnings("ignore:`torch.jit.script", "ignore:Sparse")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_patched_calls_are_otherwise_torchs(level):
    with under_run(level, "bf16"):
        model, _ = trained()
        assert torch.equal(input=X, other=X)
        assert torch.allclose(input=X, other=X)
        assert nn.utils.parameters_to_vector(parameters=model.parameters()).dtype is torch.float32
        assert torch.jit.script(close)(X, X)
        assert (model[0].weight.dtype is torch.bfloat16) == (level == "O2")  # a function ends no session
        assert torch.compile(arithmetic, backend="eager", fullgraph=True)(X.clone(), X).equal(2 * X)
        sparse = torch.eye(4).bfloat16().to_sparse()
        assert sparse.clone().to(torch.float32).to_dense().equal(torch.eye(4))
        with forward_ad.dual_level():
            weight = forward_ad.make_dual(model[0].weight.detach(), torch.ones_like(model[0].weight))
            tangent = forward_ad.unpack_dual(weight.float()).tangent
        assert tangent.dtype is torch.float32
        assert tangent.eq(1).all()


class Tied(nn.Module):
    """Has its head in a closure, as x-transformers does, so that a copy of it multiplies by the weight of the first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = lambda x: x @ self.first.weight.t()

    def forward(self, x):
        return self.head(self.first(x))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_copy_multiplies_by_a_weight_of_the_model_in_fp32(low):
    with under_run("O2", low):
        torch.manual_seed(0)
        model = Tied()
        average = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        fit(model, optimizer)
        out, weight = average(X), model.state_dict()["first.weight"]
        assert torch.equal(out, average.first(X) @ weight.t())
        (given,) = torch.autograd.grad((X @ model.first.weight.t()).sum(), model.first.weight)
    assert torch.allclose(given.float(), X.sum(0).expand(4, 4), rtol=0, atol=2**-8)


WAYS_TO_WRITE = {
    "data.copy_": lambda p, s: p.data.copy_(s),  # as of diffusers' EMAModel
    "lerp_": lambda p, s: p.lerp_(s, 0.5),
    "add_": lambda p, s: p.data.add_(s, alpha=0.001),
    "a row": lambda p, s: p.data.__setitem__(0, s[0]),
    "foreach": lambda p, s: torch._foreach_copy_([p.data, p.data[:1]], [s, s[1:2]]),
}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("write", WAYS_TO_WRITE.values(), ids=WAYS_TO_WRITE)
def test_what_a_script_writes_into_weights_is_kept_in_fp32(write, low):
    with under_run("O2", low):
        model, optimizer = trained()
        weight, source = model[0].weight, torch.randn(4, 4)
        plain = weight.detach().clone()
        with torch.no_grad():
            write(plain, source)
            write(weight, source)
        assert weight.dtype is not torch.float32
        assert torch.equal(model.state_dict()["0.weight"], plain)
        fit(model, optimizer)
        assert 0 < (model.state_dict()["0.weight"] - plain).abs().max() < 0.02  # a step of Adam from there


@pytest.mark.parametrize("write", WAYS_TO_WRITE.values(), ids=WAYS_TO_WRITE)
def test_weights_are_written_into_a_low_tensor_of_the_script_as_they_are_stored(write):
    with under_run("O2", "bf16"):
        model, _optimizer = trained()
        weight = model[0].weight
        kept, expected = torch.zeros_like(weight.data), torch.zeros(4, 4, dtype=torch.bfloat16)
        with torch.no_grad():
            write(kept, weight)
            write(expected, weight.data.view(torch.int16).clone().view(torch.bfloat16))
    assert torch.equal(kept, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.")
def test_a_scripted_class_finds_the_names_of_its_file():  # as those of torch.distributed.optim need
    with under_run("O1", "bf16"):

        @torch.jit.script
        class Comparing:
            def __init__(self, x: torch.Tensor):
                self.x = x

            def holds(self) -> bool:
                return close(self.x, self.x)

    assert Comparing(X).holds()


EXPORTS = {
    "jit.trace": lambda model: torch.jit.trace(model, X),
    "jit.script": lambda model: torch.jit.script(nn.Sequential(*model)),
    "export": lambda model: torch.export.export(nn.Sequential(*model), (X,)).module(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", EXPORTS)
def test_an_exported_program_is_that_of_plain_python_and_training_goes_on(how, training):
    with under_run("O2", "bf16") as run:
        model, optimizer = trained()
        program = EXPORTS[how](model.eval())
        with torch.no_grad():
            model.train()(X)  # an evaluation leaves the weights that both share in fp32
        assert torch.equal(program(X), model.eval()(X))
        assert torch.equal(program(X), nn.Sequential(*copy.deepcopy(model))(X))
        model.train(training)
        fit(model, optimizer)
        model(X)
        assert model[0].weight.dtype is torch.bfloat16
    assert run.trained.steps == 1 + training  # in eval mode the first pass is what tells training


@pytest.mark.filterwarnings("ignore:`torch.jit.")
def test_a_traced_model_that_is_trained_trains_as_written():
    with under_run("O2", "bf16") as run:
        program = torch.jit.trace(nn.Linear(4, 1), X)
        fit(program, torch.optim.SGD(program.parameters(), lr=0.1))
    assert run.trained is None
    assert not program.weight.grad.eq(0).all()
