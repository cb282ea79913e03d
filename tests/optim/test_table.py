"""The table of optimizers: what a row can ask for, and that what no kernel knows is an error and not another update."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

import halfstep
from halfstep.kernels.batch import Batch, Options, Scratch
from halfstep.kernels.build import find_compiler
from halfstep.optim.eager import decayed
from halfstep.optim.implementations import IMPLEMENTATIONS, update
from halfstep.optim.lion import Lion
from halfstep.optim.masters import MasterStore
from halfstep.optim.one_pass import OnePassStepper
from halfstep.optim.split import round_half_away
from halfstep.optim.table import TABLE, Row, row_of
from tests.contracts import cases as contracts
from tests.optim.cases import FALSE, OWN, assert_same_bits, options_of

BF16 = torch.bfloat16
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


class Lamb(Optimizer):
    """LAMB (You et al. 2020, algorithm 2), of which halfstep makes the steps."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


@dataclass(frozen=True)
class LambOptions(Options):
    betas: tuple[float, float]
    eps: float
    states = ("exp_avg", "exp_avg_sq")


def lamb_options(group):
    return LambOptions(group["lr"], group["weight_decay"], False, True, group["betas"], group["eps"])


def lamb(batch, options):
    (beta1, beta2), alone = options.betas, replace(options, weight_decay=0.0)
    for (w, g, (mean, square)), step in zip(decayed(batch, alone), batch.steps, strict=True):
        m = mean * beta1 + g * (1 - beta1)
        v = square * beta2 + g * g * (1 - beta2)
        u = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + options.eps) + w * options.weight_decay
        size = torch.linalg.vector_norm(w)
        trust = torch.where(size > 0, size / torch.linalg.vector_norm(u), 1.0)
        yield [w - u * (trust * options.lr), m, v]


LAMB = Row(options=lamb_options, eager=lamb, counts=True, whole=True)
LARGE = 2**19 + 1000  # more than the reference opens at a time on a CPU


def weights():
    g = torch.Generator().manual_seed(1)
    kernel = torch.randn(4, 3, 3, 3, generator=g).to(memory_format=torch.channels_last)
    return [
        torch.randn(LARGE, generator=g),
        kernel,
        torch.randn(6, 8, generator=g)[:, ::2],
        torch.randn(5, generator=g),
    ]


def lamb_steps(kind, steps=3, row=LAMB, low=BF16):
    """The fp32 values and the stored weights after some steps, one of them skipped, from gradients times 8."""
    params = [Parameter(value.clone(memory_format=torch.preserve_format)) for value in weights()]
    store = MasterStore(kind or "none", low)
    for p in params if kind else ():
        store.track(p)
    stepper = OnePassStepper(Lamb(params), store, row)
    for seed in range(steps):
        grads = [torch.sin(torch.arange(p.numel()) + seed).view(p.shape).to(BF16) for p in params]
        stepper.step(params, grads, torch.tensor(0.125), torch.tensor(seed == 1))
    return [store.full(p).clone() for p in params], [p.detach() for p in params]


def textbook_lamb(steps=3):
    """In float64, with the norm of each weight as a whole."""
    found = []
    for start in weights():
        w, m, v, t = start.double(), 0.0, 0.0, 0
        for seed in range(steps):
            if seed == 1:
                continue
            g, t = torch.sin(torch.arange(w.numel()) + seed).view(w.shape).to(BF16).double() / 8, t + 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.1 * w
            w = w - 0.01 * w.norm() / u.norm() * u
        found.append(w)
    return found


def test_a_row_with_whole_weights_is_the_textbooks_lamb():
    for value, expected in zip(lamb_steps(None)[0], textbook_lamb(), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_cut_weights_would_have_other_norms():
    cut = lamb_steps(None, row=replace(LAMB, whole=False))[0][0]
    assert not torch.allclose(cut.double(), textbook_lamb()[0], rtol=1e-5, atol=1e-6)


def test_a_row_with_whole_weights_goes_alike_for_every_master():
    full = [p.to(BF16).float() for p in weights()]
    values, stored = lamb_steps("copy")
    assert_same_bits(values, lamb_steps("split")[0])
    assert_same_bits(stored, [round_half_away(value, BF16) for value in values])
    torch.testing.assert_close(values, lamb_steps(None)[0], rtol=1e-5, atol=1e-6)
    for value, start in zip(lamb_steps("none", steps=1)[0], full, strict=True):
        assert 0 < (value - start).abs().max() < 0.2


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
def test_a_session_trains_and_observes_by_a_row_with_whole_weights(monkeypatch, name, low):
    monkeypatch.setitem(TABLE, Lamb, LAMB)
    model, optimizer = contracts.make(0, Lamb)
    session = halfstep.initialize(model, optimizer, name, low=low, loss_scale=128.0)
    seen = []
    session.observe(every=1, log=seen.append)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    records = contracts.train(session, model, optimizer, range(4), poison=[2])
    assert [bool(record.skipped) for record in records] == [False, False, True, False]
    assert all(not torch.equal(p, q) for p, q in zip(trained, before, strict=True))
    assert seen
    assert {state["step"].item() for state in optimizer.state_dict()["state"].values()} == {3.0}


def test_a_row_with_whole_weights_has_no_loop_over_blocks():
    with pytest.raises(ValueError, match="needs whole weights"):
        replace(LAMB, native="adam")


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
    row = Row(options=lambda group: options, eager=lamb, native=kernel)
    with pytest.raises(LookupError, match=rf"no compiled loop '{kernel}' takes {len(numbers)} numbers and the states"):
        update(row, batch, options, None, FALSE, Scratch(), IMPLEMENTATIONS)
    assert batch.weights[0].tolist() == [1.0] * 3
    assert batch.steps[0] == 0


def test_a_batch_that_no_implementation_takes_is_an_error():
    options = options_of(Lion([Parameter(torch.ones(3))]))
    table = {"fused": IMPLEMENTATIONS["fused"]}
    with pytest.raises(LookupError, match=r"none of the implementations \['fused'\] updates a full batch"):
        update(TABLE[Lion], batch_of(options), options, None, FALSE, Scratch(), table)


def test_options_that_a_row_does_not_know_are_left_to_the_optimizers_own_step():
    one = [Parameter(torch.ones(1))]
    assert row_of(Lion(one)) is TABLE[Lion]
    assert row_of(SGD(one, lr=torch.tensor(0.1))) is TABLE[SGD]
    assert row_of(type("Mine", (Lion,), {})(one)) is None
    assert row_of(SGD(one, dampening=torch.tensor(0.5), momentum=0.9)) is None
    assert row_of(AdamW(one, differentiable=True)) is None
    assert TABLE[Adam] is TABLE[AdamW]
