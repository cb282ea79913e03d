"""What the recorder notes of an operation, and where the walk back from what is not finite ends."""

import ctypes
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.explain.diagnose.diagnosis import find_origin
from halfstep.explain.tape.nonfinite import NonFinite, finite_range, nonfinite
from halfstep.explain.tape.recorder import OpRecorder, is_brought_in
from halfstep.formats import FP16
from halfstep.modes import uncompiled
from halfstep.train.cast.products import Emulation

INF, NAN = torch.inf, torch.nan


def recorded(function, *models):
    """Returns the recorder of one call, and the origin of what is not finite in its result."""
    recorder = OpRecorder(models)
    with recorder:
        result = function()
    return recorder, find_origin(recorder, [result])


def test_memory_that_a_collective_still_writes_to_can_be_looked_at():
    memory, stop = torch.zeros(2**16), threading.Event()

    def write():
        while not stop.is_set():
            memory.fill_(NAN).zero_()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [nonfinite(memory) for _ in range(500)]
    finally:
        stop.set()
        writer.join()
    assert None in seen
    assert all(each is None or each.nan > 0 for each in seen)


def test_badness_counts_each_kind_and_names_the_first_place():
    assert nonfinite(torch.tensor([[1.0, 2.0], [INF, NAN], [-INF, NAN]])) == NonFinite(6, 2, 1, 1, (1, 0))
    assert str(NonFinite(6, 2, 1, 0)) == "2 NaN and 1 inf in 6 elements"
    assert nonfinite(torch.tensor([1, 2])) is None
    assert nonfinite(torch.tensor([])) is None
    assert nonfinite(torch.tensor([65504.0], dtype=torch.float16)) is None
    assert nonfinite(torch.complex(torch.tensor(1.0), torch.tensor(NAN))) is not None


def test_a_range_is_that_of_the_finite_elements():
    assert finite_range(torch.tensor([3.0, -2.0, INF, NAN])) == (-2.0, 3.0)
    assert finite_range(torch.tensor([NAN])) is None


def test_the_earliest_operation_is_the_origin_not_those_that_hand_it_on():
    x = torch.tensor([1.0, 0.0])
    _, origin = recorded(lambda: ((1 / x) * 2 + 1).sum())
    assert origin.note.aten == "reciprocal"
    assert origin.note.line.startswith("test_recorder.py:")


def test_what_does_not_reach_the_result_is_no_origin():
    x = torch.tensor([1.0, 0.0])

    def function():
        unused = 1 / x
        assert unused.isinf().any()
        return torch.log(x + 1).sum() + (x / x)[0]

    _, origin = recorded(function)
    assert origin is None


def test_a_choice_that_leaves_out_the_bad_element_ends_the_walk():
    x = torch.tensor([1.0, 0.0])
    _, origin = recorded(lambda: torch.where(x == 0, torch.zeros(2), 1 / x).sum())
    assert origin is None


def test_memory_that_is_used_again_is_not_mistaken_for_what_was_there():
    def function():
        for _ in range(50):
            bad = torch.full((64,), 1e30) * 1e30
            del bad
            good = torch.ones(64) * 2
        return good.sum() / 0.0

    assert recorded(function)[1].note.aten == "div"


def test_an_element_written_in_place_is_found_through_a_view():
    def function():
        out = torch.zeros(3)
        out[1].add_(1.0).div_(0.0)
        return out.sum()

    assert recorded(function)[1].note.aten == "div_"


def test_what_was_bad_and_is_overwritten_is_forgotten():
    def function():
        out = torch.ones(3) / 0.0
        out.fill_(2.0)
        return torch.log(out - 2.0).sum()

    assert recorded(function)[1].note.aten == "log"


def test_fresh_memory_is_not_read_where_it_is_written_over():
    def function():
        garbage = torch.empty(3)
        ctypes.memset(garbage.data_ptr(), 255, 12)  # NaN, as memory may hold
        return garbage.copy_(torch.ones(3) / 0.0).sum()

    _, origin = recorded(function)
    assert origin.note.aten == "div"
    assert origin.leaf is None


def test_memory_that_nobody_wrote_to_is_the_allocations_fault():
    def function():
        garbage = torch.empty(3)
        ctypes.memset(garbage.data_ptr(), 255, 12)
        return (garbage + 1).sum()

    assert recorded(function)[1].note.aten == "empty"


