"""Peak memory, counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from halfstep.lab.bench.tally import CpuBytes, CudaBytes, counting
from halfstep.torch_internals import onednn_takes_bf16


def test_views_and_in_place_ops_cost_nothing():
    with CpuBytes() as count:
        x = torch.zeros(10, 10)
        y = x.t().reshape(10, 10).t()
        x.neg_()
        x[0].mul_(x[1])
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert count.peak == 400


def test_what_is_freed_was_part_of_the_peak():
    with CpuBytes() as count:
        x = torch.zeros(100)
        y = x.neg()
        del x
        z = y.neg()
        del y
    assert z.nbytes == 400
    assert count.peak == 800


def test_restart_forgets_an_earlier_peak_but_not_what_is_held():
    with CpuBytes() as count:
        kept = torch.zeros(10)
        torch.zeros(1000)
        count.restart()
        torch.zeros(20)
    assert count.peak == kept.nbytes + 80
    with CpuBytes() as count:
        torch.zeros(1000)
        count.restart()
    assert count.peak == 0


def test_tensors_from_before_do_not_count_and_low_ones_count_their_own_width():
    before = torch.zeros(1000)
    with CpuBytes() as count:
        low = before.to(torch.bfloat16)
    assert count.peak == low.nbytes == 2000


def test_a_training_step_holds_weights_activations_gradients_and_what_a_product_copies():
    with CpuBytes() as count:
        w = nn.Parameter(torch.zeros(10, 10))  # 400
        x = torch.zeros(5, 10)  # 200
        loss = (x @ w).sum()  # the product, 200, is freed after the sum
        loss.backward()  # its gradient, the loss and the loss's, 200, 4 and 4, are there when w's, 400, is made
    assert w.grad is not None
    assert count.peak == 400 + 200 + 200 + 4 + 4 + 400


def test_an_exception_ends_the_count_and_another_can_begin():
    with pytest.raises(ValueError, match="within"), CpuBytes():
        raise ValueError("within")
    with CpuBytes() as count:
        torch.zeros(100)
    assert count.peak == 400


@pytest.mark.skipif(onednn_takes_bf16() is False, reason="oneDNN does not compute bf16 products here")
def test_what_a_product_takes_for_itself_is_counted():
    """Its sums are a matrix of fp32 where no unit makes them; else it reorders blocks, with AMX half of an operand."""
    a, b = (torch.ones(1024, 1024, dtype=torch.bfloat16) for _ in range(2))
    with CpuBytes() as count:
        made = a @ b
    assert any(times * made.nbytes <= count.peak < times * made.nbytes + 2**19 for times in (1, 1.5, 3))


def test_it_agrees_with_torchs_profiler():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    x = torch.randn(128, 64)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    model.zero_grad()  # it frees what was there before
    with CpuBytes() as count:
        step()
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:  # else torch 2.11 warns
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert count.peak == peak


def test_each_device_has_its_own_allocator():
    assert isinstance(counting(torch.device("cpu")), CpuBytes)
    assert isinstance(counting(torch.device("cuda")), CudaBytes)


@pytest.mark.gpu
@pytest.mark.silicon
def test_on_cuda_the_caching_allocator_counts():
    device = torch.device("cuda")
    with counting(device) as count:
        kept = torch.zeros(2**20, device=device)
    assert isinstance(count, CudaBytes)
    assert count.peak == kept.nbytes
    with counting(device) as count:
        torch.zeros(2**20, device=device)
        count.restart()
    assert count.peak == 0


TRAINED = """
import sys
from pathlib import Path

import torch

from halfstep.lab.bench.tally import CpuBytes
from halfstep.lab.bench.variants import Entry
from halfstep.formats import as_format
from halfstep.lab.workloads.load import load_workload


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def train(entry, count=None, **settings):
    job = load_workload("regression", {key: str(value) for key, value in settings.items()})
    variant, batch = entry.start(job, 0, torch.device("cpu")), next(iter(job.batches(0)))
    variant.train(*batch)
    variant.train(*batch)
    if count is not None:
        count.restart()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the process starts anew
    variant.train(*batch)
    return status("VmHWM") - before


level, low, counts = sys.argv[1:]
entry, before = Entry(level, as_format(low), peer=False), 0
with CpuBytes() as count:
    train(entry, count, d_in=64, d_out=64)  # what libraries take
before = status("VmRSS")
if counts == "yes":
    with CpuBytes() as count:
        train(entry, count, d_in=7000, d_out=7000)
    print(count.peak)
else:
    print(train(entry, d_in=7000, d_out=7000))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read as Linux has it")
@pytest.mark.parametrize(("level", "low"), [("O0", "fp32"), ("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16")])
def test_the_figure_is_the_growth_of_the_process(level, low, tmp_path):
    """Two layers of 7000 x 7000: 374 MiB of fp32 weights. The allocator gives back what is freed at once.

    A process that counts and one that does not: counting itself takes nothing of what is counted.
    """
    (tmp_path / "trained.py").write_text(TRAINED, encoding="utf-8")
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    counted, grown = (
        int(
            subprocess.run(
                [sys.executable, str(tmp_path / "trained.py"), level, low, counts],
                check=True, capture_output=True, text=True, env={**os.environ, **thresholds},
            ).stdout
        )
        for counts in ("yes", "no")
    )  # fmt: skip
    assert 0.9 * grown <= counted <= 1.1 * grown
    assert counted > 200 * 10**6
