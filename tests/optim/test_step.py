import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfstep.errors import SessionError
from halfstep.train.optim.masters import MasterStore
from tests.optim.cases import FALSE, OWN, TRUE, assert_same_bits, gradients, one_pass, own_run, parameters
from tests.scale.sync import NoSync, no_cuda_sync

BF16 = torch.bfloat16
KINDS = [None, "none", "copy", "split"]
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def alone(cls, values, kind=None, **options):
    """A stepper on one parameter of these values."""
    p = Parameter(torch.as_tensor(values))
    store = MasterStore(kind or "none", BF16)
    if kind:
        store.track(p)
    optimizer = cls([p], **options)
    return p, store, optimizer, one_pass(optimizer, store)


@EACH_KIND
@pytest.mark.parametrize(("cls", "options"), OWN)
def test_nothing_is_read_on_the_host(cls, options, kind):
    run = own_run(cls, options, kind)
    with NoSync():
        for seed in range(3):
            run.step(gradients(run.params, seed), torch.tensor(0.5), torch.tensor(seed == 1))
        run.step(gradients(run.params, 3))


def test_state_that_no_update_has_reached_is_that_of_none():
    """Step 0 and zeros: who loads it, torch's own step too, goes on as from no state."""
    run = own_run(AdamW, {})
    run.step(gradients(run.params, 0), None, TRUE)
    run.stepper.close()
    states = run.optimizer.state_dict()["state"].values()
    assert all(not value.any() for entry in states for value in entry.values())


@pytest.mark.parametrize(("cls", "options"), [(AdamW, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9})])
def test_state_of_training_before_is_gone_on_from(cls, options):
    ours, theirs = parameters()[:4], parameters()[:4]
    optimizers = [cls(params, **options) for params in (ours, theirs)]
    stepper = None
    for seed in range(4):
        grads = gradients(ours, seed)
        for params in (ours, theirs):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.clone()
        optimizers[1].step()
        if seed < 2:
            optimizers[0].step()
            continue
        stepper = stepper or one_pass(optimizers[0], MasterStore("none", BF16))
        stepper.step(ours, grads, None, FALSE)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def test_low_state_becomes_full():
    p, _, optimizer, stepper = alone(AdamW, [1.0], "copy")
    optimizer.state[p] = {
        "step": 3,
        "exp_avg": torch.tensor([0.5], dtype=BF16),
        "exp_avg_sq": torch.tensor([0.25], dtype=BF16),
    }
    stepper.step([p], [torch.tensor([0.5])], None, FALSE)
    state = optimizer.state[p]
    assert state["step"].item() == 4
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32
    assert state["exp_avg"].item() == 0.5


@EACH_KIND
def test_state_of_low_weights_is_full(kind):
    run = own_run(Adam, {"amsgrad": True}, kind)
    run.step(gradients(run.params, 0))
    for entry in run.optimizer.state_dict()["state"].values():
        assert {value.dtype for value in entry.values()} == {torch.float32}


def test_a_group_added_later_trains_in_fp32():
    run = own_run(AdamW, {"lr": 0.1}, "split")
    run.step(gradients(run.params, 0))
    late = Parameter(torch.ones(3))
    run.optimizer.add_param_group({"params": [late], "lr": 1.0, "weight_decay": 0.0})
    run.stepper.step([late], [torch.ones(3)], None, FALSE)
    assert late.dtype is torch.float32
    torch.testing.assert_close(late, torch.zeros(3), atol=1e-6, rtol=0)


@EACH_KIND
def test_parameters_without_a_gradient_stay_and_get_no_state(kind):
    run = own_run(AdamW, {"weight_decay": 0.5}, kind)
    before = run.values()
    run.stepper.step(run.params[:1], gradients(run.params[:1], 0), None, FALSE)
    assert_same_bits(run.values()[1:], before[1:])
    assert list(run.optimizer.state_dict()["state"]) == [0]


