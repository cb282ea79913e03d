"""Blame and guardian on a CUDA device."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.explain.diagnose.counter import WINDOW, Counter
from tests.contracts.cases import backward_and_step
from tests.diagnose.faults.hosts import Cnn, Transformer, images, targets, words
from tests.diagnose.faults.plants import CustomBackward, Gain
from tests.scale.sync import no_cuda_sync

pytestmark = pytest.mark.gpu


def test_skips_are_counted_without_waiting_and_given_at_a_later_step():
    counter, parts = Counter(1.0), (object(),)
    skipped, scales = torch.tensor(True, device="cuda"), {0: torch.tensor(8.0, device="cuda")}
    with no_cuda_sync():
        found = [counter.count(parts, skipped, None, scales) for _ in range(WINDOW)]
    assert found == [None] * WINDOW
    torch.cuda.synchronize()
    assert counter.count(parts, skipped, None, scales)[0] == ((id(parts[0]),), 0)


@pytest.mark.parametrize(("plant", "phase"), [(Gain, "forward"), (CustomBackward, "backward")])
@pytest.mark.parametrize(("host", "inputs"), [(Cnn, images), (Transformer, words)])
def test_a_fault_is_named_and_its_cure_cures(host, inputs, plant, phase):
    model, batch, labels = host(plant()).cuda(), inputs().cuda(), targets().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, "O2", low="fp16")
    verdict = halfstep.blame(session, lambda: nn.functional.cross_entropy(model(batch), labels))
    assert (verdict.operator, verdict.phase, verdict.kind) == ("mul", phase, "overflow")
    assert verdict.module.endswith("plant")
    cured = halfstep.initialize(model, optimizer, session.plan.edit(*verdict.cure))
    cured.backward(nn.functional.cross_entropy(model(batch), labels))
    assert not bool(cured.step().skipped)
    cured.close()


def test_a_run_of_skips_raises_with_a_verdict():
    model, batch, labels = Cnn(Gain()).cuda(), images().cuda(), targets().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = halfstep.initialize(model, optimizer, "O2", low="fp16")

    def train():
        for _ in range(6 * WINDOW):
            optimizer.zero_grad()
            backward_and_step(session, nn.functional.cross_entropy(model(batch), labels))

    with pytest.raises(halfstep.NumericsError) as caught:
        train()
    assert caught.value.verdict.module == "plant"
