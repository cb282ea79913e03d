"""apex's fp16_utils: networks cast by hand, masters by hand, loss scalers, and FP16_Optimizer in fp16 and bf16."""

import copy

import pytest
import torch
from torch import nn

import halfstep
from halfstep.adapters.apex import fp16_utils as apex
from halfstep.errors import PlanError, SetupError, StateError
from halfstep.optim.split import round_half_away

LOW = [torch.float16, torch.bfloat16]
each_low = pytest.mark.parametrize("low", LOW, ids=["fp16", "bf16"])


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2)
    )


def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=g), torch.randn(16, 2, generator=g)


@each_low
def test_networks_are_cast_but_for_affine_batch_norms(low):
    for cast in (apex.network_to_half(network(), dtype=low), apex.FP16Model(network(), dtype=low)):
        inner = cast[1] if isinstance(cast, nn.Sequential) else cast.network
        assert [p.dtype for p in inner.parameters()] == [low, low, torch.float32, torch.float32, low, low]
        assert inner[1].running_mean.dtype is torch.float32
        assert inner[3].running_mean.dtype is low
        cast.eval()
        assert cast(batch(0)[0]).dtype is low


def test_the_default_is_fp16_and_modules_alone_are_cast_alone():
    assert apex.network_to_half(nn.Linear(1, 1))[1].weight.dtype is torch.float16
    assert apex.tofp16()(torch.ones(1)).dtype is torch.float16
    model = nn.Sequential(nn.Linear(1, 1))
    apex.convert_module(model, torch.float16)
    assert model[0].weight.dtype is torch.float32
    assert apex.BN_convert_float(network().half())[1].weight.dtype is torch.float32


@each_low
def test_an_fp16_model_leaves_what_is_not_floating_and_takes_keywords(low):
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, ids, scale, *, shift):
            return self.table(ids) * scale + shift

    model = apex.FP16Model(Embeds(), dtype=low)
    assert model(torch.tensor([1, 2]), torch.ones(3), shift=torch.zeros(3)).dtype is low


@each_low
def test_recurrent_layers_are_cast(low):
    model = apex.convert_network(nn.LSTM(3, 4), dtype=low)
    assert {p.dtype for p in model.parameters()} == {low}


@each_low
@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand_train_as_written_out(low, flat):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(low)
    params, masters = apex.prep_param_lists(model, flat_master=flat)
    assert all(master.dtype is torch.float32 for master in masters)
    values = [p.detach().float() for p in params]
    optimizer = torch.optim.SGD(masters, lr=0.125)
    for step in range(2):
        model.zero_grad()
        model(batch(step)[0][:, :3].to(low)).float().sum().backward()
        apex.model_grads_to_master_grads(params, masters, flat_master=flat)
        values = [value - 0.125 * p.grad.float() for value, p in zip(values, params, strict=True)]
        optimizer.step()
        apex.master_params_to_model_params(params, masters, flat_master=flat)
        for p, value in zip(params, values, strict=True):
            assert torch.equal(p.detach(), value.to(low))


def test_gradients_that_are_missing_stay_missing_or_are_zero_in_a_flat_master():
    model = nn.Linear(2, 1).half()
    params, masters = apex.prep_param_lists(model)
    apex.model_grads_to_master_grads(params, masters)
    assert [master.grad for master in masters] == [None, None]
    params, (flat,) = apex.prep_param_lists(model, flat_master=True)
    params[0].grad = torch.ones_like(params[0])
    apex.model_grads_to_master_grads(params, [flat], flat_master=True)
    assert flat.grad.tolist() == [1.0, 1.0, 0.0]


def test_to_python_float():
    assert [apex.to_python_float(v) for v in (torch.tensor(2.5), torch.tensor([3.5]), [4.5], 5.5)] == [
        2.5,
        3.5,
        4.5,
        5.5,
    ]


def test_a_dynamic_scaler_halves_doubles_and_stops_at_one_and_at_its_ceiling():
    scaler = apex.DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=2)
    seen = []
    for overflow in (True, True, True, False, False, False, True, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0]
    high = apex.DynamicLossScaler(init_scale=2.0**24, scale_window=1)
    high.update_scale(False)
    assert high.cur_scale == 2.0**24


