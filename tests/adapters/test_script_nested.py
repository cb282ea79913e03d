"""`halfstep run` where a script's code runs inside torch's: transforms of torch.func, and functions of its own."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import halfstep
from halfstep.adapters.script.run import run as run_script
from tests.adapters.scripts_in_process import writes
from tests.adapters.under_run import under_run

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def per_sample(model):
    def loss(parameters, x):
        return functional_call(model, parameters, (x[None],)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))({name: p.detach() for name, p in model.named_parameters()}, X)


@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
def test_transforms_of_a_model_compute_as_in_a_session_opened_by_hand(level, low):
    model, optimizer = trained()
    with halfstep.initialize(model, optimizer, level, low=low, stepping="optimizer"):
        expected = per_sample(model)
    with under_run(level, low) as run:
        model, optimizer = trained()
        model(X)
        found = per_sample(model)
        model(X).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert run.trained.steps == 1


class Adjoint(torch.autograd.Function):
    """Calls a model again in its backward pass, as adjoint methods of differential equations do."""

    @staticmethod
    def forward(ctx, model, x, *parameters):
        ctx.model, ctx.parameters = model, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.model(x.detach().clone().requires_grad_())
        return None, None, *torch.autograd.grad(out, ctx.parameters, gradient)


@pytest.mark.parametrize("body", [lambda model, whole: model, lambda model, whole: whole], ids=["part", "whole"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_called_in_the_backward_pass_of_a_function_runs_under_the_plan(level, body):
    with under_run(level, "bf16") as run:
        model, optimizer = trained()
        whole = nn.Sequential(model, nn.Flatten())
        whole(X)  # so that the model is a part of what is in the session
        gradients = []
        for adjoint in (False, True):
            optimizer.zero_grad()
            out = Adjoint.apply(body(model, whole), X, *model.parameters()) if adjoint else model(X)
            out.square().mean().backward()
            gradients.append([p.grad.clone().float() for p in model.parameters()])
        optimizer.step()
        for direct, called in zip(*gradients, strict=True):
            torch.testing.assert_close(called, direct, rtol=0.02, atol=0.02)
    assert run.trained.steps == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_autocast_inside_a_transform_ends_the_session_after_its_pass(level):
    with under_run(level, "bf16") as run:
        model, optimizer = trained()

        def loss(weight, x, gradient):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (nn.functional.linear(x, weight) * gradient).sum().float()

        def hook(module, _, gradients):
            weight = module.weight.detach().float()
            module.sample = vmap(grad(loss), in_dims=(None, 0, 0))(weight, X, gradients[0].float())

        model[0].register_full_backward_hook(hook)
        for _ in range(2):
            optimizer.zero_grad()
            model(X.clone().requires_grad_()).square().mean().backward()
            optimizer.step()
        assert type(model) is nn.Sequential
        assert model[0].sample.shape == (8, 4, 4)
    assert run.brings == "torch.amp's autocast"


class Own:
    """Updates weights as torch's optimizers do, but is none of them, as fastai's."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self):
        for p in self.parameters:
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None


class Stranger(nn.Linear):
    pass


def test_what_is_trained_outside_of_the_session_is_named():
    with under_run("O1", "bf16") as run:
        model, optimizer = trained()
        stranger, frozen = Stranger(1, 1), nn.Bilinear(1, 1, 1)
        own = Own(stranger.parameters())
        for _ in range(2):
            y = stranger(model(X))
            frozen(y, y).mean().backward()
            optimizer.step()
            own.step()
    assert list(run.outsiders.names) == ["Stranger"]


def test_what_is_trained_where_no_session_opened_is_named():
    unused = nn.Parameter(torch.zeros(1))
    with under_run("O1", "bf16") as run:
        optimizer = torch.optim.SGD([unused], lr=0.1)
        stranger = Stranger(1, 1)
        own = Own(stranger.parameters())
        for _ in range(2):
            stranger(torch.ones(1, 1)).mean().backward()
            own.step()
    assert list(run.outsiders.names) == ["Stranger"]
    del optimizer


def test_a_refusal_says_what_helps_who_runs_a_script(tmp_path):
    text = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.param_groups[0]["params"][0].data = torch.ones(1, 4, dtype=torch.float64)
optimizer.step()
"""
    with pytest.raises(halfstep.HalfstepError, match="--level O1 --low bf16"):
        run_script(str(writes(tmp_path, text)), plan="O2", low="bf16")