def test_weights_changed_in_place_between_steps_are_gone_on_from():
    p, store, _, stepper = alone(SGD, [1.0, 2.0], "split", lr=1.0)
    stepper.step([p], [torch.tensor([2.0**-12] * 2)], None, FALSE)
    with torch.no_grad():
        p[0] = 0.0
    stepper.step([p], [torch.tensor([2.0**-12] * 2)], None, FALSE)
    assert store.full(p).tolist() == [-(2.0**-12), 2.0 - 2 * 2.0**-12]


def test_gradients_are_left_as_they_are():
    run = own_run(AdamW, {}, "split")
    grads = gradients(run.params, 0)
    before = [grad.clone() for grad in grads]
    run.step(grads, torch.tensor(0.25))
    assert_same_bits(grads, before)


@EACH_KIND
def test_full_gradients_of_low_weights_are_taken_as_they_are(kind):
    p, store, _, stepper = alone(SGD, [0.0], kind, lr=1.0)
    stepper.step([p], [torch.tensor([TINY := 2.0**-30])], torch.tensor(2.0**-100), FALSE)
    assert store.full(p).item() == -TINY * 2.0**-100


def test_complex_parameters_go_as_under_torch():
    start, grads = torch.randn(5, dtype=torch.complex64), [torch.randn(5, dtype=torch.complex64) for _ in range(3)]
    for cls, options in ((AdamW, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9})):
        p, _, _, stepper = alone(cls, start.clone(), **options)
        q = Parameter(start.clone())
        peer = cls([q], foreach=False, **options)
        for grad in grads:
            q.grad = grad
            peer.step()
            stepper.step([p], [grad], None, FALSE)
        torch.testing.assert_close(p, q)


def test_step_hooks_fire_in_torchs_order():
    run = own_run(SGD, {"lr": 0.1})
    seen = []

    def note(name):
        return lambda optimizer, args, kwargs: seen.append((name, optimizer is run.optimizer))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    run.optimizer.register_step_pre_hook(note("pre"))
    run.optimizer.register_step_post_hook(note("post"))
    try:
        run.step(gradients(run.params, 0))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [(name, True) for name in ("global pre", "pre", "post", "global post")]


HOOKED = ["instance", "global"]


def with_pre_hook(run, where, hook):
    """Registers a pre-hook; returns its undo."""
    if where == "instance":
        return run.optimizer.register_step_pre_hook(hook).remove
    return register_optimizer_step_pre_hook(hook).remove


def scaled_step(run, seed, found=FALSE, scale=1024.0):
    """A step on gradients that lie in `p.grad` and carry a scale, as a session makes it."""
    for p, grad in zip(run.params, gradients(run.params, seed, scale), strict=True):
        p.grad = grad
    run.step([p.grad for p in run.params], torch.tensor(1 / scale), found)


@pytest.mark.parametrize("where", HOOKED)
@pytest.mark.parametrize("kind", KINDS)
def test_pre_hooks_see_true_full_gradients_and_p_grad_comes_back(where, kind):
    run, plain = own_run(AdamW, {"lr": 0.1}, kind), own_run(AdamW, {"lr": 0.1}, kind)
    seen = []
    undo = with_pre_hook(run, where, lambda *_: seen.extend(p.grad.clone() for p in run.params))
    try:
        scaled_step(run, 0)
        held = [p.grad for p in run.params]
        assert_same_bits(held, gradients(run.params, 0, 1024.0))
    finally:
        undo()
    assert_same_bits(seen, [grad.float() / 1024 for grad in held])
    scaled_step(plain, 0)
    assert_same_bits(run.everything(), plain.everything())


