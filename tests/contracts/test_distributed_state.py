"""`torch.distributed.checkpoint.state_dict` on optimizers in a session; it makes a fresh one's state by a step."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, RMSprop, lr_scheduler

import halfstep
from tests.contracts.cases import backward_and_step, bits, differing, overflowing, snapshot

OPTIMIZERS = {
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "Adam, amsgrad and a rate as a tensor": lambda ps: Adam(ps, lr=torch.tensor(0.1), amsgrad=True),
    "SGD": lambda ps: SGD(ps, lr=0.1),
    "SGD, momentum": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "RMSprop": lambda ps: RMSprop(ps, lr=0.1, momentum=0.9),
}


def start(name, optimizer, seed=0, low="bf16"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    opt = OPTIMIZERS[optimizer](model.parameters())
    return model, opt, halfstep.initialize(model, opt, name, low=low)


def train(model, optimizer, session, steps):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        backward_and_step(session, model(x).square().mean())


def tensors(state):
    return {f"{name}.{key}": value for name, entry in state["state"].items() for key, value in entry.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_a_fresh_optimizer_shows_its_state_to_load_into_and_goes_on_from_it(name, optimizer):
    whole, fresh = start(name, optimizer), start(name, optimizer)
    train(*whole, range(3))
    saved = get_optimizer_state_dict(whole[0], whole[1])
    wanted = get_optimizer_state_dict(fresh[0], fresh[1])  # what a distributed checkpoint is loaded into
    assert {k: v.shape for k, v in tensors(wanted).items()} == {k: v.shape for k, v in tensors(saved).items()}
    for key, value in tensors(wanted).items():
        value.copy_(tensors(saved)[key])
    fresh[0].load_state_dict(whole[0].state_dict())
    fresh[2].load_state_dict(whole[2].state_dict())
    set_optimizer_state_dict(fresh[0], fresh[1], wanted)
    train(*whole, range(3, 6))
    train(*fresh, range(3, 6))
    assert differing(snapshot(*whole), snapshot(*fresh)) == []
    for _, _, session in (whole, fresh):
        session.close()


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD, momentum"])
@pytest.mark.parametrize("name", ["O1", "O2"])
def test_reading_a_fresh_state_changes_nothing(name, optimizer):
    plain, read = start(name, optimizer), start(name, optimizer)
    before = {k: v.clone() for k, v in read[0].state_dict().items()}
    scheduler = lr_scheduler.ConstantLR(read[1], factor=1.0)
    get_optimizer_state_dict(read[0], read[1])
    assert all(torch.equal(bits(v), bits(before[k])) for k, v in read[0].state_dict().items())
    assert all(p.grad is None for p in read[0].parameters())
    assert read[2].state_dict()["steps"] == 0
    for model, optimizer, session in (plain, read):
        train(model, optimizer, session, range(3))
    assert scheduler.get_last_lr() == [0.1]
    assert differing(snapshot(*plain), snapshot(*read)) == []
    assert plain[1].state_dict()["state"].keys() == read[1].state_dict()["state"].keys()
    plain[2].close()
    read[2].close()


@pytest.mark.parametrize("spoil", ["gradient", "rate", "state", "no closure", "a closure"])
def test_any_other_step_still_raises(spoil):
    model, optimizer, session = start("O2", "AdamW")
    if spoil == "state":
        train(model, optimizer, session, range(1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.1 if spoil == "rate" else 0.0
    if spoil == "gradient":
        model[2].bias.grad.fill_(1e-30)
    before = copy.deepcopy(model.state_dict())
    given = {"no closure": {}, "a closure": {"closure": lambda: 0.0}}.get(spoil, {"closure": None})
    with pytest.raises(halfstep.SessionError, match=r"session\.step\(\)"):
        optimizer.step(**given)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def through_dcp(state, other, folder):
    """Returns a state as `dcp.load` brings it into another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        dcp.save({"session": state}, checkpoint_id=folder, no_dist=True)
        loaded = {"session": other}
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded["session"]


@pytest.mark.parametrize("loss_ids", [[0], [1], [0, 1]])
def test_the_state_of_a_session_comes_through_a_distributed_checkpoint_or_is_refused(loss_ids, tmp_path):
    model, _, session = start("O1", "SGD", low="fp16")
    for loss_id in loss_ids:
        session.backward(overflowing(model(torch.ones(2, 4)).sum()), loss_id=loss_id)
    session.step()
    saved = session.state_dict()
    session.close()
    _, _, fresh = start("O1", "SGD", low="fp16")
    came = through_dcp(saved, fresh.state_dict(), tmp_path)
    if loss_ids == [0]:
        assert came == saved
        fresh.load_state_dict(came)
        assert fresh.status().scales == {0: 2.0**15}
    else:
        with pytest.raises(halfstep.StateError, match=r"loss scales of only 1 of 2 losses: .*json\.dumps"):
            fresh.load_state_dict(came)
