"""Updates are told from the last place of the stored weight, on both sides of a half."""

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import backward_and_step


class Weights(nn.Module):
    """Ones with given gradients."""

    def __init__(self, gradients):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(gradients)))
        self.register_buffer("gradients", torch.tensor(gradients))

    def forward(self):
        return (self.weight.float() * self.gradients).sum()


# The neighbours of 1 in bf16 are 2^-7 above and 2^-8 below: half a unit is 2^-8. One weight has no update.
GRADIENTS = [0.0, 2.0**-20, 2.0**-8 * 0.99, 2.0**-8, -(2.0**-7), 2.0**-3]


def observed(name, lr=1.0, optimizer=torch.optim.SGD, **options):
    model = Weights(GRADIENTS)
    opt = optimizer(model.parameters(), lr=lr)
    session = halfstep.initialize(model, opt, name, low="bf16", **options)
    probe = session.observe(every=1, tensors="update")
    before = model.weight.detach().clone()
    backward_and_step(session, model())
    (observation,) = probe.flush()
    changed = model.weight.detach() != before
    session.close()
    return observation, changed


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Rprop])
def test_the_share_of_lost_updates_by_hand(name, optimizer):
    if optimizer is torch.optim.Rprop:  # moves by lr against the sign: 0, 5 times a third of half a unit
        observation, _ = observed(name, lr=2.0**-8 / 3, optimizer=optimizer)
        assert observation.lost_updates == 1.0
        assert (observation.stats.zeros, observation.stats.nonzero) == (1, 5)
        return
    observation, changed = observed(name)
    assert (observation.kind, observation.module, observation.name, observation.format) == (
        "update",
        "",
        "weight",
        "bf16",
    )
    assert observation.lost_updates == pytest.approx(2 / 5)
    assert observation.stats.zeros == 1
    assert observation.stats.amax == 2.0**-3 / 2.0**-7
    # downwards the next value is half as far as upwards, so an update of 0.99 half units still moves the weight
    assert changed.tolist() == [False, False, True, True, True, True]


def test_fp32_weights_lose_what_is_below_their_own_last_place():
    observation, changed = observed("O1", lr=2.0**-17)
    assert observation.format == "fp32"
    assert observation.lost_updates == pytest.approx(3 / 5)  # below 2^-24: gradients below 2^-7
    assert not changed[1]


def test_a_skipped_step_has_no_update():
    model = Weights(GRADIENTS)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O3", low="bf16")
    probe = session.observe(every=1, tensors="update")
    assert bool(backward_and_step(session, model() * torch.inf).skipped)
    (observation,) = probe.flush()
    assert (observation.stats.zeros, observation.lost_updates) == (len(GRADIENTS), 0.0)


def test_other_kinds_know_no_lost_updates():
    model = Weights(GRADIENTS)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O3", low="bf16")
    probe = session.observe(every=1, tensors="weight")
    backward_and_step(session, model())
    (observation,) = probe.flush()
    assert observation.lost_updates is None


def test_a_sampled_update_is_named_so():
    model = nn.Linear(100, 100, bias=False)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O2", low="bf16")
    probe = session.observe(every=1, tensors="update", sample=128)
    backward_and_step(session, model(torch.ones(1, 100)).sum())
    (observation,) = probe.flush()
    assert (observation.sampled, observation.stats.count) == (True, 128)
    session.close()
