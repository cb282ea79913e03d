"""Gradients per sample, as Opacus and torch's own functions take them from a model in a session."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import halfstep
from halfstep import SessionError

X = torch.linspace(-1, 1, 32).reshape(8, 4)


def opened(level="O2", low="bf16", layer=None):
    torch.manual_seed(0)
    model = nn.Sequential(layer or nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, halfstep.initialize(model, optimizer, level, low=low, stepping="optimizer")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_class_of_a_layer_is_found_in_tables_by_the_users_class(level):
    model, _, session = opened(level)
    kind = type(model[0])
    assert kind is not nn.Linear
    assert kind == nn.Linear
    assert nn.Linear == kind
    assert kind != nn.Conv2d
    assert kind in (nn.Conv2d, nn.Linear)
    assert {nn.Linear: 1}[kind] == 1
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear}
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert type(model[0]) not in (nn.Linear,)
    session.close()


class Counted(type):
    """A metaclass whose classes are equal by a number of their own."""

    def __eq__(cls, other):
        return isinstance(other, Counted) and cls.number == other.number

    def __hash__(cls):
        return cls.number


class Numbered(nn.Linear, metaclass=Counted):
    number = 7


def test_a_metaclass_that_compares_classes_its_own_way_still_does():
    model, _, session = opened(layer=Numbered(4, 4))
    assert type(model[0]) in (Numbered,)
    assert hash(type(model[0])) == 7
    session.close()


def test_code_that_compares_classes_compiles():
    class ByType(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            for layer in (self.first, self.last):
                if type(layer) == nn.Linear:  # noqa: E721
                    x = layer(x)
            return x

    class Over(ByType):
        def forward(self, x):
            return super().forward(x)

    model = Over()
    with halfstep.initialize(model, torch.optim.SGD(model.parameters()), "O1", low="bf16"):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), model(X))
        assert compiled(X).shape == (8, 1)


def test_a_gradient_that_code_makes_in_the_format_of_the_weight_is_stepped():
    model, optimizer, session = opened()
    session.backward(model(X).square().mean())
    before = model.state_dict()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name] - 0.1, rtol=0, atol=1e-7)
    for _ in range(2):
        session.backward(model(X).square().mean())
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    session.close()


class Sampling:
    """Leaves on a model what Opacus's hooks leave there."""

    def __init__(self, model):
        model.autograd_grad_sample_hooks = [m.register_forward_hook(lambda *_: None) for m in model.children()]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_hooks_per_sample_are_refused_under_a_loss_scale_and_on_convolutions(level):
    model, _, session = opened(level, "fp16")
    Sampling(model)
    with session, pytest.raises(SessionError, match="would carry fp16's loss scale; use bf16"):
        model(X)
    model, _, session = opened(level, layer=nn.Conv1d(1, 1, 1))
    Sampling(model)
    with session:
        with pytest.raises(SessionError, match=r"the Conv1d of a session .* pass grad_sample_mode='functorch'"):
            model(X[:, None])
        model[0].ft_compute_sample_grad = None  # functorch takes its gradients
        model(X[:, None])
    model, _, session = opened(level)
    Sampling(model)
    with session:
        model(X)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_expanded_weights_are_refused(level):
    model, _, session = opened(level)
    with session, pytest.raises(SessionError, match=r"expanded weights .* take one format only"):
        call_for_per_sample_grads(model)(X)


def test_a_hook_that_writes_a_state_dict_anew_finds_fp32_values():
    layer = nn.Linear(4, 4)
    layer._register_state_dict_hook(lambda module, state, *_: {f"new.{key}": value for key, value in state.items()})
    model, _, session = opened(layer=layer)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert {value.dtype for value in layer.state_dict().values()} == {torch.float32}
    session.close()
