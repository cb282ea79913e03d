import pytest
import torch
from torch import optim
from torch.nn import Parameter

from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.steppers import ForeignStepper
from tests.optim.cases import FALSE, TRUE, assert_same_bits, bits, gradients, parameters

BF16, FP16 = torch.bfloat16, torch.float16
FOREIGN = {
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.01, weight_decay=0.1),
    "RAdam": lambda ps: optim.RAdam(ps, lr=0.01),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.01),
    "Adadelta": lambda ps: optim.Adadelta(ps, lr=1.0),
    "Adamax": lambda ps: optim.Adamax(ps, lr=0.01),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.01),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
    "Muon": lambda ps: optim.Muon([p for p in ps if p.ndim == 2], lr=0.01),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
}
STORES = [("copy", BF16), ("copy", FP16), ("split", BF16)]
EACH_OPTIMIZER = pytest.mark.parametrize("name", FOREIGN)
EACH_STORE = pytest.mark.parametrize(("kind", "low"), STORES)


def run_of(name, kind=None, low=BF16):
    params = parameters()
    optimizer = FOREIGN[name](params)
    params = optimizer.param_groups[0]["params"][:]
    store = MasterStore(kind or "none", low)
    for p in params if kind else ():
        store.track(p)
    return params, optimizer, store, ForeignStepper(optimizer, store)


def snapshot(params, optimizer, store):
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return [bits(t).clone() for t in [*params, *(store.full(p) for p in params), *state]]


@EACH_OPTIMIZER
@EACH_STORE
def test_masters_go_as_fp32_parameters_under_the_plain_optimizer(name, kind, low):
    params, optimizer, store, stepper = run_of(name, kind, low)
    theirs, peer, _, _ = run_of(name)
    for q in theirs:  # as memory of a master is laid out: Muon and Adafactor reduce, in its order
        q.data = torch.empty_like(q).copy_(q)
    for seed in range(5):
        grads = gradients(params, seed, scale=64.0)
        for q, grad in zip(theirs, grads, strict=True):
            q.grad = grad.float() * 2.0**-6
        peer.step()
        stepper.step(params, grads, torch.tensor(2.0**-6), FALSE)
    assert_same_bits([store.full(p) for p in params], [q.detach() for q in theirs])
    for p, q in zip(params, theirs, strict=True):
        assert p.dtype is low
        assert optimizer.state[p].keys() == peer.state[q].keys()
        for key, value in peer.state[q].items():
            torch.testing.assert_close(optimizer.state[p][key], value, rtol=0, atol=0)


@EACH_OPTIMIZER
@pytest.mark.parametrize(("kind", "low"), [(None, BF16), *STORES])
def test_a_skip_changes_nothing(name, kind, low):
    params, optimizer, store, stepper = run_of(name, kind, low)
    for first in (True, False):
        before = snapshot(params, optimizer, store)
        stepper.step(params, [torch.full_like(p, float("nan")) for p in params], None, TRUE)
        assert_same_bits(snapshot(params, optimizer, store), before)
        if first:
            stepper.step(params, gradients(params, 0), None, FALSE)


@EACH_STORE
def test_the_optimizer_is_as_before_between_steps(kind, low):
    params, optimizer, _, stepper = run_of("RMSprop", kind, low)
    groups, state = optimizer.param_groups[0]["params"], optimizer.state
    grads = gradients(params, 0)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    stepper.step(params, grads, torch.tensor(0.5), FALSE)
    assert optimizer.param_groups[0]["params"] is groups
    assert optimizer.state is state
    assert all(a is b for a, b in zip(groups, params, strict=True))
    assert all(any(key is p for p in params) for key in state)
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_full_parameters_see_true_gradients_and_keep_their_scaled_ones():
    params, optimizer, _, stepper = run_of("RMSprop")
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.extend(p.grad.clone() for p in params))
    grads = gradients(params, 0, scale=8.0)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    stepper.step(params, grads, torch.tensor(0.125), FALSE)
    assert_same_bits(seen, [grad * 0.125 for grad in grads])
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))


@EACH_STORE
def test_an_optimizer_that_raises_leaves_everything_in_place(kind, low):
    params, optimizer, store, stepper = run_of("RMSprop", kind, low)
    before = snapshot(params, optimizer, store)

    def fail(*_):
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        stepper.step(params, gradients(params, 0), torch.tensor(0.5), FALSE)
    assert_same_bits(snapshot(params, optimizer, store), before)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    handle.remove()
    stepper.step(params, gradients(params, 0), torch.tensor(0.5), FALSE)


