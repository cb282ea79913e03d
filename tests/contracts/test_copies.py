"""deepcopy, AveragedModel, torch.save of a whole model and re-running initialize work."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import threading
from functools import partial

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from tests import forks
from tests.contracts.cases import batch, every_plan, make, mixed_plans, start, train


@mixed_plans
def test_a_deepcopy_has_the_fp32_weights_and_computes_with_them_under_the_plan(name, low):
    model, opt, session = start(name, low)
    train(session, model, opt, range(2))
    twin = copy.deepcopy(model)
    assert all(p.dtype is torch.float32 for p in twin.parameters())
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    model.eval()
    twin.eval()
    inputs = batch(7)[0]
    torch.testing.assert_close(twin(inputs), model(inputs), rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    assert not twin(inputs).any(), "the copy computes with its own weights"
    assert model(inputs).any()
    session.close()
    assert twin(inputs).dtype is torch.float32


@mixed_plans
@pytest.mark.parametrize("wrap", [None, partial(torch.compile, backend="eager"), nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("decay", [None, 0.999], ids=["average", "ema"])
def test_an_averaged_model_averages_the_fp32_values(name, low, decay, wrap, process_group):
    model, opt, session = start(name, low)
    outer = model if wrap is None else wrap(model)
    ema = AveragedModel(outer) if decay is None else AveragedModel(outer, multi_avg_fn=get_ema_multi_avg_fn(decay))
    seen = []
    for step in range(3):
        train(session, model, opt, [step])
        ema.update_parameters(outer)
        seen.append(model.state_dict()["first.weight"].clone())
    if decay is None:
        expected = torch.stack(seen).double().mean(0)
    else:
        expected = seen[0].double()
        for value in seen[1:]:
            expected = expected + (1 - decay) * (value.double() - expected)
    inner = next(module for module in ema.modules() if hasattr(module, "first"))
    torch.testing.assert_close(inner.first.weight.double(), expected, rtol=1e-6, atol=1e-8)
    assert ema(batch(0)[0]).dtype is torch.float32
    session.close()


@every_plan
def test_a_saved_model_is_an_ordinary_fp32_one(name, low, tmp_path):
    model, opt, session = start(name, low)
    train(session, model, opt, range(2))
    torch.save(model, tmp_path / "model.pt")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    session.close()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(loaded) is type(model)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"model": m}, lambda m: nn.Sequential(m)])
def test_a_saved_model_loads_with_weights_only_as_torchs_does(name, wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low="bf16")
    buffer = io.BytesIO()
    torch.save(wrap(model), buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.LayerNorm, nn.BatchNorm1d, set]):
        loaded = torch.load(buffer, weights_only=True)
    loaded = loaded["model"] if isinstance(loaded, dict) else loaded
    loaded = loaded[0] if isinstance(loaded[0], nn.Sequential) else loaded
    assert type(loaded) is nn.Sequential
    assert [p.dtype for p in loaded.parameters()] == [torch.float32] * 6
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    session.close()


class Named(nn.Module):
    """A model whose forward asks for its class, as logging and registries do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * len(self.__class__.__name__)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler])
def test_a_pickled_model_goes_on_in_its_session(protocol, pickler):
    model = Named()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    entered = type(model)
    buffer = io.BytesIO()
    pickler(buffer, protocol).dump([model, model])
    assert type(model) is model.__class__ is entered
    first, second = pickle.loads(buffer.getvalue())
    assert first is second
    assert type(first) is Named
    assert model(torch.ones(2, 4)).shape == (2, 4)
    session.close()
    assert type(model) is model.__class__ is Named


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_a_deep_copy_has_plain_classes_after_the_session(name):
    """What goes by a module's exact class, as `quantize_dynamic` does, knows the modules of a copy then."""
    model = nn.Sequential(Named(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name):
        twins = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module]
        inner = copy.deepcopy(model[1])
    plain = [nn.Sequential, Named, nn.Linear, nn.Sequential, nn.Linear, nn.ReLU]
    assert [[type(m) for m in twin.modules()] for twin in twins] == [plain, plain]
    assert [type(m) for m in inner.modules()] == plain[3:]
    held = [value for twin in twins for m in twin.modules() for key, value in vars(m).items() if "halfstep" in key]
    assert set(held) <= {None}


def test_another_thread_sees_the_class_of_a_model_that_is_being_pickled():
    model = Named()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    seen = []
    model.__reduce_ex__(2)
    thread = threading.Thread(target=lambda: seen.append(model.__class__))
    thread.start()
    thread.join()
    assert seen == [type(model)]
    assert model.__class__ is Named  # what the pickler looks at, once
    assert model.__class__ is type(model)
    session.close()


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("name", ["O1", "O2"])
def test_a_compiled_model_that_asks_for_its_class_goes_as_before(name):
    model = Named()
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), name, low="bf16")
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    session.close()