@pytest.mark.parametrize("make", [lambda: apex.LossScaler(8.0), lambda: apex.DynamicLossScaler(8.0)])
@each_low
def test_scalers_scale_losses_and_see_overflows(make, low):
    scaler = make()
    p = nn.Parameter(torch.ones(2, dtype=low))
    scaler.backward((p * 2).sum())
    assert p.grad.tolist() == [16.0, 16.0]
    assert scaler.has_overflow([p]) is False
    p.grad[1] = float("inf")
    assert scaler.has_overflow([p]) is True
    (scaled,) = scaler.scale_gradient(None, (torch.ones(1),), None)
    assert scaled.item() == 8.0
    scaler.update_scale(True)
    assert scaler.loss_scale == (4.0 if isinstance(scaler, apex.DynamicLossScaler) else 8.0)


def fp16_loop(low, **options):
    model = apex.network_to_half(network(), dtype=low)
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return model, apex.FP16_Optimizer(inner, verbose=False, **options)


def loss_of(model, step):
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs).float(), targets)


def run(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()


def by_hand(low, steps, scale):
    """The same loop with masters of its own: gradients of the low network in fp32, over the scale."""
    model = apex.network_to_half(network(), dtype=low)
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.SGD(masters, lr=0.125, momentum=0.5)
    for step in steps:
        model.zero_grad()
        (loss_of(model, step) * scale).backward()
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters, strict=True):
                p.copy_(round_half_away(master.detach(), low) if p.dtype is low else master)
    return masters


@each_low
@pytest.mark.parametrize(
    "options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 128.0}}]
)
def test_an_fp16_optimizer_trains_masters_as_a_loop_by_hand(low, options):
    model, optimizer = fp16_loop(low, **options)
    dtypes = [p.dtype for p in model.parameters()]
    run(model, optimizer, range(4))
    assert [p.dtype for p in model.parameters()] == dtypes
    held = list(optimizer.state_dict()["fp32_from_fp16"].values())
    params = [p for p in model.parameters() if p.dtype is low] + [p for p in model.parameters() if p.dtype is not low]
    masters = dict(zip(map(id, params), held, strict=True))
    for p, expected in zip(model.parameters(), by_hand(low, range(4), 128.0), strict=True):
        torch.testing.assert_close(masters[id(p)], expected.detach(), rtol=1e-5, atol=1e-6)
    assert optimizer.loss_scale == 128.0
    optimizer.close()
    assert [p.dtype for p in model.parameters()] == dtypes


@each_low
@pytest.mark.parametrize("dynamic", [True, False])
def test_an_overflow_is_skipped_at_a_static_scale_too_and_printed(low, dynamic, capsys):
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 8.0}} if dynamic else {}
    model, optimizer = fp16_loop(low, **options)
    optimizer.verbose = True
    run(model, optimizer, [0])
    assert not optimizer.overflow
    before = copy.deepcopy(optimizer.state_dict()["fp32_from_fp16"])
    optimizer.zero_grad(set_grads_to_None=True)
    optimizer.backward(loss_of(model, 1) * float("inf"))
    assert not torch.isfinite(optimizer.clip_master_grads(1.0))
    optimizer.step()
    assert optimizer.overflow
    after = optimizer.state_dict()["fp32_from_fp16"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    scales = ("8.0", "4.0") if dynamic else ("1.0", "1.0")
    said = "OVERFLOW! Skipping step. Attempted loss scale: {}, reducing to {}\n".format(*scales)
    assert capsys.readouterr().out == said


@each_low
def test_gradients_are_true_ones_and_add_up(low):
    model, optimizer = fp16_loop(low, static_loss_scale=64.0)
    other, other_optimizer = fp16_loop(low, static_loss_scale=64.0)
    optimizer.backward(loss_of(model, 0), update_master_grads=False)
    assert model[1][0].weight.grad.dtype is low  # still as autograd left it, times the scale
    optimizer.backward(loss_of(model, 1), update_master_grads=False)
    optimizer.update_master_grads()
    for step in (0, 1):
        other_optimizer.backward(loss_of(other, step))
    (ours,), (theirs,) = optimizer.inspect_master_grad_data(), other_optimizer.inspect_master_grad_data()
    for one, two in zip(ours, theirs, strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    norm = float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in ours])))
    torch.testing.assert_close(float(optimizer.clip_master_grads(norm / 2)), norm)
    clipped = torch.cat([g.reshape(-1) for g in optimizer.inspect_master_grad_data()[0]])
    torch.testing.assert_close(float(torch.linalg.vector_norm(clipped)), norm / 2, rtol=1e-4, atol=0)


