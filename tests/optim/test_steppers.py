import pytest
import torch
from torch import optim
from torch.nn import Parameter

from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.optimizers import row_of
from halfstep.train.optim.step import OnePassStepper
from halfstep.train.optim.steppers import ForeignStepper, PlainStepper, make_stepper, needs_closure

STORE = MasterStore("none", torch.bfloat16)


def one():
    return [Parameter(torch.ones(2))]


class Mine(optim.AdamW):
    pass


class WithoutRow(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [
        (optim.Adam(one()), True),
        (optim.AdamW(one(), amsgrad=True, fused=True), True),
        (optim.SGD(one(), momentum=0.9, foreach=True), True),
        (optim.AdamW(one(), lr=torch.tensor(0.1)), True),
        (Mine(one()), False),  # may compute something else
        (WithoutRow(one()), False),
        (optim.SGD(one(), differentiable=True), False),
        (
            optim.Adam(one(), betas=(torch.tensor(0.9), torch.tensor(0.99)), lr=torch.tensor(0.1), capturable=True),
            False,
        ),
    ],
)
def test_halfstep_updates_exactly_the_classes_and_options_of_its_rows(optimizer, own):
    assert (row_of(optimizer) is not None) is own
    stepper = make_stepper(optimizer, STORE, plain=False)
    assert isinstance(stepper, OnePassStepper if own else ForeignStepper)
    assert stepper.syncs is not own


def test_a_plain_stepper_is_the_optimizers_own_step():
    params, theirs = one(), one()
    optimizer, peer = optim.AdamW(params, lr=0.1), optim.AdamW(theirs, lr=0.1)
    stepper = make_stepper(optimizer, STORE, plain=True)
    assert isinstance(stepper, PlainStepper)
    assert not stepper.syncs
    for p in (*params, *theirs):
        p.grad = torch.tensor([0.5, -1.0])
    stepper.step([], [], None, torch.tensor(False))
    peer.step()
    assert torch.equal(params[0], theirs[0])
    stepper.close()


def test_optimizers_that_cannot_step_without_a_closure_are_known():
    assert needs_closure(optim.LBFGS(one()))
    assert not any(needs_closure(make(one())) for make in (optim.AdamW, optim.SGD, optim.RMSprop, optim.Adafactor))
