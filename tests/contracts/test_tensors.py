"""Tensors whose numbers do not lie in memory as they are: refused by name before a kernel reads at no address."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import halfstep
from halfstep import SessionError, SetupError


@pytest.fixture
def mesh(process_group):
    return init_device_mesh("cpu", (1,))


def test_a_gradient_that_does_not_lie_in_its_memory_is_named(mesh):
    model = nn.Linear(4, 2)
    session = halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O1", low="bf16")
    session.backward(model(torch.ones(1, 4)).sum())
    model.weight.grad = distribute_tensor(model.weight.grad, mesh, [Shard(0)])
    with pytest.raises(SessionError, match="'weight' is of type DTensor"):
        session.step()
    model.zero_grad()


def test_a_gradient_of_a_class_of_its_own_is_read_like_others():
    class Marked(torch.Tensor):
        pass

    model = nn.Linear(4, 2)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O1", low="bf16")
    before = model.bias.detach().clone()
    for _ in range(2):
        model.zero_grad()
        session.backward(model(torch.ones(1, 4)).sum())
        model.bias.grad = model.bias.grad.as_subclass(Marked)
        assert session.step().grad_norm.item() == pytest.approx(10**0.5)
    assert torch.equal(model.bias, before - 2)


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_parameters_made_under_inference_mode_are_named(name):
    with torch.inference_mode():
        model = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    opt = torch.optim.AdamW(model.parameters())
    with pytest.raises(SetupError, match=r"made under torch.inference_mode\(\): 1.weight, 1.bias"):
        halfstep.initialize(model, opt, name, low="bf16")
