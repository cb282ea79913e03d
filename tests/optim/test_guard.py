import gc
import weakref

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler

from halfstep.errors import SessionError
from halfstep.train.optim.hooks import forbid_step, original_step
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.steppers import make_stepper

MESSAGE = "call session.step()"
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}
OPTIMIZERS = {
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.5),
}


def optimizer_of(name="SGD"):
    return OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(3))])


def tick(scheduler):
    scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def test_the_original_step_is_found_below_guards_and_schedulers():
    optimizer = optimizer_of()
    plain = original_step(optimizer)
    undo = forbid_step(optimizer, MESSAGE)
    assert original_step(optimizer) == plain
    SCHEDULERS["StepLR"](optimizer)
    assert original_step(optimizer) == plain
    undo()
    assert original_step(optimizer) == plain


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("order", ["scheduler first", "guard first"])
@pytest.mark.parametrize("plain", [False, True])
def test_schedulers_go_as_on_torchs_own_optimizer_and_do_not_warn(kind, name, order, plain):
    optimizer, peer = optimizer_of(name), optimizer_of(name)
    peer_scheduler = SCHEDULERS[kind](peer)
    stepper = make_stepper(optimizer, MasterStore("none", torch.bfloat16), plain=plain)
    if order == "scheduler first":
        scheduler = SCHEDULERS[kind](optimizer)
        undo = forbid_step(optimizer, MESSAGE)
    else:
        undo = forbid_step(optimizer, MESSAGE)
        scheduler = SCHEDULERS[kind](optimizer)
    params, peers = optimizer.param_groups[0]["params"], peer.param_groups[0]["params"]
    for epoch in range(8):
        if epoch == 5:
            stepper.close()
            undo()
        params[0].grad, peers[0].grad = torch.ones(3), torch.ones(3)
        if epoch < 5:
            stepper.step(params, [torch.ones(3)], None, torch.tensor(False))
        else:
            optimizer.step()
        peer.step()
        tick(scheduler)
        tick(peer_scheduler)
        for key in ("lr", "betas", "momentum"):
            assert optimizer.param_groups[0].get(key) == peer.param_groups[0].get(key)
    torch.testing.assert_close(params[0], peers[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_schedulers_do_not_warn_where_the_first_step_is_skipped(name):
    optimizer = optimizer_of(name)
    stepper = make_stepper(optimizer, MasterStore("none", torch.bfloat16), plain=False)
    forbid_step(optimizer, MESSAGE)
    scheduler = SCHEDULERS["StepLR"](optimizer)
    stepper.step(optimizer.param_groups[0]["params"], [torch.full((3,), float("inf"))], None, torch.tensor(True))
    scheduler.step()


@pytest.mark.parametrize("order", ["scheduler first", "guard first"])
def test_the_guard_stands_also_where_a_scheduler_wraps_the_step(order):
    optimizer = optimizer_of()
    if order == "scheduler first":
        SCHEDULERS["StepLR"](optimizer)
        wrapper = optimizer.step
        undo = forbid_step(optimizer, MESSAGE)
    else:
        undo = forbid_step(optimizer, MESSAGE)
        SCHEDULERS["StepLR"](optimizer)
    with pytest.raises(SessionError):
        optimizer.step()
    undo()
    if order == "scheduler first":
        assert optimizer.step is wrapper
    optimizer.step()


def test_a_second_guard_is_one_too():
    optimizer = optimizer_of()
    first = forbid_step(optimizer, MESSAGE)
    SCHEDULERS["StepLR"](optimizer)
    first()
    second = forbid_step(optimizer, "again")
    with pytest.raises(SessionError, match="again"):
        optimizer.step()
    second()
    optimizer.step()


def test_a_guarded_optimizer_can_be_collected():
    optimizer = optimizer_of()
    forbid_step(optimizer, MESSAGE)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
