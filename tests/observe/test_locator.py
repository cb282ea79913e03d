"""Which tensor of a model a piece of memory is."""

import pytest
import torch
from torch import nn

from halfstep.explain.tape.locator import Locator, storage_of
from halfstep.explain.tape.recorder import OpRecorder
from halfstep.lab.workloads.char_lm import CharLM


def looked_up(model):
    table = nn.functional.embedding(torch.tensor([1, 2]), model.table.weight, sparse=True)
    other = nn.functional.embedding(torch.tensor([0, 3]), model.other.weight, sparse=True)
    (table.sum() + other.sum()).backward()


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.other = nn.Embedding(5, 3), nn.Embedding(5, 3)


def test_sparse_gradients_are_told_apart():
    model = Tables()
    looked_up(model)
    assert model.other.weight.grad.is_sparse
    locator = Locator([model])
    for name in ("table", "other"):
        weight = model.get_submodule(name).weight
        assert locator.tensor(weight.grad) == ("gradient", f"{name}.weight", weight)
        assert locator.tensor(weight) == ("parameter", f"{name}.weight", weight)


BETA = "ignore:Sparse (CSR|CSC|BSR) tensor support is in beta:UserWarning"


@pytest.mark.filterwarnings(BETA)
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_a_sparse_tensor_of_others_is_none_of_the_model(layout):
    model = Tables()
    looked_up(model)
    mine = torch.eye(4)
    mine = mine.to_sparse_bsr((2, 2)) if layout == "bsr" else getattr(mine, f"to_sparse_{layout}")()
    assert Locator([model]).tensor(mine) is None


@pytest.mark.filterwarnings(BETA)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_buffer_is_known(layout):
    model = Tables()
    model.register_buffer("graph", getattr(torch.eye(4), f"to_sparse_{layout}")())
    locator = Locator([model])
    assert locator.tensor(model.graph) == ("buffer", "graph", model.graph)
    assert locator.tensor(model.graph.detach()) is not None


def test_parameters_that_share_a_piece_of_memory_are_told_apart():
    flat = torch.arange(12.0)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:8].view(2, 4)), nn.Parameter(flat[8:])
    locator = Locator([model])
    found = [locator.tensor(t) for t in (model.first, model.second, flat[6:7], flat[8:9], flat[11:])]
    assert [name for _, name, _ in found] == ["first", "second", "first", "second", "second"]


def test_a_tensor_without_memory_of_its_own_is_none_of_the_model():
    model = Tables()
    locator = Locator([model])
    seen = []
    torch.func.vmap(lambda row: (seen.append((storage_of(row), locator.tensor(row))), row)[1])(torch.ones(2, 3))
    assert seen == [(0, None)]


def test_the_code_of_a_workload_is_like_any_users():
    model = CharLM(d=8, heads=2, layers=1, length=4).build(0)
    recorder, tokens = OpRecorder([model]), torch.zeros(1, 4, dtype=torch.int64)
    with recorder:
        model(tokens)
    lines = {note.line.partition(":")[0] for note in recorder.notes if note.line is not None}
    assert lines == {"char_lm.py"}


class NoSelf(nn.Module):
    def forward(this, x):
        return x * 2


def test_a_method_may_call_the_module_something_else_than_self():
    model = nn.Sequential(NoSelf())
    with OpRecorder([model]) as recorder:
        NoSelf.forward(model[0], torch.ones(2))
        (lambda this: torch.ones(2) * this)(2)
    assert [note.module for note in recorder.notes if note.aten == "mul"] == ["0", None]