@pytest.mark.parametrize("where", HOOKED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_takes_what_pre_hooks_leave_in_p_grad(where, kind):
    """One gradient assigned in fp32, one in the dtype of the parameter, one halved in place, one dropped."""
    run, plain = own_run(SGD, {"lr": 1.0}, kind), own_run(SGD, {"lr": 1.0}, kind)
    given = [grad.float() for grad in gradients(plain.params, 5)]

    def change(*_):
        a, b, c, d, _ = run.params
        a.grad = torch.full(a.shape, 0.3)
        b.grad = torch.full_like(b, 0.5)
        c.grad.mul_(0.5)
        d.grad = None

    undo = with_pre_hook(run, where, change)
    try:
        scaled_step(run, 5)
    finally:
        undo()
    assert run.params[3].grad is None
    a, b, c, _, e = plain.params
    grads = [torch.full(a.shape, 0.3), torch.full(b.shape, 0.5), given[2] * 0.5, given[4]]
    plain.stepper.step([a, b, c, e], grads, None, FALSE)
    assert_same_bits(run.values(), plain.values())


def test_a_gradient_that_a_pre_hook_adds_counts():
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = SGD([a, b], lr=1.0)

    def add(*_):
        b.grad = torch.tensor([1.0, 2.0])

    optimizer.register_step_pre_hook(add)
    one_pass(optimizer, MasterStore("none", BF16)).step([a], [torch.ones(2)], None, FALSE)
    assert (a.tolist(), b.tolist()) == ([0.0, 0.0], [0.0, -1.0])


@EACH_KIND
def test_post_hooks_see_true_gradients_and_may_drop_them(kind):
    run = own_run(SGD, {"lr": 1.0}, kind)
    seen = []

    def drop(optimizer, args, kwargs):
        seen.extend(p.grad.clone() for p in run.params)
        optimizer.zero_grad()

    run.optimizer.register_step_post_hook(drop)
    scaled_step(run, 0)
    assert_same_bits(seen, [grad.float() / 1024 for grad in gradients(run.params, 0, 1024.0)])
    assert all(p.grad is None for p in run.params)


@EACH_KIND
def test_with_hooks_too_a_skipped_step_changes_nothing_and_nothing_is_read_on_the_host(kind):
    run = own_run(AdamW, {"lr": 0.1}, kind)
    calls = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    scaled_step(run, 0)
    before = run.everything()
    with NoSync():
        scaled_step(run, 1, found=TRUE)
    assert_same_bits(run.everything(), before)
    assert len(calls) == 2


def test_a_pre_hook_that_raises_leaves_the_gradients_as_they_were():
    run = own_run(AdamW, {}, "copy")

    def fail(*_):
        raise KeyError("hook")

    run.optimizer.register_step_pre_hook(fail)
    before = run.everything()
    with pytest.raises(KeyError, match="hook"):
        scaled_step(run, 0)
    assert_same_bits([p.grad for p in run.params], gradients(run.params, 0, 1024.0))
    assert_same_bits(run.everything(), before)


def test_pre_hooks_see_sparse_gradients_unscaled():
    p, _, optimizer, stepper = alone(SGD, torch.zeros(6, 2), "copy", lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(p.grad))
    grad = embedding_gradient([4], [[4.0, 8.0]]).bfloat16()
    stepper.step([p], [grad], torch.tensor(0.25), FALSE)
    assert (seen[0].is_sparse, seen[0].dtype) == (True, torch.float32)
    assert p[4].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("cls", "options", "name"), [(AdamW, {}, "exp_avg_sq"), (SGD, {"momentum": 0.9}, "momentum_buffer")]
)
@EACH_KIND
def test_a_state_of_another_shape_is_refused_before_anything_changes(cls, options, name, kind):
    params = parameters()
    optimizer = cls([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, **options)
    store = MasterStore(kind or "none", BF16)
    for p in params if kind else ():
        store.track(p)
    stepper = one_pass(optimizer, store)
    stepper.step(params, gradients(params, 0), None, FALSE)
    optimizer.state[params[1]][name] = torch.zeros(5)
    before = [p.detach().clone() for p in params], optimizer.state[params[0]][name].clone()
    with pytest.raises(SessionError, match=rf"'{name}' of a parameter of shape \(33,\) has shape \(5,\)"):
        stepper.step(params, gradients(params, 1), None, FALSE)
    assert_same_bits(params, before[0])
    assert_same_bits([optimizer.state[params[0]][name]], [before[1]])


def test_a_parameter_of_no_group_is_refused_before_anything_changes():
    run = own_run(AdamW, {})
    before = run.everything()
    stranger = Parameter(torch.ones(1))
    with pytest.raises(SessionError, match="1 parameters to update are in no group of this AdamW"):
        run.stepper.step([*run.params, stranger], [*gradients(run.params, 0), torch.ones(1)], None, FALSE)
    assert_same_bits(run.everything(), before)


def embedding_gradient(rows, values, size=(6, 2)):
    """A sparse gradient as `nn.Embedding(sparse=True)` makes it: rows may come twice."""
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.tensor(values), size, check_invariants=True)


