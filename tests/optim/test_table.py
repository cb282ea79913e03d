"""The table of optimizers: what a row can ask for, and that what no kernel knows is an error and not another update."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from halfstep.kernels.batch import Batch, Options, Scratch
from halfstep.kernels.build import find_compiler
from halfstep.optim.implementations import IMPLEMENTATIONS, update
from halfstep.optim.lamb import Lamb
from halfstep.optim.lion import Lion
from halfstep.optim.masters import MasterStore
from halfstep.optim.one_pass import OnePassStepper
from halfstep.optim.table import TABLE, OptimizerRow, row_of
from tests.optim.cases import FALSE, OWN, options_of

BF16 = torch.bfloat16
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def test_a_row_with_whole_weights_has_no_loop_over_blocks():
    with pytest.raises(ValueError, match="a row with whole=True must not name one"):
        replace(TABLE[Lamb], native="adam")


@needs_compiler
@pytest.mark.parametrize(("cls", "options"), OWN)
def test_every_row_names_a_loop_that_is_there(cls, options):
    assert TABLE[cls].native is not None
    weight = Parameter(torch.ones(3))
    stepper = OnePassStepper(cls([weight], **options), MasterStore("none", BF16), TABLE[cls])
    stepper._implementations = {"native": IMPLEMENTATIONS["native"]}
    stepper.step([weight], [torch.ones(3)], None, FALSE)
    assert not torch.equal(weight, torch.ones(3))


def batch_of(options):
    counts = [[torch.zeros(())], [torch.ones(())]]
    return Batch("full", [torch.ones(3)], [], [torch.ones(3)], {n: [torch.zeros(3)] for n in options.states}, *counts)


@dataclass(frozen=True)
class Other(Options):
    states: tuple = ()
    numbers: tuple = ()


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "states", "numbers"),
    [
        ("adagrad", (), ()),
        ("adam", ("exp_avg", "exp_avg_sq"), (0.9, 0.999)),
        ("adam", ("exp_avg",), (0.9, 0.999, 1e-8)),
        ("sgd", ("a", "b"), (0.9, 0.0, 0.0)),
        ("lion", (), (0.9, 0.99)),
        ("lion", ("exp_avg",), (0.9, 0.99, 0.0)),
    ],
)
def test_a_compiled_loop_that_does_not_know_the_row_is_an_error_and_changes_nothing(kernel, states, numbers):
    options = Other(0.1, 0.0, False, False, states, numbers)
    batch = batch_of(options)
    row = OptimizerRow(options=lambda group: options, eager=TABLE[Lion].eager, native=kernel)
    with pytest.raises(LookupError, match=rf"'{kernel}', or it does not take {len(numbers)} numbers and the states"):
        update(row, batch, options, None, FALSE, Scratch(), IMPLEMENTATIONS)
    assert batch.weights[0].tolist() == [1.0] * 3
    assert batch.steps[0] == 0


def test_a_batch_that_no_implementation_takes_is_an_error():
    options = options_of(Lion([Parameter(torch.ones(3))]))
    table = {"fused": IMPLEMENTATIONS["fused"]}
    with pytest.raises(LookupError, match=r"none of the implementations \['fused'\] can update parameters of"):
        update(TABLE[Lion], batch_of(options), options, None, FALSE, Scratch(), table)


def test_options_that_a_row_does_not_know_are_left_to_the_optimizers_own_step():
    one = [Parameter(torch.ones(1))]
    assert row_of(Lion(one)) is TABLE[Lion]
    assert row_of(SGD(one, lr=torch.tensor(0.1))) is TABLE[SGD]
    assert row_of(type("Mine", (Lion,), {})(one)) is None
    assert row_of(SGD(one, dampening=torch.tensor(0.5), momentum=0.9)) is None
    assert row_of(AdamW(one, differentiable=True)) is None
    assert TABLE[Adam] is TABLE[AdamW]
