"""Buffers of a skipped step are bit-identical to before it, whoever wrote them and how."""

import math

import pytest
import torch
from torch import nn

from halfstep.train.scale.buffers import BufferGuard
from tests.scale.sync import NoSync, no_cuda_sync

SKIPPED, STEPPED = torch.tensor(True), torch.tensor(False)


class Counter(nn.Module):
    """Buffers of every kind: written in place, through .data, by a kernel that does not count, replaced, and never."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counted", torch.zeros(2))
        self.register_buffer("uncounted", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("rotations", torch.tensor([1j]))
        self.register_buffer("grid", torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x):
        self.counted += x.detach().mean()
        self.uncounted.data.add_(1)
        self.steps += 1
        self.seen.fill_(True)
        self.rotations.mul_(1j)
        self.grid.copy_(torch.randn(2, 3, 4, 5))
        return x


def bits(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(model, before):
    """Whether all buffers are bit-identical to `before`; inf and nan included."""
    return all(
        buffer.dtype == before[name].dtype and torch.equal(nan_safe(buffer), nan_safe(before[name]))
        for name, buffer in model.named_buffers()
    )


def nan_safe(buffer):
    flat = buffer.contiguous().reshape(-1)
    return torch.view_as_real(flat).contiguous().view(torch.int32) if flat.is_complex() else flat.view(torch.uint8)


def networks():
    return {
        "batch norm": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
        "cumulative batch norm": (nn.BatchNorm1d(4, momentum=None), (6, 4)),
        "instance norm": (nn.InstanceNorm1d(4, track_running_stats=True), (2, 4, 6)),
        "spectral norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
        "own buffers": (Counter(), (2, 4)),
    }


@pytest.mark.parametrize("name", networks())
class TestNetworks:
    def run(self, name, found, *, warm=0):
        model, shape = networks()[name]
        guard = BufferGuard([model])
        for _ in range(warm):
            guard.refresh()
            model(torch.randn(shape))
            guard.restore(STEPPED)
        before = bits(model)
        guard.refresh()
        model(torch.full(shape, math.inf))
        model(torch.randn(shape))
        assert not same(model, before)
        guard.restore(found)
        return model, before

    @pytest.mark.parametrize("warm", [0, 1, 3])
    def test_a_skipped_step_leaves_every_bit(self, name, warm):
        model, before = self.run(name, SKIPPED, warm=warm)
        assert same(model, before)

    def test_a_step_keeps_what_forward_wrote(self, name):
        model, before = self.run(name, STEPPED)
        assert not same(model, before)

    def test_nothing_syncs(self, name):
        model, shape = networks()[name]
        guard = BufferGuard([model])
        with NoSync():
            guard.refresh()
        model(torch.randn(shape))
        with NoSync():
            guard.restore(SKIPPED)
            guard.after_step()


def test_only_the_first_forward_of_a_step_takes_the_snapshot():
    norm = nn.BatchNorm1d(2)
    guard = BufferGuard([norm])
    for _ in range(3):
        guard.refresh()
        norm(torch.randn(3, 2))
    guard.restore(SKIPPED)
    assert norm.num_batches_tracked.item() == 0


def test_after_step_snapshots_for_a_forward_that_cannot():
    norm = nn.BatchNorm1d(2)
    guard = BufferGuard([norm])
    guard.after_step()
    norm(torch.randn(3, 2))
    guard.restore(STEPPED)
    guard.after_step()
    norm(torch.randn(3, 2))
    guard.restore(SKIPPED)
    assert norm.num_batches_tracked.item() == 1


def test_a_second_optimizer_can_restore_after_the_first_stepped():
    norm = nn.BatchNorm1d(2)
    guard = BufferGuard([norm])
    guard.refresh()
    norm(torch.full((3, 2), math.inf))
    guard.restore(STEPPED)
    guard.restore(SKIPPED)
    assert norm.running_mean.tolist() == [0.0, 0.0]


def test_restore_before_any_snapshot_does_nothing():
    norm = nn.BatchNorm1d(2)
    BufferGuard([norm]).restore(SKIPPED)
    assert norm.num_batches_tracked.item() == 0


def test_a_later_backward_through_the_same_forward_still_runs():
    norm = nn.BatchNorm1d(2)
    guard = BufferGuard([norm])
    guard.refresh()
    loss = norm(torch.randn(3, 2)).sum()
    guard.restore(SKIPPED)
    loss.backward()  # a counted write would raise: running_mean is saved for it


def test_a_buffer_that_was_replaced_is_found():
    model = Counter()
    guard = BufferGuard([model])
    guard.refresh()
    guard.restore(STEPPED)
    model.counted = torch.tensor([7.0, 7.0])
    guard.refresh()
    model(torch.randn(2, 4))
    guard.restore(SKIPPED)
    assert model.counted.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("how", ["attribute", "data"])
def test_a_buffer_that_forward_replaces_is_put_back(how):
    model = Counter()
    guard = BufferGuard([model])
    for found, expected in [(STEPPED, 1.0), (SKIPPED, 1.0), (STEPPED, 2.0), (SKIPPED, 2.0)]:
        guard.refresh()
        if how == "attribute":
            model.counted = model.counted + 1
        else:
            model.counted.data = model.counted + 1
        guard.restore(found)
        guard.after_step()
        assert model.counted.tolist() == [expected, expected]


def test_a_buffer_that_forward_turns_in_its_memory_is_put_back():
    model = nn.Module()
    model.register_buffer("square", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    guard = BufferGuard([model])
    guard.refresh()
    model.square.data = model.square.data.t()
    guard.restore(SKIPPED)
    assert model.square.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_buffer_that_forward_replaces_by_another_shape_is_left_alone():
    model = Counter()
    guard = BufferGuard([model])
    guard.refresh()
    model.counted, model.steps = torch.ones(5), None
    guard.restore(SKIPPED)
    assert model.counted.tolist() == [1.0] * 5
    assert model.steps is None


def test_a_tied_buffer_and_several_models():
    one, two = Counter(), Counter()
    two.counted = one.counted
    guard = BufferGuard([one, two, one])
    guard.refresh()
    one(torch.randn(2, 4))
    two(torch.randn(2, 4))
    guard.restore(SKIPPED)
    assert same(one, bits(Counter()))
    assert same(two, bits(Counter()))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.ones(1).expand(3),
        torch.ones(2, device="meta"),
        torch.eye(3).to_sparse(),
        nn.parameter.UninitializedBuffer(),
    ],
    ids=["stored once", "meta", "sparse", "lazy"],
)
def test_a_buffer_that_cannot_be_written_in_place_is_left_alone(buffer):
    model = nn.BatchNorm1d(2)
    model.register_buffer("odd", buffer)
    guard = BufferGuard([model])
    guard.refresh()
    model.num_batches_tracked += 1
    guard.restore(SKIPPED)
    assert model.odd is buffer
    assert model.num_batches_tracked.item() == 0


def test_a_buffer_expanded_along_a_dimension_of_one_is_guarded():
    model = nn.Module()
    model.register_buffer("positions", torch.arange(4).as_strided((1, 4), (0, 1)))
    guard = BufferGuard([model])
    guard.refresh()
    model.positions.add_(1)
    guard.restore(SKIPPED)
    assert model.positions.tolist() == [[0, 1, 2, 3]]


@pytest.mark.gpu
def test_on_cuda_nothing_waits():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)).cuda()
    before = bits(model)
    guard = BufferGuard([model])
    found = torch.tensor(True, device="cuda")
    with no_cuda_sync():
        guard.refresh()
        model(torch.randn(8, 4, device="cuda"))
        guard.restore(found)
    assert same(model, before)
