"""apex's fused optimizers: their signatures, their updates against slow ones, and training under sessions."""

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

import halfstep
from halfstep.adapters.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from halfstep.errors import SetupError
from halfstep.train.optim.optimizers import TABLE, Lamb, NovoGrad, row_of
from tests.contracts import cases as contracts
from tests.optim.cases import assert_same_bits, gradients, own_run, parameters, textbook_adam

PEERS = {
    FusedAdam: lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    FusedSGD: lambda params: torch.optim.SGD(params, lr=0.01, weight_decay=0.1),
    FusedLAMB: lambda params: Lamb(params, lr=0.01, weight_decay=0.1),
    FusedNovoGrad: lambda params: NovoGrad(params, lr=0.01, weight_decay=0.1),
    FusedAdagrad: lambda params: torch.optim.Adagrad(params, lr=0.01, weight_decay=0.1),
}
each_class = pytest.mark.parametrize("cls", PEERS)


def trained(make, name, low, steps=4):
    model, optimizer = contracts.make(0, make)
    with halfstep.initialize(model, optimizer, name, low=low, loss_scale=None) as session:
        contracts.train(session, model, optimizer, range(steps), poison=[] if name == "O0" else [1])
        return contracts.snapshot(model, optimizer)


@contracts.every_plan
@each_class
def test_each_trains_bit_for_bit_as_the_optimizer_that_it_is(cls, name, low):
    def fused(params, lr):
        return cls(params, lr=lr, weight_decay=0.1, set_grad_none=True)

    def peer(params, lr):
        return PEERS[cls](params)

    assert contracts.differing(trained(fused, name, low), trained(peer, name, low)) == []


BETAS = (0.8, 0.95)
GIVEN = {  # every argument of apex's at a value that is not the default, and the same in the words of what it is
    FusedAdam: (
        {"bias_correction": True, "betas": BETAS, "eps": 0.1, "adam_w_mode": False, "weight_decay": 0.1},
        lambda params: torch.optim.Adam(params, lr=0.3, betas=BETAS, eps=0.1, weight_decay=0.1),
    ),
    FusedSGD: (
        {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1, "materialize_master_grads": False},
        lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.5, dampening=0.25, weight_decay=0.1),
    ),
    FusedLAMB: (
        {"bias_correction": False, "betas": BETAS, "eps": 0.1, "weight_decay": 0.0, "adam_w_mode": False}
        | {"grad_averaging": False, "max_grad_norm": 0.125, "use_nvlamb": True},
        lambda params: Lamb(
            params, 0.3, BETAS, 0.1, 0.0, bias_correction=False, grad_averaging=False, max_grad_norm=0.125,
            decoupled_weight_decay=False, always_adapt=True,
        ),
    ),
    FusedNovoGrad: (
        {"bias_correction": False, "betas": BETAS, "eps": 0.1, "weight_decay": 0.1, "reg_inside_moment": True}
        | {"grad_averaging": False, "norm_type": 0, "init_zero": True},
        lambda params: NovoGrad(
            params, 0.3, BETAS, 0.1, 0.1, bias_correction=False, grad_averaging=False, reg_inside_moment=True,
            norm_type=0, init_zero=True,
        ),
    ),
    FusedAdagrad: (
        {"eps": 0.1, "weight_decay": 0.1},
        lambda params: torch.optim.Adagrad(params, lr=0.3, eps=0.1, weight_decay=0.1),
    ),
}  # fmt: skip


def after_two_steps(make):
    params = parameters()
    optimizer = make(params)
    for seed in range(2):
        for p, grad in zip(params, gradients(params, seed), strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return [p.detach() for p in params]


@each_class
def test_every_argument_reaches_the_law(cls):
    given, peer = GIVEN[cls]
    found = after_two_steps(lambda params: cls(params, lr=0.3, **given))
    assert_same_bits(found, after_two_steps(peer))
    for name in given.keys() - {"materialize_master_grads"}:
        others = {key: value for key, value in given.items() if key != name}
        without = after_two_steps(lambda params, others=others: cls(params, lr=0.3, **others))
        same = all(torch.equal(a, b) for a, b in zip(found, without, strict=True))
        assert same is ((cls, name) in ((FusedAdam, "bias_correction"), (FusedLAMB, "adam_w_mode"))), name


def test_lamb_takes_weight_decay_of_both_kinds():
    """Which makes no difference above, where there is none."""
    both = [
        (
            after_two_steps(lambda params, on=on: FusedLAMB(params, weight_decay=0.1, adam_w_mode=on)),
            after_two_steps(lambda params, on=on: Lamb(params, weight_decay=0.1, decoupled_weight_decay=on)),
        )
        for on in (True, False)
    ]
    for found, peer in both:
        assert_same_bits(found, peer)
    assert not torch.equal(both[0][0][0], both[1][0][0])


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction_is_that_with_and_without_a_session(decoupled):
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    settings = {**options, "bias_correction": False, "adam_w_mode": decoupled}
    params = parameters()
    optimizer = FusedAdam(params, **settings)
    starts = [p.detach().double() for p in params]
    run = own_run_of(settings)
    all_grads = [gradients(params, seed) for seed in range(4)]
    for grads in all_grads:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        assert optimizer.step(lambda: 3.0) == 3.0
        run.step(grads)
    for i, p in enumerate(params):
        mine = [grads[i].double() for grads in all_grads]
        expected = textbook_adam(starts[i], mine, **options, decoupled=decoupled, corrected=False)
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)
    assert_same_bits([p.detach() for p in params], run.values())


