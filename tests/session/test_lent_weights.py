"""Optimizers that write weights in `train()` and `eval()`, as schedulefree's do: these get the weights in fp32."""

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