@EACH_KIND
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}])
def test_sparse_gradients_update_as_dense_ones(kind, options):
    start = torch.randn(6, 2)
    sparse, dense = (alone(SGD, start.clone(), kind, lr=0.5, **options) for _ in range(2))
    for rows in ([4, 1, 4], [0, 1, 1]):
        grad = embedding_gradient(rows, [[1.0, 2.0], [3.0, 4.0], [0.5, 0.25]])
        for (p, _, _, stepper), one in ((sparse, grad), (dense, grad.to_dense())):
            stepper.step([p], [one.to(p.dtype)], torch.tensor(0.5), FALSE)
    assert_same_bits([sparse[1].full(sparse[0])], [dense[1].full(dense[0])])
    assert_same_bits([sparse[0]], [dense[0]])


@EACH_KIND
def test_a_skip_leaves_a_table_as_it_was(kind):
    p, store, _, stepper = alone(SGD, torch.full((6, 2), -0.0), kind, lr=0.5)
    before = [p.clone(), store.full(p).clone()]
    stepper.step([p], [embedding_gradient([1, 1, 2], [[float("nan"), 1.0]] * 3)], None, TRUE)
    assert_same_bits([p, store.full(p)], before)


def test_a_sparse_gradient_of_no_rows_is_no_trouble():
    p, _, _, stepper = alone(SGD, torch.ones(6, 2), lr=0.5)
    stepper.step([p], [embedding_gradient([4], [[1.0, 1.0]]) * 0], None, FALSE)
    none = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2)
    stepper.step([p], [torch.sparse_coo_tensor(*none, (6, 2), check_invariants=True)], None, FALSE)
    assert torch.equal(p, torch.ones(6, 2))


def test_a_sparse_gradient_of_adam_is_refused_by_name():
    p, _, _, stepper = alone(AdamW, torch.ones(6, 2))
    stepper._name_of = lambda p: "embed.weight"
    with pytest.raises(SessionError, match=r"'embed.weight' is sparse, and AdamW takes no sparse gradients; use Spa"):
        stepper.step([p], [embedding_gradient([0], [[1.0, 1.0]])], None, FALSE)
    assert torch.equal(p, torch.ones(6, 2))


@pytest.mark.gpu
@EACH_KIND
@pytest.mark.parametrize(("cls", "options"), OWN)
def test_a_gpu_gives_what_the_cpu_gives(cls, options, kind):
    here, there = own_run(cls, options, kind), own_run(cls, options, kind)
    for p in there.params:
        p.data = p.data.cuda()
    for seed in range(4):
        grads = gradients(here.params, seed)
        here.step(grads, torch.tensor(0.5), torch.tensor(seed == 1))
        moved = [grad.cuda() for grad in grads], torch.tensor(0.5).cuda(), torch.tensor(seed == 1).cuda()
        if seed == 0:  # moves the states of parameters that moved
            there.step(*moved)
            continue
        with no_cuda_sync():
            there.step(*moved)
    for one, other in zip(here.values(), there.values(), strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-5)