def test_an_optimizer_meets_the_same_objects_at_every_step():
    class Remembering(optim.SGD):
        def step(self, closure=None):
            seen.append([id(p) for p in self.param_groups[0]["params"]])
            return super().step(closure)

    seen = []
    params = parameters()
    store = MasterStore("split", BF16)
    for p in params:
        p.mark = "hidden"
        store.track(p)
    optimizer = Remembering(params, lr=0.1)
    stepper = ForeignStepper(optimizer, store)
    marks = []
    optimizer.register_step_pre_hook(lambda o, *_: marks.extend(p.mark for p in o.param_groups[0]["params"]))
    for seed in range(2):
        stepper.step(params, gradients(params, seed), None, FALSE)
    assert seen[0] == seen[1]
    assert set(marks) == {"hidden"}


def test_state_that_the_optimizer_keeps_low_stays_low():
    class LowMomentum(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=BF16))
                p.sub_(momentum.lerp_(p.grad.to(BF16), 0.5))  # as an fp32 momentum it would raise

    params = parameters()
    store = MasterStore("split", BF16)
    for p in params:
        store.track(p)
    optimizer = LowMomentum(params, lr=0.1)
    stepper = ForeignStepper(optimizer, store)
    for seed in range(3):
        stepper.step(params, gradients(params, seed), None, FALSE)
        assert {optimizer.state[p]["momentum"].dtype for p in params} == {BF16}


def test_parameters_without_a_gradient_stay():
    params, optimizer, store, stepper = run_of("RMSprop", "copy")
    before = [store.full(p).clone() for p in params]
    stepper.step(params[1:2], gradients(params, 0)[1:2], None, FALSE)
    assert list(optimizer.state) == [params[1]]
    assert_same_bits([store.full(params[0]), store.full(params[2])], [before[0], before[2]])
    assert not torch.equal(store.full(params[1]), before[1])


@pytest.mark.parametrize(("kind", "low"), [(None, BF16), *STORES])
def test_sparse_adam_goes_as_in_fp32(kind, low):
    start = torch.randn(6, 2)
    p, q = Parameter(start.clone()), Parameter(start.clone())
    store = MasterStore(kind or "none", low)
    if kind:
        store.track(p)
    optimizer, peer = (optim.SparseAdam([one], lr=0.1) for one in (p, q))
    for rows in ([1, 4, 4], [0, 1, 5]):
        values = torch.randn(3, 2).to(p.dtype)
        grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, (6, 2), check_invariants=True)
        q.grad = torch.sparse_coo_tensor(torch.tensor([rows]), values.float() * 0.5, (6, 2), check_invariants=True)
        peer.step()
        ForeignStepper(optimizer, store).step([p], [grad], torch.tensor(0.5), FALSE)
    assert_same_bits([store.full(p)], [q.detach()])


def test_float64_parameters_stay_float64():
    p, q = (Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    grad = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    stepper = ForeignStepper(optim.RMSprop([p], lr=0.1), MasterStore("copy", BF16))
    stepper.step([p], [grad * 4], torch.tensor(0.25), FALSE)
    q.grad = grad
    optim.RMSprop([q], lr=0.1).step()
    assert_same_bits([p], [q])


def test_between_steps_only_the_store_holds_masters():
    params, _, _, stepper = run_of("RMSprop", "split")
    stepper.step(params, gradients(params, 0), None, FALSE)
    assert all(stand_in.numel() == 0 and stand_in.grad is None for stand_in in stepper._stand_ins.values())


class Around(optim.Optimizer):
    """Wraps an optimizer, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@EACH_STORE
def test_an_optimizer_inside_a_wrapper_steps_as_alone_and_has_its_state_by_the_parameters(kind, low):
    full = []
    for wrap in (Around, lambda inner: inner):
        params, inner, store, _ = run_of("AdamW", kind, low)
        stepper = ForeignStepper(wrap(inner), store)
        for seed in range(2):
            stepper.step(params, gradients(params, seed), None, FALSE)
        assert set(map(id, inner.state)) == set(map(id, params))
        assert list(map(id, inner.param_groups[0]["params"])) == list(map(id, params))
        full.append([store.full(p) for p in params])
    assert_same_bits(*full)
