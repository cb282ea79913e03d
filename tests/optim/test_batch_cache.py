"""Batches that are kept from step to step: everything that can change between two steps is noticed."""

import copy
import gc
import weakref

import pytest
import torch
from torch.optim import SGD, AdamW

from halfstep.errors import SessionError
from halfstep.torch_internals import StorageWeakRef
from halfstep.train.optim.masters import MasterStore
from tests.optim.cases import FALSE, assert_same_bits, gradients, one_pass, own_run

LR = {"lr": 1e-2}


def twins(cls=AdamW, options=LR, kind="split"):
    return [own_run(cls, options, kind, torch.bfloat16) for _ in range(2)]


def fresh(run):
    """Has the next step sort everything anew."""
    run.stepper._seen = None


def go(runs, seeds, change=lambda run: None):
    """Steps two runs alike; the second sorts anew each time. `change` is made to both before the last step."""
    for seed in seeds:
        for run in runs:
            if seed == seeds[-1]:
                change(run)
            if run is runs[1]:
                fresh(run)
            run.step(gradients(run.params, seed))
    assert_same_bits(runs[0].everything(), runs[1].everything())


def moved(run):
    for p in run.params:
        p.data = p.data.clone()


def reloaded(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def one_state_replaced(run):
    state = run.optimizer.state[run.params[0]]
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def state_with_other_memory(run):
    state = run.optimizer.state[run.params[1]]
    state["exp_avg_sq"].data = torch.full_like(state["exp_avg_sq"], 0.5)


def state_in_another_dtype(run):
    state = run.optimizer.state[run.params[0]]
    state["exp_avg"].data = state["exp_avg"].data.bfloat16()


def state_in_another_order(run):
    state = run.optimizer.state[run.params[0]]
    state["exp_avg"].data = state["exp_avg"].data.t().contiguous().t()


def weight_in_another_order(run):
    p = run.params[0]
    p.data = p.data.t().contiguous().t()


def weight_turned_in_its_memory(run):
    kernel = run.params[3]
    kernel.data = kernel.data.transpose(2, 3)


def state_turned_in_its_memory(run):
    state = run.optimizer.state[run.params[3]]
    state["exp_avg"].data = state["exp_avg"].data.transpose(2, 3)


def state_dropped(run):
    del run.optimizer.state[run.params[2]]


def other_options(run):
    run.optimizer.param_groups[0].update(lr=0.3, weight_decay=0.2, betas=(0.5, 0.6), maximize=True)


def group_added(run):
    p = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(9)))
    run.store.track(p)
    run.optimizer.add_param_group({"params": [p], "lr": 0.5})
    run.params.append(p)


def one_param_fewer(run):
    run.params = run.params[1:]


def other_order(run):
    run.params = run.params[::-1]


