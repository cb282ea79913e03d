"""A skipped step leaves weights, optimizer state, buffers and counters bit-identical to before."""

import pytest
import torch

import halfstep
from halfstep.train.scale.buffers import BufferGuard
from tests.contracts.cases import backward_and_step, differing, mixed_plans, snapshot, start, train

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


@mixed_plans
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow_but("AdamW-O1-fp16", "SGD-O2-bf16")
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


@mixed_plans
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_non_finite_loss_is_a_skipped_step(name, low, value):
    """Its gradient may be finite: d(loss + inf) = d(loss)."""
    model, opt, session = start(name, low, loss_scale=1.0)
    was = snapshot(model, opt)
    assert bool(backward_and_step(session, model(torch.randn(16, 8)).square().mean() + value).skipped)
    now = snapshot(model, opt)
    assert [key for key in differing(was, now) if not key.startswith("optimizer.")] == []
    assert session.status().skipped == 1


def test_a_skip_does_not_undo_a_checkpoint_loaded_before_it():
    model, opt, session = start("O1", "bf16")
    train(session, model, opt, range(2))
    state = {k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    train(session, model, opt, [2], poison=[2])
    assert torch.equal(model.norm.running_mean, state["norm.running_mean"])


def test_a_compiled_model_is_guarded_too():
    """Its forward cannot take the snapshot, so the step before, or the load before, has taken it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, "O1", low="bf16")
    compiled = torch.compile(model, backend="aot_eager")

    def step(inputs):
        opt.zero_grad()
        session.backward(compiled(inputs).square().mean())
        return bool(session.step().skipped)

    bad = torch.full((16, 8), torch.inf)
    assert step(bad)
    assert torch.equal(model[1].running_mean, torch.zeros(4)), "also in the very first step"
    assert not step(torch.randn(16, 8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert before["1.running_mean"].any()
    assert step(bad)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.load_state_dict({k: v + 1 for k, v in before.items()})
    assert step(bad)
    assert torch.equal(model[1].running_mean, before["1.running_mean"] + 1)


def test_large_buffers_that_training_never_changes_are_copied_once_only():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2**17))
    model.register_buffer("counts", torch.zeros(2**17))
    guard = BufferGuard([model])

    def copied():
        return sum(group.snapshot.numel() for group in guard._groups)

    assert copied() == 2**18
    guard.refresh()
    assert copied() == 0
    model.counts += 1  # from its next step on it is guarded
    guard.restore(torch.tensor(False))
    guard.refresh()
    assert copied() == 2**17
    model.counts += 1
    guard.restore(torch.tensor(True))
    assert torch.equal(model.counts, torch.ones(2**17))


def test_a_skip_takes_back_its_own_forward_only_wherever_that_was_entered():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, "O1", low="bf16")
    for _ in range(3):
        backward_and_step(session, model(torch.randn(16, 8)).square().mean())
    bad = torch.full((16, 8), torch.inf)
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def skip(forward):
        assert bool(backward_and_step(session, forward(bad).square().mean()).skipped)
        assert [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])] == []

    with session.autocast():
        skip(lambda x: model[1](model[0](x)))
    skip(lambda x: model[1](model[0](x)))
    torch._dynamo.reset()
    skip(torch.compile(model, backend="eager"))
    skip(model)