def own_run_of(settings):
    row = row_of(FusedAdam(parameters(), **settings))
    assert row is TABLE[torch.optim.Adam]
    run = own_run(torch.optim.Adam, {})
    run.optimizer = FusedAdam(run.params, **settings)
    run.stepper._optimizer = run.optimizer
    return run


def test_compiled_loops_are_not_asked_for_adam_without_bias_correction():
    row = row_of(FusedAdam(parameters()))
    groups = [FusedAdam(parameters(), bias_correction=on).param_groups[0] for on in (True, False)]
    assert [row.compiled(group) for group in groups] == [True, False]


@each_class
def test_a_row_is_found_but_for_adagrad_and_for_subclasses(cls):
    one = [Parameter(torch.ones(1))]
    assert (row_of(cls(one, lr=0.1)) is None) is (cls is FusedAdagrad)
    assert row_of(type("Mine", (cls,), {})(one, lr=0.1)) is None


@each_class
@pytest.mark.parametrize("none", [True, False])
def test_zero_grad_drops_or_zeroes_as_asked(cls, none):
    p = Parameter(torch.ones(1))
    optimizer = cls([p], lr=0.1, set_grad_none=none)
    p.grad = torch.ones(1)
    optimizer.zero_grad()
    assert p.grad is None if none else p.grad.item() == 0.0
    p.grad = torch.ones(1)
    optimizer.zero_grad(set_to_none=not none)
    assert (p.grad is None) is not none


@each_class
def test_copies_pickles_and_states_go_on(cls):
    _, optimizer = contracts.make(0, cls)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.set_grad_none = not optimizer.set_grad_none
    optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer))
    assert type(other) is cls
    assert other.set_grad_none == optimizer.set_grad_none
    third = cls(copy.deepcopy(optimizer.param_groups[0]["params"]), lr=0.5)
    third.load_state_dict(optimizer.state_dict())
    assert third.param_groups[0]["lr"] == 1e-2
    assert third.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda ps: FusedAdam(ps, amsgrad=True), RuntimeError, "FusedAdam does not support the AMSGrad variant"),
        (lambda ps: FusedLAMB(ps, amsgrad=True), RuntimeError, "FusedLAMB does not support the AMSGrad variant"),
        (lambda ps: FusedNovoGrad(ps, amsgrad=True), RuntimeError, "FusedNovoGrad does not support the AMSGrad"),
        (lambda ps: FusedAdam(ps, master_weights=True), SetupError, "master_weights=True.* opt_level O2"),
        (lambda ps: FusedSGD(ps, 0.1, wd_after_momentum=True), SetupError, "wd_after_momentum=True.*leave it out"),
        (lambda ps: FusedSGD(ps, momentum=0.9), ValueError, "without a learning rate"),
        (lambda ps: FusedSGD([{"params": ps}]), ValueError, "without a learning rate"),
        (lambda ps: FusedAdagrad(ps, adagrad_w_mode=True), SetupError, "adagrad_w_mode=True.*leave it out"),
        (lambda ps: FusedLAMB(ps, max_grad_norm=-1.0), ValueError, "max_grad_norm must be a number above 0"),
        (lambda ps: FusedNovoGrad(ps, norm_type=3), ValueError, "norm_type must be 2, or 0"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(make, error, said):
    with pytest.raises(error, match=said):
        make([Parameter(torch.ones(1))])


def test_fused_sgd_takes_a_learning_rate_for_each_group():
    a, b, c = (Parameter(torch.ones(1)) for _ in range(3))
    optimizer = FusedSGD([{"params": [a], "lr": 0.25}, {"params": [b], "lr": 0.5}])
    for p in (a, b):
        p.grad = torch.ones(1)
    optimizer.step()
    assert [a.item(), b.item()] == [0.75, 0.5]
    optimizer.add_param_group({"params": [c], "lr": 0.125})
    assert optimizer.param_groups[2]["lr"] == 0.125
    with pytest.raises(ValueError, match="without a learning rate"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(1))]})
