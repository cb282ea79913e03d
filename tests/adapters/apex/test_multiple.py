"""In the shape of apex's L0 tests: several models, optimizers and losses, added parameter groups, checkpointing."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.adapters.apex.cases import LEVELS, loss_of, same, sgd, small, step, values, vectors


def two(amp, level, num_losses, optimizers):
    """Two models with one optimizer for both or one for each."""
    models = [small(0), small(1)]
    made = [sgd(*models)] if optimizers == 1 else [sgd(model) for model in models]
    return amp.initialize(models, made, opt_level=level, num_losses=num_losses, loss_scale="dynamic", verbosity=0)


@pytest.mark.parametrize(("num_losses", "optimizers"), list(itertools.product((1, 3), (1, 2))))
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("overflow", [None, 0, 1, 2])
def test_losses_scale_apart_and_a_step_is_skipped_where_its_gradients_overflow(
    amp, level, num_losses, optimizers, overflow
):
    """Loss 0 is of the first model, loss 1 of the second, loss 2 of both, as in apex's test of three losses."""
    models, steppers = two(amp, level, num_losses, optimizers)
    before = [values(model) for model in models]
    for optimizer in steppers:
        optimizer.zero_grad()
    for loss_id in range(3):
        parts = [model for i, model in enumerate(models) if loss_id in (i, 2)]
        loss = sum(loss_of(model, vectors(loss_id)) for model in parts)
        loss = loss * (float("inf") if loss_id == overflow else 1.0)
        of = steppers if optimizers == 1 or loss_id == 2 else steppers[loss_id]
        with amp.scale_loss(loss, of, loss_id=loss_id if num_losses == 3 else 0) as scaled:
            scaled.backward()
    for optimizer in steppers:
        optimizer.step()
    moved = [not same(values(model), old) for model, old in zip(models, before, strict=True)]
    hit = [overflow == 2 or overflow == i or (overflow is not None and optimizers == 1) for i in range(2)]
    assert moved == [not each for each in hit]
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    if num_losses == 3:
        assert scales == [2.0**15 if i == overflow else 2.0**16 for i in range(3)]
    else:
        assert scales[0] < 2.0**16 if overflow is not None else scales == [2.0**16]


@pytest.mark.parametrize("level", LEVELS)
def test_several_losses_train_as_their_sum(amp, low, level):
    """Per-loss scales are powers of two, so that the sum of true gradients does not depend on them."""
    results = []
    for scales in ((2.0**10, 2.0**10), (2.0**10, 2.0**4)):
        models, (optimizer,) = two(amp, level, 2, 1)
        for scaler, scale in zip(amp._amp_state.loss_scalers, scales, strict=True):
            scaler._loss_scale = scale
        for _ in range(3):
            optimizer.zero_grad()
            for loss_id, model in enumerate(models):
                with amp.scale_loss(loss_of(model, vectors()), optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            optimizer.step()
        results.append([values(model) for model in models])
    for first, second in zip(*results, strict=True):
        assert all(torch.allclose(first[name], second[name], rtol=1e-4, atol=1e-6) for name in first)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_another_optimizer_are_true_ones_too(amp, level):
    """As of a judge through which a maker's loss goes; apex left them scaled."""
    models, steppers = two(amp, level, 1, 2)
    found = []
    for optimizers in (steppers[0], steppers):
        for optimizer in steppers:
            optimizer.zero_grad()
        with amp.scale_loss(sum(loss_of(model, vectors()) for model in models), optimizers) as scaled:
            scaled.backward()
        found.append([p.grad.clone() for model in models for p in model.parameters()])
    assert all(torch.equal(a, b) and a.abs().max() < 10 for a, b in zip(*found, strict=True))


class Grown(nn.Module):
    """A model whose second half joins the training late."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x))


def grown(amp, level, when):
    torch.manual_seed(0)
    model = Grown()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
    late = {"params": model.second.parameters(), "lr": 0.01}
    if when == "before":
        optimizer.add_param_group(late)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after":
        optimizer.add_param_group(late)
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
def test_a_group_added_after_initialize_trains_as_one_added_before(amp, level):
    results = []
    for when in ("before", "after"):
        model, optimizer = grown(amp, level, when)
        for seed in range(3):
            step(amp, model, optimizer, vectors(seed))
        assert optimizer.param_groups[1]["lr"] == 0.01
        results.append(values(model))
    assert same(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_a_group_added_in_the_middle_starts_to_train_there(amp, level):
    model, optimizer = grown(amp, level, "never")
    frozen = values(model.second)
    step(amp, model, optimizer, vectors())
    assert same(values(model.second), frozen)
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.1})
    step(amp, model, optimizer, vectors())
    assert not same(values(model.second), frozen)
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": set(nn.Linear(2, 2).parameters())})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_give_the_same_gradients(amp, level, reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            hidden = checkpoint(super().forward, x.requires_grad_(), use_reentrant=reentrant)
            return hidden * 1

    gradients = []
    for kind in (nn.Sequential, Checkpointed):
        model = kind(*small())
        model, optimizer = amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
        with amp.scale_loss(loss_of(model, vectors()), optimizer) as scaled:
            scaled.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