def test_a_saved_model_loads_where_halfstep_is_not_installed(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="bf16")
    torch.save(model, tmp_path / "model.pt")
    session.close()
    with monkeypatch.context() as patch:
        for name in [each for each in sys.modules if each.partition(".")[0] == "halfstep"]:
            patch.setitem(sys.modules, name, None)  # an import of it is an error
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert loaded(torch.ones(2, 4)).dtype == torch.float32


def test_a_part_of_a_model_can_be_saved_by_itself():
    model, _, session = start("O2", "bf16")
    buffer = io.BytesIO()
    torch.save(model.first, buffer)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), nn.Linear)
    session.close()


@pytest.mark.slow_but("O0", "O1-fp16", "O2-bf16")
@every_plan
def test_initialize_again_ends_the_session_before_with_a_notice(name, low, caplog):
    model, opt = make()
    classes = [type(m) for m in model.modules()]
    first = halfstep.initialize(model, opt, "O2", low="bf16")
    train(first, model, opt, range(2))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "halfstep"):
        second = halfstep.initialize(model, opt, name, low=low)
    assert "still in a session" in caplog.text
    assert first.closed
    if name != "O3":
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key]), key
    train(second, model, opt, range(2, 4))
    second.close()
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O2", "O3"])
def test_initialize_again_gives_weights_the_formats_that_a_first_session_does(name, low):
    def formats(again):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        model.append(nn.Linear(8, 8))[3].weight = model[2].weight  # tied
        optimizer = torch.optim.AdamW(model.parameters())
        if again:
            halfstep.initialize(model, optimizer, name, low=low)
        with halfstep.initialize(model, optimizer, name, low=low, rules=[halfstep.Rule("0", halfstep.FULL)]) as session:
            session.backward(model(torch.ones(4, 8)).square().mean())
            session.step()
            return [p.dtype for p in model.parameters()], session.assignment.modules, session.status().memory

    assert formats(again=True) == formats(again=False)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.seen = x.dtype
        return x


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_initialize_again_takes_up_a_rule_on_a_module_that_is_never_called(name):
    model = Tower()
    halfstep.initialize(model, None, name, low="bf16")
    rules = [halfstep.Rule("blocks", halfstep.Policy("full", "full", "full"))]
    with halfstep.initialize(model, None, name, low="bf16", rules=rules):
        model(torch.ones(2, 4))
    assert model.seen is torch.float32


def test_initialize_again_refuses_a_tied_weight_in_two_formats_and_changes_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    with halfstep.initialize(model, optimizer, "O2", low="bf16") as session:
        with pytest.raises(halfstep.PlanError, match="are one tied parameter"):
            halfstep.initialize(model, optimizer, session.plan.edit(halfstep.Rule("1", halfstep.FULL)))
        assert not session.closed
        assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "changes", [{"rules": (halfstep.Rule("nomod", halfstep.FULL),)}, {"ops": {"deny": ["nomod:f"]}}], ids=list
)
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_an_initialize_that_fails_leaves_the_session_before_as_it_was(low, changes):
    model, opt, first = start("O2", low)
    with pytest.raises(halfstep.PlanError, match="nomod"):
        halfstep.initialize(model, opt, "O2", low=low, **changes)
    assert not first.closed
    train(first, model, opt, range(2))
    first.close()


@pytest.mark.parametrize("name", ["O0", "O1", "O2"])
def test_initialize_of_a_part_ends_the_session_of_the_whole(name):
    model, _, first = start(name, "bf16")
    part = model.first
    second = halfstep.initialize(part, torch.optim.SGD(part.parameters(), lr=0.1), "O2", low="bf16")
    assert first.closed
    assert model.head.weight.dtype is torch.float32
    second.close()


@pytest.mark.parametrize("name", ["O0", "O1"])
def test_a_pickled_model_and_its_parts_bear_no_mark(name):
    model, _, session = start(name, "bf16")
    for module in (model, model.first):
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        assert not torch.load(buffer, weights_only=False).__dict__.get("_halfstep_session")
    session.close()


