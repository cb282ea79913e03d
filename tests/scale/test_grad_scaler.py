"""halfstep.GradScaler against torch.amp.GradScaler: the same where torch is right, and each fault gone."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.errors import PlanError, StateError
from halfstep.train.scale.grad_scaler import GradScaler
from tests.scale.sync import NoSync, no_cuda_sync

Torch = torch.amp.GradScaler


def weight(*numbers):
    return nn.Parameter(torch.tensor(numbers or (1.0, 2.0)))


def iterate(scaler, optimizer, gradient):
    """One iteration whose true gradients are all `gradient`."""
    optimizer.zero_grad()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(sum((p * gradient).sum() for p in params)).backward()
    scaler.step(optimizer)
    scaler.update()


def run(scaler, outcomes, gradient=1.0):
    """Feeds "x" for an overflow and "." for a clean step; returns the scale after each."""
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    seen = []
    for outcome in outcomes:
        iterate(scaler, optimizer, math.inf if outcome == "x" else gradient)
        seen.append(scaler.get_scale())
    return seen


# Arguments, steps, and the scale after each.
SEQUENCES = {
    "the floor is one": ({"init_scale": 4.0}, "xxxx", [2, 1, 1, 1]),
    "the ceiling is 2**24": ({"init_scale": 2.0**23, "growth_interval": 1}, "..", [2.0**24] * 2),
    "own range": (
        {"init_scale": 8.0, "growth_interval": 1, "min_scale": 4.0, "max_scale": 16.0}, "xx...", [4, 4, 8, 16, 16]
    ),
    "the floor is a lower initial scale": ({"init_scale": 0.5}, "x", [0.5]),
    "the ceiling is a higher initial scale": (
        {"init_scale": 2.0**30, "growth_interval": 1}, ".x", [2.0**30, 2.0**29]
    ),
    "hysteresis": (
        {"init_scale": 16.0, "hysteresis": 2, "growth_interval": 2}, "xx..xx", [16, 8, 8, 16, 16, 8]
    ),
}  # fmt: skip


class TestScale:
    @pytest.mark.parametrize(("arguments", "outcomes", "scales"), SEQUENCES.values(), ids=SEQUENCES)
    def test_follows_the_overflows(self, arguments, outcomes, scales):
        assert run(GradScaler("cpu", **arguments), outcomes) == scales

    @pytest.mark.parametrize(
        "arguments",
        [
            {"min_scale": 2.0, "init_scale": 1.0},
            {"max_scale": 8.0, "init_scale": 16.0},
            {"min_scale": 0.0},
            {"min_scale": -1.0},
            {"max_scale": math.inf},
            {"init_scale": math.nan},
            {"hysteresis": 0},
            {"hysteresis": 1.5},
            {"hysteresis": True},
            {"init_scale": "65536"},
            {"min_scale": "1"},
            {"growth_interval": "2000"},
            {"device": 65536.0},
            {"device": "gpu"},
        ],
    )
    def test_nonsense_is_refused(self, arguments):
        with pytest.raises(PlanError, match=next(iter(arguments))):
            GradScaler(**{"device": "cpu", **arguments})

    def test_a_device_may_be_a_torch_device(self):
        assert GradScaler(torch.device("cpu")).is_enabled()

    def test_ends_of_the_range_are_allowed(self):
        GradScaler("cpu", init_scale=4.0, min_scale=4.0, max_scale=4.0)

    def test_update_takes_an_int(self):
        scaler = GradScaler("cpu")
        scaler.scale(torch.tensor(1.0))
        scaler.update(4)
        assert scaler.get_scale() == 4

    def test_update_takes_a_tensor_and_a_number_outside_the_range(self):
        scaler = GradScaler("cpu")
        scaler.scale(torch.tensor(1.0))
        scaler.update(torch.tensor(0.25))
        assert scaler.get_scale() == 0.25
        assert run(scaler, ".") == [1.0]

    def test_a_lowered_interval_grows_at_the_next_clean_step(self):
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=10)
        run(scaler, "....")
        scaler.set_growth_interval(2)
        assert run(scaler, "..") == [8, 8]


@settings(max_examples=60)
@given(
    st.sampled_from([2.0, 1.1, 3.7]),
    st.sampled_from([0.5, 0.9]),
    st.integers(1, 4),
    st.text("x..", max_size=12),
)
def test_within_the_range_the_scale_is_torchs(growth, backoff, interval, outcomes):
    arguments = {"init_scale": 1000.0, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    ours, torchs = GradScaler("cpu", min_scale=2.0**-100, max_scale=2.0**100, **arguments), Torch("cpu", **arguments)
    assert run(ours, outcomes) == run(torchs, outcomes)
    assert {key: ours.state_dict()[key] for key in torchs.state_dict()} == torchs.state_dict()


class TestStep:
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
            lambda p: torch.optim.AdamW(p, lr=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
            lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
        ],
    )
    def test_weights_are_torchs_after_clean_and_skipped_steps(self, make):
        weights = [weight(), weight()]
        for p, scaler in zip(weights, (GradScaler("cpu"), Torch("cpu")), strict=True):
            optimizer = make([p])
            for gradient in (0.5, math.inf, -0.25, 0.125):
                iterate(scaler, optimizer, gradient)
        assert torch.equal(*weights)

    @pytest.mark.parametrize("arguments", [{}, {"nesterov": True}, {"maximize": True}])
    @pytest.mark.parametrize("bad", [1, 3])
    def test_fused_sgd_whose_first_steps_overflow_goes_on_as_if_they_had_not_been(self, arguments, bad):
        skipped, plain = weight(), weight()
        fused = torch.optim.SGD([skipped], lr=0.1, momentum=0.9, weight_decay=0.01, fused=True, **arguments)
        wanted = torch.optim.SGD([plain], lr=0.1, momentum=0.9, weight_decay=0.01, fused=True, **arguments)
        scaler, clean = GradScaler("cpu", init_scale=64.0), Torch("cpu", init_scale=64.0)
        for _ in range(bad):
            iterate(scaler, fused, math.inf)
        for gradient in (0.5, -0.25, 0.125):
            iterate(scaler, fused, gradient)
            iterate(clean, wanted, gradient)
        assert torch.equal(skipped, plain)

    def test_fused_sgd_momentum_after_a_skipped_first_step_is_zero_and_nothing_synced(self):
        param = weight()
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
        with NoSync():
            iterate(GradScaler("cpu"), optimizer, math.inf)
        assert optimizer.state[param]["momentum_buffer"].tolist() == [0.0, 0.0]

    def test_fused_sgd_takes_a_parameter_that_gets_its_first_gradient_later(self):
        params = [weight(), weight()]
        optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True)
        scaler = GradScaler("cpu", init_scale=4.0)
        for used in (params[:1], params):
            optimizer.zero_grad()
            scaler.scale(sum(p.sum() for p in used)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert params[1].tolist() == [0.5, 1.5]

    @pytest.mark.parametrize("fused", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
    def test_fused_optimizers_never_sync(self, fused):
        if fused is torch.optim.Adagrad and torch.__version__ < "2.12":
            pytest.skip("fused Adagrad reads found_inf on the host in this torch")
        optimizer = fused([weight()], lr=0.1, fused=True)
        scaler = GradScaler("cpu", hysteresis=2)
        with NoSync():
            for gradient in (1.0, math.inf, 1.0):
                iterate(scaler, optimizer, gradient)

    def test_unscale_first_and_no_sync_with_a_fused_optimizer(self):
        param = weight()
        optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.5, fused=True)
        scaler = GradScaler("cpu", init_scale=8.0)
        with NoSync():
            scaler.scale(param.sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert param.grad.tolist() == [1.0, 1.0]
        assert param.tolist() == [0.0, 1.0]

    @pytest.mark.parametrize("pass_it", [lambda f: ((f,), {}), lambda f: ((), {"closure": f})])
    @pytest.mark.parametrize("fused", [True, False])
    def test_a_closure_is_refused_before_anything_changes(self, pass_it, fused):
        param = weight()
        optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.5, fused=fused)
        scaler = GradScaler("cpu")
        scaler.scale(param.sum()).backward()
        args, kwargs = pass_it(lambda: 0.0)
        with pytest.raises(RuntimeError, match="losure"):
            scaler.step(optimizer, *args, **kwargs)
        assert param.tolist() == [1.0, 2.0]
        assert not optimizer.state

    @pytest.mark.parametrize(("args", "kwargs"), [((None,), {}), ((), {"closure": None})])
    def test_none_is_no_closure(self, args, kwargs):
        param = weight()
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = GradScaler("cpu")
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer, *args, **kwargs)
        assert param.tolist() == [0.0, 1.0]

    def test_two_optimizers_share_the_scale_and_skip_alone(self):
        params = [weight(1.0), weight(1.0)]
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in params]
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale((params[0] * math.inf).sum() + params[1].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [p.item() for p in params] == [1.0, 0.0]
        assert scaler.get_scale() == 4

    @pytest.mark.parametrize("scaler", [GradScaler, Torch])
    def test_errors_of_torch_stay(self, scaler):
        scaler, optimizer = scaler("cpu"), torch.optim.SGD([weight()], lr=0.1)
        with pytest.raises(AssertionError):
            scaler.update()
        iterate(scaler, optimizer, 1.0)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)

    def test_disabled_is_plain_training(self):
        param = weight()
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = GradScaler("cpu", enabled=False)
        iterate(scaler, optimizer, 1.0)
        assert param.tolist() == [0.0, 1.0]
        assert scaler.state_dict() == {}
        scaler.load_state_dict({})
        assert scaler.get_scale() == 1


class TestState:
    def test_is_torchs_five_entries_by_default(self):
        ours, torchs = GradScaler("cpu"), Torch("cpu")
        run(ours, "x..")
        run(torchs, "x..")
        assert ours.state_dict() == torchs.state_dict()

    def test_torch_loads_ours(self):
        ours = GradScaler("cpu", init_scale=64.0, growth_interval=3, min_scale=2.0, hysteresis=2)
        run(ours, "x.x.")
        torchs = Torch("cpu")
        torchs.load_state_dict(ours.state_dict())
        assert torchs.state_dict() == {key: ours.state_dict()[key] for key in torchs.state_dict()}
        assert run(torchs, "..") == [32, 64]

    @pytest.mark.parametrize("used", [True, False])
    def test_ours_loads_torchs_and_goes_on_as_torch(self, used):
        torchs = Torch("cpu", init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
        run(torchs, "x..")
        ours = GradScaler("cpu")
        if used:
            run(ours, ".")
        ours.load_state_dict(torchs.state_dict())
        assert ours.state_dict() == torchs.state_dict()
        assert run(ours, ".x") == run(torchs, ".x") == [64, 16]

    def test_a_scale_of_torch_below_the_floor_is_loaded_and_lifted_by_the_next_update(self):
        ours = GradScaler("cpu")
        ours.load_state_dict({**Torch("cpu").state_dict(), "scale": 0.125})
        assert ours.get_scale() == 0.125
        assert run(ours, ".") == [1]

    @pytest.mark.parametrize("used", [True, False])
    def test_every_own_entry_comes_back(self, used):
        old = GradScaler("cpu", init_scale=64.0, min_scale=2.0, max_scale=128.0, hysteresis=3, growth_interval=4)
        run(old, ".x.")
        new = GradScaler("cpu")
        if used:
            run(new, "x")
        new.load_state_dict(old.state_dict())
        assert new.state_dict() == old.state_dict()
        assert run(new, "xx....") == run(old, "xx....")

    def test_pickle_and_deepcopy(self):
        old = GradScaler("cpu", init_scale=64.0, hysteresis=3)
        run(old, "xx")
        for new in (pickle.loads(pickle.dumps(old)), copy.deepcopy(old)):
            assert new.state_dict() == old.state_dict()
            assert run(new, "x") == [32]

    def test_the_state_that_is_loaded_stays_as_it_is(self):
        state = GradScaler("cpu", hysteresis=2).state_dict()
        before = dict(state)
        GradScaler("cpu").load_state_dict(state)
        assert state == before

    @pytest.mark.parametrize("missing", ["scale", "_growth_tracker"])
    def test_a_missing_entry_is_named_and_nothing_changes(self, missing):
        scaler = GradScaler("cpu")
        before = scaler.state_dict()
        state = {key: value for key, value in Torch("cpu", init_scale=2.0).state_dict().items() if key != missing}
        with pytest.raises(StateError, match=f"has no '{missing}'; pass what"):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (None, "is None of type NoneType; expected a dict: pass what"),
            ("scaler.pt", "is 'scaler.pt' of type str; expected a dict: pass what"),
            ({"scale": "8"}, "has scale '8'; expected a number, 0 or more"),
            ({"scale": -1.0}, "has scale -1.0; expected a number, 0 or more"),
            ({"scale": math.nan}, "has scale nan; expected a number, 0 or more"),
        ],
    )
    def test_what_is_no_state_is_refused_and_nothing_changes(self, wrong, message):
        scaler = GradScaler("cpu")
        before = scaler.state_dict()
        with pytest.raises(StateError, match=message):
            scaler.load_state_dict({**before, **wrong} if isinstance(wrong, dict) else wrong)
        assert scaler.state_dict() == before

    def test_an_empty_state_is_refused_as_by_torch(self):
        with pytest.raises(RuntimeError, match="empty"):
            GradScaler("cpu").load_state_dict({})


def test_is_a_torch_grad_scaler_with_its_arguments_in_order():
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert isinstance(scaler, Torch)
    assert scaler.state_dict() == Torch("cpu", 8.0, 3.0, 0.25, 7, True).state_dict()


def test_multiple_outputs_are_scaled_together():
    first, (second,) = GradScaler("cpu", init_scale=4.0).scale([torch.tensor(1.0), (torch.tensor(2.0),)])
    assert (first.item(), second.item()) == (4.0, 8.0)


@pytest.mark.gpu
def test_on_cuda_a_fused_step_waits_for_nothing():
    param = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True)
    scaler = GradScaler("cuda")
    iterate(scaler, optimizer, math.inf)
    with no_cuda_sync():
        iterate(scaler, optimizer, math.inf)
        iterate(scaler, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**14
    assert param.tolist() == pytest.approx([0.9] * 4)