CHANGES = [
    moved,
    reloaded,
    one_state_replaced,
    state_with_other_memory,
    state_in_another_dtype,
    state_in_another_order,
    weight_in_another_order,
    weight_turned_in_its_memory,
    state_turned_in_its_memory,
    state_dropped,
    other_options,
    group_added,
    one_param_fewer,
    other_order,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_is_noticed(change):
    go(twins(), range(4), change)


@pytest.mark.parametrize("memory", [torch.eye(3), torch.eye(3).t().contiguous().t()], ids=["rows", "columns"])
def test_a_square_weight_that_is_turned_in_its_memory_gets_its_own_gradient(memory):
    weight = torch.nn.Parameter(memory.clone(memory_format=torch.preserve_format))
    stepper = one_pass(SGD([weight], lr=1.0), MasterStore("none", torch.bfloat16))
    grad = torch.arange(9.0).view(3, 3)
    stepper.step([weight], [grad], None, FALSE)
    weight.data = weight.data.t()
    before = weight.detach().clone()
    stepper.step([weight], [grad], None, FALSE)
    assert torch.equal(weight, before - grad)


def test_amsgrad_and_momentum_can_be_switched_on_later():
    go(twins(), range(4), lambda run: run.optimizer.param_groups[0].update(amsgrad=True))
    go(twins(SGD), range(4), lambda run: run.optimizer.param_groups[0].update(momentum=0.9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_another_dtype_or_memory_layout_are_noticed(dtype):
    runs = twins()
    for seed in range(4):
        for run in runs:
            grads = gradients(run.params, seed)
            if seed % 2:
                grads = [g.to(dtype).t() if g.dim() == 2 else g.to(dtype) for g in grads]
                grads = [g.contiguous().t() if g.dim() == 2 else g for g in grads]
            if run is runs[1]:
                fresh(run)
            run.step(grads)
    assert_same_bits(runs[0].everything(), runs[1].everything())


def test_nothing_is_sorted_anew_where_nothing_changed():
    run = own_run(AdamW, LR, "split", torch.bfloat16)
    run.step(gradients(run.params, 0))
    kept = run.stepper._sorted
    for seed in range(3):
        run.optimizer.param_groups[0]["lr"] = 0.1 / (seed + 1)
        run.step(gradients(run.params, seed))
    assert run.stepper._sorted is kept


def test_parameters_without_elements_do_not_have_the_others_sorted_anew():
    params = [torch.nn.Parameter(torch.ones(n)) for n in (0, 3, 0)]
    stepper = one_pass(AdamW(params, **LR), MasterStore("none", torch.bfloat16))
    kept = []
    for _ in range(3):
        stepper.step(params, [torch.ones_like(p) for p in params], None, FALSE)
        kept.append(stepper._sorted)
    assert kept[1] is kept[2] is kept[0]
    with pytest.raises(SessionError, match="shape"):
        stepper.step(params, [torch.ones(n) for n in (0, 3, 1)], None, FALSE)


def test_gradients_do_not_outlive_the_step():
    run = own_run(AdamW, LR, "split", torch.bfloat16)
    for seed in range(2):
        grads = gradients(run.params, seed)
        seen = [weakref.ref(g) for g in grads]
        run.step(grads)
        del grads
        gc.collect()
        assert all(ref() is None for ref in seen)


class Elsewhere(torch.Tensor):
    """A gradient whose numbers do not lie in its own memory, as those of a DTensor."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda grad: torch.zeros(34, dtype=grad.dtype), r"has shape \(34,\).*\(33,\)"),
        (Elsewhere, "is of type Elsewhere"),
    ],
)
def test_a_gradient_of_another_shape_or_from_elsewhere_is_named(spoil, said):
    run = own_run(AdamW, LR, "split", torch.bfloat16)
    run.stepper._name_of = lambda p: "encoder.weight"
    run.step(gradients(run.params, 0))
    before = run.everything()
    grads = gradients(run.params, 1)
    grads[1] = spoil(grads[1])
    with pytest.raises(SessionError, match="'encoder.weight' " + said):
        run.step(grads)
    assert_same_bits(run.everything(), before)


def test_a_parameter_that_changes_its_group_is_noticed():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    optimizer = SGD([{"params": params[:2], "lr": 0.0}, {"params": params[2:], "lr": 1.0}])
    stepper = one_pass(optimizer, MasterStore("none", torch.bfloat16))
    grads = [torch.ones(2), torch.ones(2)]
    stepper.step(params[1:3], grads, None, FALSE)
    optimizer.param_groups[0]["params"], optimizer.param_groups[1]["params"] = [params[0], params[3]], params[1:3]
    stepper.step(params[1:3], grads, None, FALSE)
    assert params[1].tolist() == [-1.0, -1.0]


def test_a_parameter_that_was_cut_is_named():
    run = own_run(AdamW, LR, "split", torch.bfloat16)
    run.step(gradients(run.params, 0))
    grads = gradients(run.params, 1)
    run.params[0].data = run.params[0].data[:4]
    with pytest.raises(SessionError, match=r"shape \(7, 19\).*\(4, 19\)"):
        run.step(grads)


def test_a_closed_stepper_lets_go_of_its_weights():
    run = own_run(AdamW, LR, "split", torch.bfloat16)
    run.step(gradients(run.params, 0))
    run.stepper.close()
    assert run.stepper._sorted == []


def test_memory_that_state_has_left_is_not_given_to_others_before_that_is_noticed():
    run = own_run(AdamW, LR, "split", torch.bfloat16)
    run.params = run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.randn(50, 50))]
    run.store.track(run.params[0])
    run.step([torch.ones(50, 50)])
    mean = run.optimizer.state[run.params[0]]["exp_avg"]
    memory = StorageWeakRef(mean.untyped_storage())
    mean.data = mean.data.bfloat16()
    assert not memory.expired()
    run.step([torch.ones(50, 50)])
    assert memory.expired()