def test_a_parameter_a_buffer_and_data_are_told_apart():
    model = nn.BatchNorm1d(2).eval()
    x = torch.ones(2, 2)
    with torch.no_grad():
        model.weight[0] = NAN
    assert recorded(lambda: model(x).sum(), model)[1].leaf.name == "weight"
    with torch.no_grad():
        model.weight[0] = 1.0
        model.running_mean[1] = NAN
    leaf = recorded(lambda: model(x).sum(), model)[1].leaf
    assert (leaf.kind, leaf.name) == ("buffer", "running_mean")
    model.running_mean[1] = 0.0
    leaf = recorded(lambda: model(x * NAN).sum(), model)[1].note
    assert leaf.aten == "mul"
    assert recorded(lambda: model(torch.full((2, 2), NAN)).sum(), model)[1].leaf is None  # made by `full`
    data = torch.full((2, 2), NAN)
    assert recorded(lambda: model(data).sum(), model)[1].leaf.kind == "data"


def test_what_was_computed_where_it_could_not_be_seen_is_no_data():
    weight = nn.Parameter(torch.ones(2))
    unseen = weight / 0.0
    assert recorded(lambda: (unseen * 2).sum())[1].leaf.kind == "unseen"


def test_outside_of_every_node_nothing_is_brought_in():
    assert not is_brought_in(torch.ones(2))  # as where FSDP2 reduces gradients at the end of a pass


def test_the_result_in_fp32_is_known():
    x = torch.tensor([300.0, 2.0], dtype=torch.float16)
    _, origin = recorded(lambda: (x * x).sum())
    assert origin.note.exact.largest == 90000.0
    assert origin.note.exact.finite
    assert origin.note.call.input_ranges == ((2.0, 300.0), (2.0, 300.0))
    assert origin.note.call.output_ranges == ((4.0, 4.0),)
    assert origin.note.call.output_formats == ("float16",)


def test_under_emulation_operations_are_seen_as_the_caller_made_them():
    a = torch.full((1, 2), 256.0, dtype=torch.float16)
    recorder = OpRecorder([])
    with recorder, uncompiled(Emulation(FP16), recorder):
        out = a @ a.T
    assert [note.aten for note in recorder.notes if note.aten == "mm"] == ["mm"]
    origin = find_origin(recorder, [out])
    assert origin.note.call.input_formats == ("float16", "float16")
    assert origin.note.exact.largest == 131072.0


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return torch.sqrt(self.fc(x) * 0).sum()


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_a_backward_operation_has_the_place_of_its_forward_one(reentrant):
    model = nn.ModuleDict({"inner": Inner()})
    x = torch.ones(1, 2, requires_grad=True)
    recorder = OpRecorder([model])
    with recorder:
        inner = model["inner"]
        out = inner(x) if reentrant is None else checkpoint(inner, x, use_reentrant=reentrant)
        out.backward()
    origin = find_origin(recorder, [inner.fc.weight.grad])
    assert (origin.note.phase, origin.note.module, recorder.operator(origin.note)) == ("backward", "inner", "sqrt")
    assert recorder.line(origin.note).endswith("in forward")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_forward(reentrant):
    model = nn.ModuleDict({"inner": Inner()})
    x = torch.ones(1, 2, requires_grad=True)
    recorder = OpRecorder([model])
    with recorder:
        checkpoint(model["inner"], x, use_reentrant=reentrant).backward()
    sqrts = [note.phase for note in recorder.notes if note.aten == "sqrt"]
    assert sqrts == ["forward", "forward"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: nn.functional.linear(x, x), "linear"),
        (lambda x: nn.functional.linear(x[None], x, x[0]), "linear"),
        (lambda x: x @ x, "matmul"),
        (lambda x: torch.bmm(x[None], x[None]), "matmul"),
        (lambda x: torch.einsum("ij,jk->ik", x, x), "einsum"),
        (lambda x: nn.functional.layer_norm(x, (2,), x[0]), "layer_norm"),
        (lambda x: nn.functional.conv1d(x[None], x[:, :, None]), "conv1d"),
        (lambda x: nn.functional.conv_transpose2d(x[None, None], x[None, None]), "conv_transpose2d"),
        (lambda x: nn.functional.cross_entropy(x, torch.tensor([0, 1])), "cross_entropy"),
        (torch.logdet, "logdet"),
        (lambda x: torch.linalg.slogdet(x)[1], "linalg_slogdet"),
        (lambda x: x.half(), "to"),
    ],
)
def test_an_operation_is_known_by_its_public_name(function, name):
    x = torch.full((2, 2), NAN)
    recorder, origin = recorded(lambda: function(x))
    named = recorder.operator(origin.note)
    assert named == name or (name == "to" and origin.note.aten == "_to_copy")