@each_low
def test_resume_is_exact(low):
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}}
    whole, first, again = fp16_loop(low, **options), fp16_loop(low, **options), fp16_loop(low, **options)
    run(*whole, range(6))
    run(*first, range(3))
    again[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    again[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    run(*again, range(3, 6))
    one, other = (each[1].state_dict()["fp32_from_fp16"] for each in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole[1].loss_scale == again[1].loss_scale == 512.0


@each_low
def test_a_closure_is_called_once_and_its_loss_returned(low):
    model, optimizer = fp16_loop(low)
    other = fp16_loop(low)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss)
        return loss.detach()

    returned = optimizer.step(closure)
    run(*other, [0])
    assert torch.equal(returned, loss_of(fp16_loop(low)[0], 0).detach())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other[0].parameters(), strict=True))


def test_a_full_network_has_no_masters_and_trains():
    model = nn.Linear(6, 2)
    optimizer = apex.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=4.0, verbose=False)
    before = model.weight.detach().clone()
    run(model, optimizer, [0])
    assert not torch.equal(before, model.weight)
    assert optimizer.param_groups is optimizer.optimizer.param_groups


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"static_loss_scale": -1.0}, PlanError, "scale init is -1; expected a number from"),
        ({"dynamic_loss_args": {"init_scale": 1.0}}, SetupError, "pass dynamic_loss_scale=True"),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": {"window": 2}},
            SetupError,
            "dynamic_loss_args got 'window'; pass only init_scale, scale_factor, scale_window",
        ),
    ],
)
def test_bad_scales_get_words_and_leave_the_network(options, error, said):
    model = nn.Linear(2, 1).half()
    with pytest.raises(error, match=said):
        apex.FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert model.weight.dtype is torch.float16


def test_what_does_not_fit_gets_words():
    with pytest.raises(SetupError, match="FP16_Optimizer got list; pass a torch optimizer"):
        apex.FP16_Optimizer([])
    params = [nn.Parameter(torch.ones(1, dtype=low)) for low in LOW]
    with pytest.raises(SetupError, match=r"are of torch.bfloat16 and torch.float16; cast the network to one"):
        apex.FP16_Optimizer(torch.optim.SGD(params, lr=0.1))
    _, optimizer = fp16_loop(torch.float16)
    with pytest.raises(StateError, match="lacks 'fp32_from_fp16', 'session'; pass a result of"):
        optimizer.load_state_dict({"optimizer_state_dict": {}})
    model = nn.Sequential(nn.Linear(2, 1).half(), nn.BatchNorm1d(1))
    with pytest.raises(SetupError, match=r"flat_master=True expects .* got 2 combinations of dtype and device"):
        apex.prep_param_lists(model, flat_master=True)
    with pytest.raises(SetupError, match=r"the masters do not have .* \(4 parameters, 1 masters\)"):
        apex.model_grads_to_master_grads(list(model.parameters()), [nn.Parameter(torch.ones(1))])
    with pytest.raises(halfstep.PlanError, match="scale init is 0; expected a number"):
        apex.LossScaler(0.0)


@each_low
def test_zero_grad_zeroes_or_drops_as_it_is_asked(low):
    model, optimizer = fp16_loop(low)
    optimizer.backward(model(batch(0)[0]).float().sum())
    assert any(p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert not any(p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_grads_to_None=True)
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
