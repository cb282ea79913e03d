"""Peak memory, counted."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.bench.memory import AllocatorBytes, LiveBytes, counting, peak_method
from halfstep.machine import read_machine


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


TRAINED = """
import sys
from pathlib import Path

import torch

from halfstep.machine import read_machine
from halfstep.bench.memory import LiveBytes
from halfstep.bench.variants import Entry
from halfstep.formats import as_format
from halfstep.workloads.load import load_model


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def train(entry, steps, count=None, **settings):
    job = load_model("regression", {key: str(value) for key, value in settings.items()})
    variant, batch = entry.start(job, 0, torch.device("cpu")), next(iter(job.batches(0)))
    for _ in range(steps):
        variant.train(*batch)
    if count is not None:
        count.restart()
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the process starts anew
        variant.train(*batch)
        print(count.peak, status("VmHWM") - before)
    variant.close()


level, low = sys.argv[1:]
entry = Entry(level, as_format(low), peer=False)
train(entry, 3, d_in=64, d_out=64)  # what libraries take
before = status("VmRSS")
with LiveBytes() as count:
    train(entry, 2, count, d_in=7000, d_out=7000)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read as Linux has it")
@pytest.mark.parametrize(("level", "low"), [("O0", "fp32"), ("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16")])
def test_the_figure_is_the_growth_of_the_process(level, low, tmp_path):
    """Two layers of 7000 x 7000: 374 MiB of fp32 weights. The allocator gives back what is freed at once.

    Where a CPU has no bf16 units, oneDNN holds up to one weight of a bf16 product as fp32 while it multiplies, which no
    counter of tensors sees.
    """
    (tmp_path / "trained.py").write_text(TRAINED, encoding="utf-8")
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    said = subprocess.run(
        [sys.executable, str(tmp_path / "trained.py"), level, low],
        check=True, capture_output=True, text=True, env={**os.environ, **thresholds},
    ).stdout  # fmt: skip
    counted, grown = map(int, said.split())
    inside = 4 * 7000**2 if low == "bf16" and "bf16" not in read_machine(torch.device("cpu")).fast else 0
    assert 0.9 * grown - inside <= counted <= 1.1 * grown
    assert counted > 200 * 10**6