class Table(nn.Module):
    """A module that has a buffer alone, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.arange(4.0))

    def forward(self, x):
        return x * self.rows


def one_of_each():
    norms = [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Sequential(nn.LayerNorm(4), nn.ReLU())]
    plain = [nn.ReLU(), nn.Identity(), nn.Dropout(), nn.Flatten(), Table()]
    lists = [nn.ModuleList([nn.Linear(4, 4)]), nn.ParameterList([torch.ones(3)]), nn.ModuleDict({"a": nn.LayerNorm(4)})]
    layers = [nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 4).requires_grad_(False), nn.PReLU()]
    return nn.Sequential(*norms, *plain, *lists, *layers, nn.Linear(4, 4).double())


@pytest.mark.slow_but("O1", "O3")
@pytest.mark.parametrize("name", ["O0", "O1", "O2", "O3"])
def test_each_part_of_a_model_is_saved_as_torch_saves_it_and_loads_with_weights_only(name):
    model = one_of_each()
    names = [name for name, _ in model.named_modules()]
    kinds = {type(module) for module in model.modules()} | {nn.modules.linear.NonDynamicallyQuantizableLinear, set}
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype is torch.float32]
    with halfstep.initialize(model, torch.optim.SGD(trained, lr=0.1), name, low="bf16"):
        for part in map(model.get_submodule, names):
            buffer = io.BytesIO()
            torch.save(part, buffer)
            assert b"halfstep" not in buffer.getvalue()
            buffer.seek(0)
            with torch.serialization.safe_globals(list(kinds)):
                again = torch.load(buffer, weights_only=True)
            assert type(again) in kinds
            state = part.state_dict()
            again.load_state_dict(state)
            for key, value in again.state_dict().items():
                assert value.dtype is state[key].dtype is not torch.bfloat16
                assert torch.equal(value, state[key]), key
    assert {type(module) for module in model.modules()} < kinds


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.norm = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x)))


@pytest.mark.parametrize("name", ["O0", "O1"])
def test_what_is_saved_together_stays_tied_where_weights_are_stored_in_fp32(name):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    session = halfstep.initialize(model, optimizer, name, low="bf16")
    session.backward(model(torch.arange(3)).sum())
    session.step()
    buffer = io.BytesIO()
    torch.save([model, model.embed, model.norm, optimizer], buffer)
    buffer.seek(0)
    whole, embed, norm, own = torch.load(buffer, weights_only=False)
    assert embed.weight is whole.head.weight is own.param_groups[0]["params"][0]
    assert norm.running_mean is whole.norm.running_mean
    assert torch.equal(embed.weight, model.embed.weight)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_a_tied_weight_is_one_tensor_in_a_state_and_each_state_has_its_own(name, low):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.initialize(model, optimizer, name, low=low, loss_scale=1.0) as session:
        first, other = model.state_dict(), {}
        assert first["head.weight"].data_ptr() == first["embed.weight"].data_ptr()
        before = first["embed.weight"].clone()
        session.backward(model(torch.arange(3)).sum())
        session.step()
        model.state_dict(destination=other)
        assert other["head.weight"].data_ptr() == other["embed.weight"].data_ptr()
        assert not torch.equal(other["head.weight"], before)
        assert torch.equal(model.head.state_dict()["weight"], other["head.weight"])
        model.state_dict(destination=first)  # once more into one that is there
        assert torch.equal(first["embed.weight"], other["embed.weight"])
        assert torch.equal(first["head.weight"], other["embed.weight"])


class Coder(nn.Module):
    """A model without a forward: its methods are called."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.001))
        self.more = nn.ParameterList([torch.full((3,), 1.001)])
        self.layers = nn.ModuleDict({"encoder": nn.Linear(4, 4)})


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_models_without_a_forward_are_copied_and_saved_in_fp32(level):
    model = Coder()
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, low="bf16")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    kinds = [Coder, nn.ParameterList, nn.ModuleDict, nn.Linear, set]
    with torch.serialization.safe_globals(kinds):
        loaded = torch.load(file, weights_only=True)
    given = 1.001 if level != "O3" else float(torch.tensor(1.001).bfloat16())
    for twin in (copy.deepcopy(model), loaded):
        assert torch.equal(twin.scale, torch.full((4,), given))
        assert torch.equal(twin.more[0], torch.full((3,), given))
    assert copy.deepcopy(model.more)[0].dtype is torch.float32


def compare_in_process(model, expected):
    sys.exit(0 if all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True)) else 1)


def test_a_model_with_low_weights_is_sent_to_another_process():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    expected = [p.detach().clone() for p in model.parameters()]
    with halfstep.initialize(model, None, "O2", low="bf16"):
        process = torch.multiprocessing.get_context(forks.METHOD).Process(
            target=compare_in_process, args=(model, expected)
        )
        process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_session_is_not_copied(copied):
    model = nn.Linear(2, 2)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16")
    with pytest.raises(halfstep.SessionError, match=r"copy the model and call halfstep\.initialize"):
        copied(session)
