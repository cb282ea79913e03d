"""LoRA adapters of PEFT on a frozen low base: the base stays as it is, and the adapters train as under torch.amp."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft", reason="PEFT is not installed; run ./dev adapters")

import halfstep  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, inputs):
        return self.last(nn.functional.gelu(self.first(inputs)))


def adapted():
    torch.manual_seed(0)
    base = Network().bfloat16()
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["first", "last"]))


def batches(count=30):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def by_torch_amp():
    model = adapted()
    optimizer = optimizer_of(model)
    losses = []
    for inputs, targets in batches():
        with torch.autocast("cpu", torch.bfloat16):
            out = model(inputs)
        loss = nn.functional.mse_loss(out.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_adapters_train_as_under_torch_amp_and_the_frozen_base_keeps_its_bits(level):
    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = optimizer_of(model)
    losses = []
    with halfstep.initialize(model, optimizer, level, low="bf16") as session:
        for inputs, targets in batches():
            loss = nn.functional.mse_loss(model(inputs), targets)
            session.backward(loss)
            session.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        saved = peft.get_peft_model_state_dict(model)
        memory = sum(session.status().memory.values())
        fp32 = sum(4 * p.numel() for p in frozen.values())
    assert losses == pytest.approx(by_torch_amp(), rel=0.02)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], value) and own[name].dtype is torch.bfloat16 for name, value in frozen.items())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory <= fp32 // 2 + 16 * trained + 64  # torch.amp: the same base, and 16 bytes per trained parameter
