"""The rows of a benchmark, and that each trains as its documentation says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from halfstep.errors import PlanError, WorkloadError
from halfstep.formats import BF16, FP16, FP32
from halfstep.lab.bench.variants import AmpVariant, Entry, SessionVariant, entries
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.load import Regression
from halfstep.machine import AVX2, PROCESSORS, DeviceFacts
from halfstep.plan.levels import level

FACTS = DeviceFacts("cpu")
CPU = torch.device("cpu")
TINY = CharLM(d=16, layers=1, heads=2, length=16, batch=4, eval_windows=4)


def names(rows):
    return [row.name.replace(" (emulated)", "") for row in rows]


def test_o0_comes_once_and_the_others_in_each_format():
    rows = entries(["O1", "O0", "O2", "O1"], [BF16, FP16], FACTS, peer=True)
    assert names(rows) == ["O0", "O1 bf16", "O2 bf16", "torch.amp bf16", "O1 fp16", "O2 fp16", "torch.amp fp16"]


def test_each_way_to_keep_moments_has_its_rows_and_the_peer_one():
    rows = entries(["O0", "O2"], [BF16], FACTS, peer=True, moments=["full", "8bit"])
    assert names(rows) == ["O0", "O0, 8bit moments", "O2 bf16", "O2 bf16, 8bit moments", "torch.amp bf16"]
    assert [row.start(TINY, 0, CPU)._session.plan.moments for row in rows[2:4]] == ["full", "8bit"]


@pytest.mark.parametrize(("levels", "low"), [(["O2"], FP16), (["O0", "O3"], BF16)])
def test_products_that_no_row_has_are_refused(levels, low):
    with pytest.raises(WorkloadError, match="products fp8, nvfp4 are those of O1 and O2 in bf16: pass --levels O2"):
        entries(levels, [low], FACTS, peer=True, products=["fp8", "nvfp4"])
    assert entries(levels, [low], FACTS, peer=True, products=["plan"])


def test_without_o0_or_a_peer_there_is_none():
    assert names(entries(["O1"], [BF16], FACTS, peer=False)) == ["O1 bf16"]


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda row: row.name)
def test_fp16_on_a_cpu_is_emulated_and_its_peer_is_not_run(processor):
    o1, amp = entries(["O1"], [FP16], DeviceFacts("cpu", processor=processor), peer=True)
    assert (o1.emulated, o1.refused) == (True, None)
    assert o1.name == "O1 fp16 (emulated)"
    assert amp.refused == "fp16 must be emulated on this cpu, and torch.amp cannot emulate"


def test_bf16_that_is_emulated_has_its_peer_on_torchs_own_kernels():
    o1, amp = entries(["O1"], [BF16], DeviceFacts("cpu", processor=AVX2), peer=True)
    assert (o1.name, o1.emulated, amp.refused) == ("O1 bf16 (emulated)", True, None)


@pytest.mark.parametrize(
    "facts",
    [DeviceFacts("cuda", (7, 5)), DeviceFacts("cpu", processor=replace(PROCESSORS[0], fp16=2.0))],
    ids=["cuda", "a CPU measured to be fast"],
)
def test_fp16_that_is_fast_has_its_peer(facts):
    o1, amp = entries(["O1"], [FP16], facts, peer=True)
    assert (o1.emulated, amp.refused) == (False, None)


@pytest.mark.parametrize(
    ("levels", "lows", "error"),
    [
        (["O4"], [BF16], PlanError),
        (["O1"], [FP32], PlanError),
        ([], [BF16], WorkloadError),
        (["O1"], [], WorkloadError),
    ],
)
def test_rows_that_do_not_exist_are_errors(levels, lows, error):
    with pytest.raises(error):
        entries(levels, lows, FACTS, peer=True)


def train(variant, job, steps=3):
    losses = [variant.train(*batch).item() for batch, _ in zip(job.batches(0), range(steps), strict=False)]
    variant.observe()
    return losses


@pytest.mark.parametrize("peer", [False, True])
def test_o0_is_the_plain_fp32_loop_and_the_peer_that_of_torchs_documentation_bit_for_bit(peer):
    model = TINY.build(0)
    optimizer = TINY.optimizer(model, fused=True)
    expected = []
    for (inputs, targets), _ in zip(TINY.batches(0), range(3), strict=False):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=peer):
            outputs = model(inputs)
        loss = TINY.loss(outputs.float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    entry = Entry("torch.amp", BF16, peer=True) if peer else Entry("O0", FP32, peer=False)
    variant = entry.start(TINY, 0, CPU)
    assert train(variant, TINY) == expected
    assert variant.end().scale == 1.0
    variant.close()


def test_a_level_trains_in_its_format():
    variant = Entry("O2", BF16, peer=False).start(TINY, 0, CPU)
    train(variant, TINY)
    assert variant.model.head.weight.dtype == torch.bfloat16
    memory = variant.end().memory
    count = variant.model.head.weight.numel()
    assert variant.model.head.weight.nbytes == 2 * count
    variant.close()
    variant.close()
    assert variant.model.head.weight.dtype == torch.float32
    assert memory["masters"] > 0


class Overflowing(Regression):
    """Its second batch has an infinite target."""

    def batches(self, seed):
        for i, (inputs, targets) in enumerate(super().batches(seed)):
            yield inputs, targets + (torch.inf if i == 1 else 0.0)


@pytest.mark.parametrize(("peer", "scale"), [(False, 65536.0), (True, 32768.0)])
def test_a_batch_with_an_infinite_loss_is_counted_and_halves_the_scale_of_torch_alone(peer, scale):
    job = Overflowing(batch=4, d_in=8, d_out=8)
    model = job.build(0)
    variant = AmpVariant(job, model, FP16, CPU) if peer else SessionVariant(job, model, level("O1", FP16))
    for batch, _ in zip(job.batches(0), range(3), strict=False):
        variant.train(*batch)
        variant.observe()
    facts = variant.end()
    variant.close()
    assert (facts.skipped, facts.scale) == (1, scale)


@pytest.mark.parametrize("peer", [False, True])
def test_clipping_is_of_the_true_gradients(peer):
    job = Regression(batch=4, d_in=8, d_out=8, lr=1.0, max_norm=1e-2)
    before = job.build(0)
    model = job.build(0)
    variant = AmpVariant(job, model, FP16, CPU) if peer else SessionVariant(job, model, level("O1", FP16))
    variant.train(*next(job.batches(0)))
    variant.close()
    moved = [b - a for a, b in zip(before.parameters(), model.parameters(), strict=True)]
    assert nn.utils.get_total_norm(moved).item() == pytest.approx(1e-2, rel=1e-2)


def test_bytes_of_the_peer_are_those_of_fp32_training():
    variant = Entry("torch.amp", BF16, peer=True).start(TINY, 0, CPU)
    train(variant, TINY, 1)
    count = sum(p.numel() for p in variant.model.parameters())
    tensors = len(list(variant.model.parameters()))
    expected = {"weights": 4 * count, "masters": 0, "gradients": 4 * count, "optimizer": 8 * count + 4 * tensors}
    assert variant.end().memory == expected
