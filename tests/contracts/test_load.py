"""What loading a model's state may change: all of what was asked, bit for bit, or nothing."""

import copy

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import bits, differing, snapshot
from tests.optim.cases import as_held

BOUNDARY_LOW_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def of_patterns(high_halves, low_halves):
    """All fp32 values whose bits are one of each, as a column."""
    high = torch.as_tensor(high_halves, dtype=torch.int64) << 16
    full = (high[:, None] + torch.as_tensor(low_halves, dtype=torch.int64)).reshape(-1)
    return full.to(torch.int32).view(torch.float32)[:, None]


class Columns(nn.Module):
    """Parameters of its own with the names and shapes of some tensors."""

    def __init__(self, like):
        super().__init__()
        for name, values in like.items():
            self.register_parameter(name, nn.Parameter(torch.zeros_like(values)))


def assert_loads(given, expected, master):
    """Loads patterns into an open session, and what that says again: it says what was expected, and after close too."""

    def assert_same(came):
        for name, values in expected.items():
            assert torch.equal(came[name].detach().view(torch.int32), values.view(torch.int32))

    model = Columns(given)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16", master=master)
    model.load_state_dict(given)
    for name, weight in model.named_parameters():
        assert weight.dtype is torch.bfloat16
        assert torch.equal(weight.float().isnan(), given[name].isnan())
    once = model.state_dict()
    assert_same(once)
    model.load_state_dict(once)
    assert_same(model.state_dict())
    session.close()
    assert_same(dict(model.named_parameters()))


@pytest.mark.parametrize(("master", "kept"), [("split", as_held), ("copy", torch.clone)])
def test_every_fp32_pattern_loads_exactly_but_nans_that_no_split_holds(master, kept):
    patterns = of_patterns(range(2**16), BOUNDARY_LOW_HALVES)
    assert_loads({"weight": patterns}, {"weight": kept(patterns)}, master)


@pytest.mark.slow  # minutes on one core
def test_every_one_of_all_fp32_patterns_loads_exactly_but_nans_that_no_split_holds():
    """In tensors of 2**16, which stay in the cache, and 64 of them per load."""
    given = {f"weight{i}": torch.arange(2**16, dtype=torch.int32).add_(i << 16).view(torch.float32) for i in range(64)}
    model = Columns(given)
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    for _ in range(2**16 // len(given)):
        model.load_state_dict(given)
        came = model.state_dict()
        for name, weight in model.named_parameters():
            assert torch.equal(came[name].view(torch.int32), as_held(given[name]).view(torch.int32))
            assert torch.equal(weight.isnan(), given[name].isnan())
        for values in given.values():
            values.view(torch.int32).add_(len(given) << 16)  # wraps around to the negative ones
    assert given["weight0"][0].view(torch.int32) == 0  # all the way round


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU cannot flush subnormals")
def test_subnormals_load_exactly_where_the_cpu_flushes_them():
    patterns = of_patterns([*range(0x80), *range(0x8000, 0x8080)], BOUNDARY_LOW_HALVES)
    torch.set_flush_denormal(True)
    try:
        assert_loads({"weight": patterns}, {"weight": patterns}, "split")
    finally:
        torch.set_flush_denormal(False)


def test_a_weight_that_is_changed_after_a_load_loses_the_remainder_of_the_old_one():
    model = nn.Linear(1, 2, bias=False)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    model.load_state_dict({"weight": torch.tensor([[1e-41], [3.4e38]])})
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(bits(model.state_dict()["weight"]), bits(torch.zeros(2, 1)))
    session.close()


def test_a_scalar_parameter_takes_one_element_from_an_old_file_in_full():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    model.load_state_dict({"scale": torch.tensor([1.234567])})
    assert model.state_dict()["scale"].item() == torch.tensor(1.234567).item()
    session.close()


class Nested(nn.Module):
    """Parameters of its own beside those of a norm, which stays full, and of a linear layer, which is made low."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.norm(x * self.own))


def nested(name, low="bf16"):
    torch.manual_seed(0)
    model = Nested()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, halfstep.initialize(model, optimizer, name, low=low)


def nested_step(model, optimizer, session):
    optimizer.zero_grad()
    session.backward(model(torch.linspace(-1, 2, 8).reshape(2, 4)).square().mean())
    session.step()


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("where", ["", "norm", "layer"])
def test_assign_is_refused_before_anything_changed_and_the_same_dict_loads_without(name, where):
    model, optimizer, session = nested(name)
    before, parameters = snapshot(model, optimizer, session), list(model.parameters())
    part = model.get_submodule(where)
    state = {key: torch.full_like(value, 3.0) for key, value in part.state_dict().items()}
    state = type(part.state_dict())(state)
    state._metadata = part.state_dict()._metadata
    with pytest.raises(halfstep.StateError, match=r"assign=True.*load without assign"):
        part.load_state_dict(state, assign=True)
    assert differing(snapshot(model, optimizer, session), before) == []
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    part.load_state_dict(state)
    assert all((value == 3).all() for value in part.state_dict().values())
    nested_step(model, optimizer, session)
    assert all((value != 3).all() for value in part.state_dict().values())
    session.close()


def test_a_dict_that_was_assigned_elsewhere_before_is_refused_once_as_a_whole():
    model, optimizer, session = nested("O2")
    state = copy.deepcopy(model.state_dict())
    Nested().load_state_dict(state, assign=True)  # torch leaves its mark in the metadata of every module
    for value in state.values():
        value.data.fill_(3.0)
    before = snapshot(model, optimizer, session)
    with pytest.raises(halfstep.StateError, match="load again"):
        model.load_state_dict(state)
    assert differing(snapshot(model, optimizer, session), before) == []
    model.load_state_dict(state)
    nested_step(model, optimizer, session)
    session.close()


def test_a_deep_copy_and_a_closed_session_take_assigned_parameters():
    model, _, session = nested("O2")
    twin = copy.deepcopy(model)
    twin.load_state_dict({key: torch.full_like(value, 3.0) for key, value in model.state_dict().items()}, assign=True)
    assert (twin.layer.weight == 3).all()
    session.close()
    model.load_state_dict(twin.state_dict(), assign=True)
    assert (model.layer.weight == 3).all()


BAD_ENTRIES = {
    "none": lambda t: None,
    "text": lambda t: "x",
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("entry", BAD_ENTRIES)
@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_an_entry_that_holds_no_numbers_is_refused_before_anything_changed(name, entry):
    model, optimizer, session = nested(name)
    before = snapshot(model, optimizer, session)
    state = {key: torch.full_like(value, 3.0) for key, value in model.state_dict().items()}
    state["layer.weight"] = BAD_ENTRIES[entry](state["layer.weight"])
    with pytest.raises(halfstep.StateError, match=r"'layer\.weight'.*expected a dense tensor"):
        model.load_state_dict(state)
    assert differing(snapshot(model, optimizer, session), before) == []
    session.close()


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_a_load_that_torch_refuses_leaves_a_model_that_loads_and_trains(name):
    model, optimizer, session = nested(name)
    state = {key: torch.full_like(value, 3.0) for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "layer.weight": torch.zeros(3)})
    model.load_state_dict(state)
    assert all((value == 3).all() for value in model.state_dict().values())
    nested_step(model, optimizer, session)
    assert all((value != 3).all() for value in model.state_dict().values())
    session.close()
