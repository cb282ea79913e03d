"""Moments in codes: in a session they skip, resume, load and close as in fp32, and train as the exact ones do."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import halfstep
from halfstep.errors import SessionError, SetupError, StateError
from halfstep.lab.workloads.load import load_workload
from halfstep.train.optim.moments import _tensors
from halfstep.train.optim.optimizers import Lion
from tests.contracts.cases import differing, snapshot
from tests.optim.cases import assert_same_bits, own_run

OPTIMIZERS = {"AdamW": (AdamW, {}), "Lion": (Lion, {}), "SGD": (SGD, {"momentum": 0.9})}


def begun(level="O2", kept="8bit", optimizer="AdamW", seed=0):
    """A convolution and matrices with short groups, and what is kept in bf16: biases."""
    torch.manual_seed(seed)
    parts = nn.Conv2d(32, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 64)
    model, (cls, options) = nn.Sequential(*parts), OPTIMIZERS[optimizer]
    opt = cls(model.parameters(), lr=1e-3, weight_decay=0.1, **options)
    return model, opt, halfstep.initialize(model, opt, level, low="bf16", moments=kept)


def train(model, opt, session, steps, spoiled=()):
    for step in steps:
        g = torch.Generator().manual_seed(step)
        opt.zero_grad()
        loss = (model(torch.randn(4, 32, 4, 4, generator=g)) - torch.randn(4, 64, generator=g)).square().mean()
        session.backward(loss * torch.inf if step in spoiled else loss)
        session.step(max_norm=1.0)


def codes(session):
    moments = [part.stepper._moments for part in session._parts]
    return [t.clone() for each in moments for _, batch in each._held.values() for t in _tensors(batch)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kept", ["bf16", "8bit"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_session_skips_resumes_and_closes_bit_for_bit(level, kept, optimizer):
    run, twin = begun(level, kept, optimizer), begun(level, kept, optimizer, seed=9)
    train(*run, range(3))
    before, held = snapshot(*run[:2]), codes(run[2])
    train(*run, [3], spoiled=[3])
    assert differing(snapshot(*run[:2]), before) == []
    assert_same_bits(codes(run[2]), held)
    saved = copy.deepcopy([part.state_dict() for part in run])
    train(*twin, range(2))  # what is loaded takes the place of this
    for part, state in zip(twin, saved, strict=True):
        part.load_state_dict(state)
    for each in (run, twin):
        train(*each, range(4, 7), spoiled=[5])
    assert differing(snapshot(*run), snapshot(*twin)) == []
    assert_same_bits(codes(run[2]), codes(twin[2]))
    values = {i: state for i, state in enumerate(run[1].state_dict()["state"].values())}
    run[2].close()
    for i, state in enumerate(run[1].state.values()):
        names = ["exp_avg", "exp_avg_sq", "step"] if optimizer == "AdamW" else state.keys() - {"step"}
        assert sorted(state) == sorted(names)
        assert_same_bits([state[name] for name in names], [values[i][name] for name in names])
        assert {t.dtype for t in state.values()} == {torch.float32}


@pytest.mark.parametrize(("level", "optimizer"), [("O2", "AdamW"), ("O3", "Lion")])
def test_a_state_dict_in_memory_keeps_its_entries_in_the_next_step_and_after_close(level, optimizer):
    model, opt, session = begun(level, "full", optimizer)
    session.close()
    assert not opt.state
    model(torch.randn(4, 32, 4, 4)).sum().backward()
    opt.step()
    taken = []

    def lost():
        return [names - set(state) for states, each in taken for state, names in zip(states, each, strict=True)]

    with halfstep.initialize(model, opt, level, low="bf16", moments="8bit") as session:
        for steps in (range(2, 4), range(4, 6)):
            states = opt.state_dict()["state"].values()
            taken.append((states, [set(state) for state in states]))
            train(model, opt, session, steps)
        assert codes(session)
        assert not any(lost())
    assert not any(lost())


def test_a_checkpoint_goes_to_torch_and_to_other_plans_and_back():
    model, opt, session = begun()
    train(model, opt, session, range(3))
    twin, plain = copy.deepcopy(model), opt.state_dict()
    theirs = AdamW(twin.parameters())
    theirs.load_state_dict(copy.deepcopy(plain))
    full = begun(kept="full", seed=9)
    full[1].load_state_dict(plain)
    for other in (theirs.state_dict(), full[1].state_dict(), pickle.loads(pickle.dumps(opt)).state_dict(),
                  copy.deepcopy(opt).state_dict()):  # fmt: skip
        for state, ours in zip(other["state"].values(), plain["state"].values(), strict=True):
            assert state.keys() == ours.keys()
            assert_same_bits(list(state.values()), [ours[name] for name in state])
    train(*full, range(3))
    opt.load_state_dict(full[1].state_dict())  # which are no codes: the next step rounds them
    train(model, opt, session, [3])
    assert {float(state["step"]) for state in opt.state_dict()["state"].values()} == {7.0}
    assert len(codes(session)) == 3 * (4 + 2)  # with the biases'


def emptied(opt):
    opt.load_state_dict(AdamW(opt.param_groups[0]["params"]).state_dict())


@pytest.mark.parametrize("empty", [emptied, lambda opt: opt.state.clear()], ids=["loaded", "cleared"])
def test_an_emptied_state_starts_afresh(empty):
    runs = [begun() for _ in range(2)]
    train(*runs[0], range(3))
    empty(runs[0][1])
    assert runs[0][1].state_dict()["state"] == {}
    for run in runs:
        run[0].load_state_dict(begun(seed=5)[0].state_dict())
        run[1].param_groups[0].update(lr=1e-3, weight_decay=0.1)
        train(*run, [7])
    assert differing(*(snapshot(*run[:2]) for run in runs)) == []


REFUSED = {
    "codes": (lambda state: state["state"][0].update(exp_avg=torch.ones(16, 32, 3, 3).char()), "in torch.int8, a code"),
    "float8": (
        lambda state: state["state"][0].update(exp_avg=torch.ones(16, 32, 3, 3).to(torch.float8_e4m3fn)),
        "in torch.float8_e4m3fn, a code",
    ),
    "shape": (lambda state: state["state"][0].update(exp_avg_sq=torch.ones(16)), r"which has shape \(16,\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_loaded_is_refused_and_nothing_lost(what):
    run, (spoil, said) = begun(), REFUSED[what]
    train(*run, range(2))
    state, before = copy.deepcopy(run[1].state_dict()), codes(run[2])
    spoil(state)
    with pytest.raises(StateError, match=said):
        run[1].load_state_dict(state)
    assert_same_bits(codes(run[2]), before)


def test_weights_in_a_low_format_are_refused_at_o0():
    model = nn.Linear(64, 64).bfloat16()
    with pytest.raises(SetupError, match=r"moments='8bit' needs fp32 weights at O0, but one of shape \(64, 64\) is in"):
        halfstep.initialize(model, AdamW(model.parameters()), "O0", moments="8bit")


def test_slices_of_two_elements_are_kept_in_bf16():
    model = nn.Linear(2, 4096, bias=False)
    with halfstep.initialize(model, AdamW(model.parameters()), "O2", low="bf16", moments="8bit") as session:
        session.backward(model(torch.ones(1, 2)).sum())
        session.step()
        assert session.status().moments == {"bf16": 2 * 2 * 2 * 4096}


def test_amsgrad_that_a_checkpoint_turns_on_is_refused():
    run = begun()
    train(*run, range(2))
    run[1].param_groups[0]["amsgrad"] = True
    with pytest.raises(SessionError, match=r'now has amsgrad.*set it back, or open the session with moments="full"'):
        train(*run, [2])
    run[1].param_groups[0]["amsgrad"] = False
    train(*run, [2])


def test_weights_move_to_another_memory_order_and_others_join():
    model, opt, session = begun()
    session.close()
    more = nn.ModuleList(nn.Linear(64, 80) for _ in range(2))
    session = halfstep.initialize([model, more], opt, "O2", low="bf16", moments="8bit")
    train(model, opt, session, range(2))
    before = opt.state_dict()["state"]
    model.to(memory_format=torch.channels_last)
    opt.add_param_group({"params": more[0].parameters()})
    train(model, opt, session, [2], spoiled=[2])
    for i, state in opt.state_dict()["state"].items():  # rounded once more, among other neighbours
        for name, t in state.items():
            torch.testing.assert_close(t, before[i][name], rtol=1 / 8, atol=float(t.abs().max()) / 2**7)
    other = AdamW(more[1].parameters())
    session.add_optimizers([other])
    session.backward(more[0](torch.ones(64)).sum() + more[1](torch.ones(64)).sum())
    session.step()
    assert len(codes(session)) == 5 * (4 + 2)


@pytest.mark.parametrize(
    ("level", "options", "bytes_each"),
    [
        ("O2", {}, 14),
        ("O2", {"moments": "bf16"}, 10),
        ("O2", {"moments": "8bit"}, 8.05),
        ("O3", {"moments": "8bit", "rounding": "stochastic"}, 6.05),
    ],
)
def test_bytes_of_a_parameter_of_a_small_gpt_between_backward_and_step(level, options, bytes_each):
    workload = load_workload("char_lm", {"d": "384", "layers": "6", "heads": "6", "length": "256", "batch": "1"})
    model = workload.build(0)
    inputs, targets = next(iter(workload.batches(0)))
    opt = AdamW(model.parameters())
    with halfstep.initialize(model, opt, level, low="bf16", **options) as session:
        for _ in range(2):
            session.backward(workload.loss(model(inputs[:, :8]), targets[:, :8]))
            memory = session.status().memory
            session.step()
            opt.zero_grad()
    assert sum(memory.values()) / sum(p.numel() for p in model.parameters()) == pytest.approx(bytes_each, abs=0.02)


def compared(steps, gradient, kept, lr=0.0, eps=1e-8, implementation="eager", betas=(0.9, 0.999)):
    """Yields the states and the updates of the same gradients, with moments kept as asked and exact."""
    weights = [[nn.Parameter(torch.zeros(64, 64))] for _ in range(2)]
    options = {"lr": lr, "eps": eps, "weight_decay": 0, "betas": betas}
    runs = [
        own_run(AdamW, options, implementation=implementation, params=w, kept=k)
        for w, k in zip(weights, (kept, None), strict=True)
    ]
    for step in range(steps):
        before = [w[0].detach().clone() for w in weights]
        given = gradient(step)
        for run in runs:
            run.step([given])
        yield runs, [w[0].detach() - b for w, b in zip(weights, before, strict=True)]


both = pytest.mark.parametrize("kept", ["bf16", "8bit"])


@pytest.mark.slow_but("8bit")
@both
def test_a_second_moment_follows_gradients_that_jump(kept):
    jump = torch.where(torch.arange(64) % 2 == 0, 10.0, 0.1)
    *_, (runs, _) = compared(
        2500, lambda step: torch.randn(64, 64) * (jump if step >= 500 else 1.0), kept, implementation=None
    )
    got, exact = (run.optimizer.state_dict()["state"][0]["exp_avg_sq"] for run in runs)
    ratios = (got / exact).sqrt()
    assert all(0.95 <= float(part.median()) <= 1.05 for part in (ratios[:, ::2], ratios[:, 1::2]))


@pytest.mark.slow_but("2.5-bf16", "1.5-8bit")
@both
@pytest.mark.parametrize(("beta2", "most"), [(0.999, 2.5), (0.95, 1.5)])
def test_no_update_grows_beside_elements_that_are_nearly_dead(kept, beta2, most):
    hot, worst = torch.exp(torch.randn(64, 64)) * (torch.rand(64, 64) < 0.5), 0.0

    def gradient(step):  # sometimes a little for the others, of any magnitude
        return torch.randn(64, 64) * (hot + (step % 50 == 49) * torch.exp(-15 * torch.rand(64, 64)))

    for step, (_, (got, exact)) in enumerate(compared(300, gradient, kept, lr=1.0, betas=(0.9, beta2))):
        assert step or float(got.abs().max()) <= 1.01
        worst = max(worst, float(got.abs().max() / exact.abs().max()))
    assert worst <= most


@pytest.mark.parametrize(
    ("beta1", "noise", "least", "most"),
    [
        (0.9, 0.0, 0.80, 0.90),  # rounded to nearest, whose limits the guide names
        (0.9, 0.1, 0.95, 0.98),
        (0.9, 0.5, 0.99, 1.02),
        (0.95, 0.0, 0.99, 1.01),
        (0.98, 0.0, 0.99, 1.01),
    ],
)
def test_gradients_with_little_noise_go_as_far(beta1, noise, least, most):
    steady = torch.randn(64, 64)
    updates = compared(
        300,
        lambda _: steady + noise * steady.abs() * torch.randn(64, 64),
        "8bit",
        1.0,
        implementation=None,
        betas=(beta1, 0.999),
    )
    got, exact = map(sum, zip(*(pair for _, pair in updates), strict=True))
    assert least <= float((got * exact.sign()).sum() / exact.abs().sum()) <= most


@both
def test_the_scale_of_gradients_changes_no_bit(kept):
    gradients, found = torch.randn(20, 64, 64), []
    for scale in (1.0, 2.0**-27):
        found.append([got for _, (got, _) in compared(20, (gradients * scale).__getitem__, kept, 1.0, 1e-8 * scale)])
    assert_same_bits(*found)
