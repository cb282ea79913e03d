"""A skipped step leaves weights, optimizer state, buffers and counters bit-identical to before."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.cases import differing, mixed_plans, snapshot, start, train

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "RMSprop": torch.optim.RMSprop,
}


@mixed_plans
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2], ids=["first step", "later step"])
def test_skip_changes_nothing(name, low, optimizer, before):
    model, opt, session = start(name, low, OPTIMIZERS[optimizer])
    train(session, model, opt, range(before))
    was = snapshot(model, opt)
    (record,) = train(session, model, opt, [before], poison=[before])
    assert bool(record.skipped)
    now = snapshot(model, opt)
    created = {key for key in now if key not in was and key.startswith("optimizer.")}  # zero state of a first step
    assert [key for key in differing(was, now) if key not in created] == []
    session.close()


@mixed_plans
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_after_a_skip_is_as_if_the_batch_had_not_come(name, low, optimizer):
    """Holds bit for bit with a static scale: a dynamic one rightly differs after the overflow."""
    results = []
    for poison in ([], [0, 3]):
        model, opt, session = start(name, low, OPTIMIZERS[optimizer], loss_scale=128.0)
        steps = [s for s in range(6) if poison or s not in (0, 3)]
        train(session, model, opt, steps, poison=poison)
        results.append(snapshot(model, opt))
        session.close()
    assert differing(*results) == []


@mixed_plans
def test_a_good_step_is_not_skipped_and_changes_the_weights(name, low):
    model, opt, session = start(name, low, loss_scale=128.0)
    was = snapshot(model, opt)
    (record,) = train(session, model, opt, [0])
    assert not bool(record.skipped)
    assert "model.first.weight" in differing(was, snapshot(model, opt))
    assert "model.frozen.weight" not in differing(was, snapshot(model, opt))
    session.close()


@mixed_plans
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_non_finite_loss_is_a_skipped_step(name, low, value):
    """Its gradient may be finite: d(loss + inf) = d(loss)."""
    model, opt, session = start(name, low, loss_scale=1.0)
    was = snapshot(model, opt)
    session.backward(model(torch.randn(16, 8)).square().mean() + value)
    assert bool(session.step().skipped)
    now = snapshot(model, opt)
    assert [key for key in differing(was, now) if not key.startswith("optimizer.")] == []
    assert session.status().skipped == 1
    session.close()


def test_a_skip_does_not_undo_a_checkpoint_loaded_before_it():
    model, opt, session = start("O1", "bf16")
    train(session, model, opt, range(2))
    state = {k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    train(session, model, opt, [2], poison=[2])
    assert torch.equal(model.norm.running_mean, state["norm.running_mean"])
    session.close()
