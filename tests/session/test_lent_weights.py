"""Weights that user code or an optimizer (schedulefree's `train()` and `eval()`) replaces for a while and puts back."""

import copy

import pytest
import torch
from torch import nn

import halfstep


class ScheduleFree(torch.optim.Optimizer):
    """Steps a sequence z and trains at y, between z and its average x; `eval` puts x into the weights, `train` y."""

    def __init__(self, params, lr=0.1, beta=0.75):
        super().__init__(params, {"lr": lr})
        self.beta, self.count, self.training = beta, 0, True

    @torch.no_grad()
    def move(self, training, weight):
        if training is not self.training:
            for p in self.param_groups[0]["params"]:
                if p in self.state:
                    p.lerp_(self.state[p]["z"], weight)  # refuses tensors of two formats
            self.training = training

    def train(self):
        self.move(True, 1 - self.beta)

    def eval(self):
        self.move(False, 1 - 1 / self.beta)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, 1 / self.count).sub_(p.grad, alpha=0.1 * (1 - 1 / self.count))
            z.sub_(p.grad, alpha=0.1)


def trained(session_of, model, optimizer):
    session = session_of(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        optimizer.train()
        optimizer.zero_grad()
        out = model(torch.randn(4, 4, generator=generator))
        session.backward(out.square().mean())
        session.step()
        optimizer.eval()
    return session


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_train_and_eval_of_an_optimizer_move_the_masters_as_fp32_weights(level, low):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = ScheduleFree(model.parameters())
    session = trained(lambda m, o: halfstep.initialize(m, o, level, low=low), model, optimizer)
    x = {name: value.clone() for name, value in model.state_dict().items()}
    z = [optimizer.state[p]["z"] for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    optimizer.train()
    for (name, value), average, other in zip(model.state_dict().items(), x.values(), z, strict=True):
        assert value.dtype is torch.float32
        assert torch.equal(value, average.lerp(other, 0.25)), name
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    session.close()
    assert not {"train", "eval"} & vars(optimizer).keys()


def test_a_forward_after_eval_reads_the_average():
    model = nn.Linear(2, 1, bias=False)
    optimizer = ScheduleFree(model.parameters())
    with halfstep.initialize(model, optimizer, "O2", low="bf16") as session, session.autocast():
        for training in (False, True, False):
            before = copy.deepcopy(model.weight)
            optimizer.training = not training
            optimizer.state[model.weight]["z"] = torch.full((1, 2), 8.0)
            (optimizer.train if training else optimizer.eval)()
            assert not torch.equal(model.weight, before)
            assert torch.equal(model(torch.ones(1, 2)).sum(), model.weight.bfloat16().sum().float())


def disturbed(level, low, *, averaged, optimizer=torch.optim.SGD):
    """Trains at a small rate; if `averaged`, other weights are in place for a while after every second step."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    target = model.weight.detach() + 0.02
    made = optimizer(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    with halfstep.initialize(model, made, level, low=low) as session:
        for step in range(10):
            x = torch.randn(8, 16, generator=generator)
            made.zero_grad()
            session.backward((model(x) - x @ target.T).square().mean())
            session.step()
            if averaged and step % 2:
                kept = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.copy_(p.data + 0.01)
                stored = model.state_dict()["weight"].to(model.weight.dtype)
                assert torch.equal(stored, model.weight) or low == "bf16"  # which keeps its remainders
                with torch.no_grad():
                    model(x)
                for p, value in zip(model.parameters(), kept, strict=True):
                    averaged(p, value)
    return model.weight.detach()


def through_data(p, value):
    p.data.copy_(value)


@torch.no_grad()
def in_place(p, value):
    p.copy_(value)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad], ids=["own update", "its own step"])
@pytest.mark.parametrize("put_back", [through_data, in_place])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_weights_that_are_put_back_bit_for_bit_keep_their_masters(low, put_back, optimizer):
    undisturbed = disturbed("O2", low, averaged=None, optimizer=optimizer)
    assert torch.equal(disturbed("O2", low, averaged=put_back, optimizer=optimizer), undisturbed)
