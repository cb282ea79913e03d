"""Peak memory, counted."""

import gc

import pytest
import torch
from torch import nn

from halfstep.bench.memory import AllocatorBytes, LiveBytes, counting, peak_method


def test_views_and_in_place_ops_cost_nothing():
    with LiveBytes() as count:
        x = torch.zeros(10, 10)
        y = x.t().reshape(10, 10).t()
        x.add_(1)
        x[0].mul_(2)
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert (count.live, count.peak) == (400, 400)


def test_what_is_freed_is_no_longer_live_but_was_part_of_the_peak():
    with LiveBytes() as count:
        x = torch.zeros(100)
        y = x + 1
        del x
        z = y + 1
        del y
    assert count.live == z.nbytes == 400
    assert count.peak == 800


def test_restart_forgets_an_earlier_peak():
    with LiveBytes() as count:
        kept = torch.zeros(10)
        torch.zeros(1000)
        assert count.peak == 4040
        count.restart()
        assert count.peak == kept.nbytes
        torch.zeros(20)
    assert count.peak == 120


def test_tensors_from_before_do_not_count_and_low_ones_count_their_own_width():
    before = torch.zeros(1000)
    with LiveBytes() as count:
        low = before.to(torch.bfloat16)
    assert count.live == low.nbytes == 2000


def test_a_training_step_holds_weights_activations_and_gradients():
    with LiveBytes() as count:
        w = nn.Parameter(torch.zeros(10, 10))  # 400
        x = torch.zeros(5, 10)  # 200
        (
            x @ w
        ).sum().backward()  # the product, 200, is freed after the sum; the loss and its gradient, 4 each; w's, 400
        gc.collect()
    assert w.grad is not None
    assert count.live == 400 + 200 + 400
    assert count.peak == 400 + 200 + 4 + 4 + 400


def test_it_agrees_with_torchs_profiler():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    with LiveBytes() as count:
        step()
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    freed = sum(
        p.nbytes for p in model.parameters()
    )  # the profiler sees zero_grad free old gradients; LiveBytes does not
    assert count.peak == pytest.approx(peak + freed, rel=0.02)


def test_each_device_says_how_it_is_counted():
    assert peak_method(torch.device("cpu")) == "bytes of live tensors"
    assert peak_method(torch.device("cuda")) == "the allocator's peak"
    assert isinstance(counting(torch.device("cpu")), LiveBytes)


@pytest.mark.gpu
def test_on_cuda_the_allocator_counts():
    device = torch.device("cuda")
    kept = torch.zeros(2**20, device=device)
    with counting(device) as count:
        assert isinstance(count, AllocatorBytes)
        torch.zeros(2**20, device=device)
        assert count.peak == kept.nbytes
        count.restart()
        assert count.peak == 0


@torch.library.custom_op("halfstep_memory::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)  # of two formats, unless autocast is on


def test_a_custom_operation_that_counts_on_autocast_is_counted():
    a, b = torch.ones(4, 4, dtype=torch.float16), torch.ones(4, 4)
    with LiveBytes() as count, torch.autocast("cpu", torch.float16):
        kept = product(a, b)
    assert (kept.dtype, count.live) == (torch.float16, 32)
