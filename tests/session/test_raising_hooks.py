"""A step in which a hook, a sink or a log raises: what was applied is counted, and no gradient is applied twice."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import halfstep
from halfstep import SessionError
from tests.contracts.cases import differing, snapshot

LEVELS = [("O0", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]
EACH_LEVEL = pytest.mark.parametrize(("name", "low"), LEVELS)
EACH_OPTIMIZER = pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


def start(name, low, build, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = build(model.parameters(), lr=0.01)
    if low == "fp16":
        options["loss_scale"] = 128.0  # no step overflows: a skipped one calls no hook of Adagrad
    return model, optimizer, halfstep.initialize(model, optimizer, name, low=low, **options)


def backward(model, session, seed):
    model.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    session.backward(model(x).square().mean())


def assert_goes_on_as(run, undisturbed):
    """After two more steps of both."""
    for model, _, session in (run, undisturbed):
        for seed in (1, 2):
            backward(model, session, seed)
            session.step()
    assert differing(snapshot(*run), snapshot(*undisturbed)) == []
    for _, _, session in (run, undisturbed):
        session.close()


@EACH_LEVEL
@EACH_OPTIMIZER
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_raises_leaves_all_for_the_next_step_or_one_that_is_made_once(name, low, build, everywhere, when):
    run, undisturbed = start(name, low, build), start(name, low, build)
    for model, _, session in (run, undisturbed):
        backward(model, session, 0)
    if when == "pre":
        before, register = snapshot(*run), register_optimizer_step_pre_hook
    else:
        undisturbed[2].step()
        before, register = snapshot(*undisturbed), register_optimizer_step_post_hook
    handle = register(boom) if everywhere else getattr(run[1], f"register_step_{when}_hook")(boom)
    with pytest.raises(Boom):
        run[2].step()
    handle.remove()
    assert differing(snapshot(*run), before) == []
    if when == "pre":
        run[2].step()
        undisturbed[2].step()
    else:
        with pytest.raises(SessionError, match="without gradients"):
            run[2].step()
    assert differing(snapshot(*run), snapshot(*undisturbed)) == []
    assert_goes_on_as(run, undisturbed)


@EACH_LEVEL
@pytest.mark.parametrize("of", ["sink", "probe"])
def test_a_sink_or_log_that_raises_comes_after_the_step_and_silences_no_other(name, low, of):
    raising, seen = [True], []

    def told(record):
        if of == "probe":
            seen.append(record.step)
        if raising[0]:
            boom()

    sinks = [told, lambda record: seen.append(record.step)] if of == "sink" else []
    run, undisturbed = start(name, low, torch.optim.AdamW, sinks=sinks), start(name, low, torch.optim.AdamW)
    if of == "probe":
        run[2].observe(every=1, modules="0", tensors="weight", log=told)
    for model, _, session in (run, undisturbed):
        backward(model, session, 0)
    with pytest.raises(Boom):
        run[2].step()
    undisturbed[2].step()
    raising[0] = False
    with pytest.raises(SessionError, match="without gradients"):
        run[2].step()
    assert_goes_on_as(run, undisturbed)
    assert sorted(set(seen)) == [1, 2, 3]


def two(name):
    torch.manual_seed(0)
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    session = halfstep.initialize(models, optimizers, name, low="bf16")
    session.backward(models[1](models[0](torch.ones(2, 3))).square().mean())
    return models, optimizers, session


def weights(models):
    return [p.clone() for m in models for p in m.state_dict().values()]


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_post_hook_of_one_of_two_optimizers_ends_the_step_there(name, which):
    models, optimizers, session = two(name)
    plain_models, _, plain = two(name)
    plain.step()
    optimizers[which].register_step_post_hook(boom)
    with pytest.raises(Boom):
        session.step()
    assert session.state_dict()["steps"] == 1
    if which == 0:
        session.step()  # of the second
    assert all(torch.equal(p, q) for p, q in zip(weights(models), weights(plain_models), strict=True))
    with pytest.raises(SessionError, match="without gradients"):
        session.step()
    session.close()
    plain.close()


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_a_pre_hook_of_the_second_optimizer_leaves_that_one_for_the_next_step(name):
    models, optimizers, session = two(name)
    plain_models, _, plain = two(name)
    plain.step()
    handle = optimizers[1].register_step_pre_hook(boom)
    before = weights(models)
    with pytest.raises(Boom):
        session.step()
    after = weights(models)
    assert [torch.equal(p, q) for p, q in zip(before, after, strict=True)] == [False, False, True, True]
    handle.remove()
    session.step()
    assert all(torch.equal(p, q) for p, q in zip(weights(models), weights(plain_models), strict=True))
    assert all(entry["step"] == 1 for o in optimizers for entry in o.state_dict()["state"].values())
    session.close()
    plain.close()


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_an_observed_update_that_a_pre_hook_stopped_holds_nothing(name):
    model, optimizer, session = start(name, "bf16", torch.optim.Adagrad)
    session.observe(every=1, tensors="update")
    backward(model, session, 0)
    handle = optimizer.register_step_pre_hook(boom)
    with pytest.raises(Boom):
        session.step()
    handle.remove()
    assert session._parts[0].stepper.unrounded is None
    session.step()
