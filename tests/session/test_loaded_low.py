"""Models that were loaded in bf16 or fp16: their weights start fp32 values, which train as those of an fp32 model."""

import copy
import logging

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import SessionError, SetupError

SETTINGS = [(level, low) for level in ("O1", "O2", "O3") for low in ("bf16", "fp16")]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))


def trained(model, level, low, steps=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    with halfstep.initialize(model, optimizer, level, low=low) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            session.backward(model(torch.randn(6, 8, generator=generator)).square().mean())
            session.step()
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) and a[name].dtype is b[name].dtype for name in b)


@pytest.mark.parametrize("came", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_it_trains_bit_for_bit_as_the_fp32_model_with_its_values(level, low, came):
    model = network().to(came)
    widened = copy.deepcopy(model).float()
    assert same(trained(model, level, low), trained(widened, level, low))
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}  # after close too


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_updates_too_small_for_the_format_are_kept(level):
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    with halfstep.initialize(model, optimizer, level, low="bf16") as session:
        for _ in range(8):
            optimizer.zero_grad()
            session.backward(model(torch.ones(1, 4)).sum())
            session.step()
    assert torch.equal(model.weight, torch.full((4, 4), 1 - 2.0**-9))  # in bf16 alone each of the steps rounds to none


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_came_low_and_is_unfrozen_in_the_session_is_not_trained_without_an_fp32_value(level, name):
    model = network().bfloat16()
    model[0].requires_grad_(False)
    optimizer = getattr(torch.optim, name)(model[3].parameters(), lr=0.01)
    with halfstep.initialize(model, optimizer, level, low="bf16") as session:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        before = model[0].weight.detach().clone()
        session.backward(model(torch.ones(6, 8)).square().mean())
        with pytest.raises(
            SessionError,
            match=r"'0\.weight' trains now but has no fp32 value, because it was .*frozen and in torch\.bf.*Unfreeze",
        ):
            session.step()
        assert torch.equal(model[0].weight, before)


def test_what_stays_low_is_what_is_frozen_or_stored_low(caplog):
    model = network().bfloat16()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1:].parameters(), lr=0.1)
    weight = model[3].weight.detach().clone()
    with caplog.at_level(logging.WARNING, "halfstep"):
        session = halfstep.initialize(model, optimizer, "O2", low="bf16")
    assert "4 trainable parameters were loaded in bfloat16: each now has an fp32 master" in caplog.text
    assert model[3].weight.dtype is torch.bfloat16
    assert torch.equal(model[3].weight, weight)
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32  # a norm is kept full
    session.close()
    assert model[0].weight.dtype is torch.bfloat16


def test_o1_says_what_widening_takes(caplog):
    with caplog.at_level(logging.WARNING, "halfstep"):
        halfstep.initialize(nn.Linear(1024, 1024, bias=False).half(), None, "O1", low="bf16")
        halfstep.initialize(nn.Linear(8, 8, bias=False).half(), None, "O1", low="bf16")
    assert "1 trainable parameters were loaded in float16: they are fp32 now, which takes 2.0 MiB more" in caplog.text
    assert "which takes 128 B more" in caplog.text
    assert "for inference only, call model.requires_grad_(False) first" in caplog.text
    model = nn.Linear(8, 8).half().requires_grad_(False)
    with halfstep.initialize(model, None, "O1", low="bf16"):
        assert model.weight.dtype is torch.float16


def test_an_error_leaves_it_as_it_came(monkeypatch):
    model = network().bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fail(*args):
        raise SetupError("too late")

    monkeypatch.setattr(halfstep.Session, "_make_part", fail)
    with pytest.raises(SetupError, match="too late"):
        halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    assert same(model.state_dict(), before)


def test_a_wrapped_one_is_refused_as_its_format_changes(process_group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).bfloat16())
    with pytest.raises(SetupError, match=r"call halfstep\.initialize first, then wrap"):
        halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    assert model.module.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_state_that_was_made_for_low_weights_becomes_fp32(level):
    model = nn.Linear(3, 1, bias=False).bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    assert optimizer.state[model.weight]["sum"].dtype is torch.bfloat16
    with halfstep.initialize(model, optimizer, level, low="bf16") as session:
        session.backward(model(torch.full((1, 3), 2.0**-6)).sum())
        session.step()
        assert optimizer.state[model.weight]["sum"].dtype is torch.float32
        assert optimizer.state[model.weight]["sum"].tolist() == [[2.0**-12] * 3]


def test_state_that_was_made_while_the_session_stores_weights_low_becomes_fp32():
    model = nn.Linear(3, 1, bias=False)
    with halfstep.initialize(model, None, "O2", low="bf16") as session:
        model.requires_grad_()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        session.add_optimizers([optimizer])
        session.backward(model(torch.ones(1, 3)).sum())
        session.step()
        assert optimizer.state[model.weight]["sum"].dtype is torch.float32


def test_an_error_leaves_state_for_low_weights_as_it_was():
    model = nn.Linear(3, 1, bias=False).bfloat16()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with pytest.raises(SetupError):
        halfstep.initialize(model, [optimizer, optimizer], "O2", low="bf16")
    assert optimizer.state[model.weight]["sum"].dtype is torch.bfloat16
