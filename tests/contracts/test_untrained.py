"""Weights that no optimizer of a session updates: how they are stored, read and written, and when they are trained."""

import copy
import logging

import pytest
import torch
from torch import nn

import halfstep
from halfstep import LOW, Rule
from halfstep.errors import SessionError

LOW_PLANS = pytest.mark.parametrize(("level", "low"), [("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
RATE = 1e-3  # of an average: what it adds is below half a unit in the last place of both low formats


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x + self.linear(self.norm(x)) * self.gamma


class Transformer(nn.Module):
    """Has the weights that would widen a stream of activations: an embedding, position tables, scales of layers."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.both = nn.Bilinear(width, width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, ids):
        x = torch.cat([self.first.expand(len(ids), -1, -1), self.embedding(ids)], 1) + self.positions
        x = self.blocks(x).mean(1)
        return self.head(self.both(x, x))


IDS = torch.arange(8).view(2, 4)


def opened(level="O2", low="bf16", *, model=None, frozen=True, **options):
    """Returns a Transformer of which only the head is trained, its optimizer and its session."""
    if model is None:
        torch.manual_seed(0)
        model = Transformer()
    if frozen:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-2)
    return model, optimizer, halfstep.initialize(model, optimizer, level, low=low, **options)


def body_of(model):
    return [p for name, p in model.named_parameters() if not name.startswith("head")]


def step(model, session, ids=IDS):
    for optimizer in session.optimizers:
        optimizer.zero_grad()
    session.backward(model(ids).square().mean())
    return session.step()


def by_data(weights, others):
    for weight, other in zip(weights, others, strict=True):
        weight.data = weight.data * (1 - RATE) + other * RATE


def by_data_in_place(weights, others):
    for weight, other in zip(weights, others, strict=True):
        weight.data.mul_(1 - RATE).add_(other, alpha=RATE)


@torch.no_grad()
def in_place(weights, others):
    for weight, other in zip(weights, others, strict=True):
        weight.mul_(1 - RATE).add_(other, alpha=RATE)


@torch.no_grad()
def by_lerp(weights, others):
    for weight, other in zip(weights, others, strict=True):
        weight.lerp_(other.float(), RATE)


@torch.no_grad()
def by_foreach(weights, others):
    torch._foreach_lerp_(list(weights), [other.float() for other in others], RATE)


@torch.no_grad()
def by_copy(weights, others):
    for weight, other in zip(weights, others, strict=True):
        weight.copy_(weight * (1 - RATE) + other * RATE)


@torch.no_grad()
def by_index(weights, others):
    for weight, other in zip(weights, others, strict=True):
        weight[...] = weight * (1 - RATE) + other * RATE


WRITES = [by_data, by_data_in_place, in_place, by_lerp, by_foreach, by_copy, by_index]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.student(x) + self.teacher(x)


@LOW_PLANS
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_is_kept_exactly(write, level, low):
    pair = Pair()
    expected = [p.detach().clone() for p in pair.teacher.parameters()]
    optimizer = torch.optim.SGD(pair.student.parameters(), 1e-2)
    with halfstep.initialize(pair, optimizer, level, low=low) as session:
        students = [p.detach() for p in pair.student.parameters()]
        for _ in range(3):
            pair(torch.ones(2, 8))
            write(list(pair.teacher.parameters()), students)
            write(expected, students)
        assert all(map(torch.equal, pair.teacher.parameters(), expected))
        assert all(map(torch.equal, pair.teacher.state_dict().values(), expected))
        with session.full_weights():
            write(list(pair.teacher.parameters()), list(pair.student.parameters()))
            write(expected, [p.detach() for p in pair.student.parameters()])
    assert all(map(torch.equal, pair.teacher.parameters(), expected))


@LOW_PLANS
def test_values_of_a_state_dict_are_the_weights_themselves_and_loading_sets_them(level, low):
    pair = Pair()
    with halfstep.initialize(pair, torch.optim.SGD(pair.student.parameters(), 1e-2), level, low=low):
        for value in pair.teacher.state_dict().values():
            value.lerp_(torch.ones_like(value), RATE)
        assert all(map(torch.equal, pair.teacher.parameters(), pair.teacher.state_dict().values()))
        loaded = {name: torch.randn_like(value) for name, value in pair.teacher.state_dict().items()}
        pair.teacher.load_state_dict(loaded)
        assert all(torch.equal(value, loaded[name]) for name, value in pair.teacher.named_parameters())


def test_a_lerp_with_low_weights_fails_in_the_words_that_the_guide_and_check_have():
    pair = Pair()
    with halfstep.initialize(pair, torch.optim.SGD(pair.student.parameters(), 1e-2), "O2", low="bf16") as session:
        with pytest.raises(RuntimeError, match="expected dtype float for `end` but got dtype c10::BFloat16"):
            pair.teacher.weight.lerp_(pair.student.weight.detach(), RATE)
        (finding,) = [each for each in halfstep.check(session) if each.code == "weights without an optimizer"]
        assert "full_weights" in finding.advice
        assert "teacher.weight" in finding.evidence


def test_an_optimizer_outside_of_the_session_steps_in_bf16_and_is_refused_where_the_loss_is_scaled():
    for low in ("bf16", "fp16"):
        model, _, session = opened(low=low, frozen=False)
        outside = torch.optim.SGD([model.positions], 1e-2)
        before = model.positions.detach().clone()
        with session:
            session.backward(model(IDS).square().mean())
            gradient = model.positions.grad.clone()
            assert gradient.dtype is torch.float32
            if low == "fp16":
                with pytest.raises(SessionError, match="carries the loss scale"):
                    outside.step()
                assert torch.equal(model.positions, before)
            else:
                outside.step()
                assert torch.equal(model.positions, before - 1e-2 * gradient)


def dtypes(model, session, ids=IDS):
    """The dtypes that each module takes and returns, and whether a parameter was combined in another one."""
    found = {}

    def note(name):
        return lambda module, args, out: found.__setitem__(name, (args[0].dtype, out.dtype))

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


@LOW_PLANS
def test_frozen_weights_do_not_change_the_formats_of_activations(level, low):
    torch.manual_seed(0)
    trained = Transformer()
    with halfstep.initialize(trained, torch.optim.SGD(trained.parameters(), 1e-2), level, low=low) as session:
        expected = dtypes(trained, session)
    assert {pair[1] for name, pair in expected.items() if name} == {session.plan.low.dtype}
    model, _, session = opened(level, low)
    with session:
        assert dtypes(model, session) == expected
        with torch.no_grad():
            assert dtypes(model, session) == expected
            assert dtypes(model.eval(), session) == expected
        assert model.positions.dtype is torch.float32


@pytest.mark.slow
def test_compiled_code_reads_the_low_form_too():
    model, _, session = opened(emulate=False)
    with session:
        plain = model(IDS)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(IDS), plain)


def test_the_assignment_and_the_memory_say_what_is_stored_full():
    model, _, session = opened()
    with session:
        body = body_of(model)
        assert {p.dtype for p in body} == {torch.float32}
        assert model.head.weight.dtype is torch.bfloat16
        formats = session.assignment.of("blocks.0")
        assert (formats.kept, str(formats.param), formats.reason) == (("gamma",), "fp32", "O2, no optimizer")
        assert "no optimizer" in str(session.assignment)
        memory = session.status().memory
        head = sum(p.numel() for p in model.head.parameters())
        assert memory["weights"] + memory["masters"] == 4 * sum(p.numel() for p in body) + 4 * head


def test_a_module_of_which_only_some_weights_are_trained():
    torch.manual_seed(0)
    model = Block(8)
    model.linear.weight.requires_grad_(False)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 1e-2), "O2", low="bf16") as session:
        assert (model.linear.weight.dtype, model.linear.bias.dtype) == (torch.float32, torch.bfloat16)
        formats = session.assignment.of("linear")
        assert (str(formats.param), formats.kept) == ("bf16", ("weight",))
        assert formats.reason == "O2, no optimizer for weight"


def test_weights_that_were_loaded_low_stay_as_they_are():
    torch.manual_seed(0)
    model = Transformer()
    model.requires_grad_(False).to(torch.bfloat16)
    model.head.float()
    model, _, session = opened(model=model)
    with session:
        assert {p.dtype for p in body_of(model)} == {torch.bfloat16}
        assert session.status().memory["masters"] == 2 * sum(p.numel() for p in model.head.parameters())


@pytest.mark.parametrize("options", [{"frozen": "low"}, {"rules": [Rule("linear", LOW)]}], ids=["keyword", "rule"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_low_storage_is_two_bytes_if_it_is_asked_for(options, low):
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    value = model["linear"].weight.detach().clone()
    session = halfstep.initialize(model, torch.optim.SGD(model["head"].parameters(), 1e-2), "O2", low=low, **options)
    with session:
        weight = model["linear"].weight
        assert weight.dtype is session.plan.low.dtype
        assert session.status().memory["masters"] == sum(p.numel() for p in model["head"].parameters()) * (
            2 if low == "bf16" else 4
        )
        assert torch.equal(model.state_dict()["linear.weight"], weight.detach().float())
        weight.requires_grad_(True)
        session.optimizers[0].add_param_group({"params": [weight]})
        session.backward(model["head"](model["linear"](torch.ones(2, 8))).square().mean())
        with pytest.raises(SessionError, match=r"linear.weight.* has no fp32 value"):
            session.step()
    assert torch.equal(weight, value.to(session.plan.low.dtype).float()) or low == "bf16"  # where ties differ


def test_a_line_says_what_low_storage_would_save(caplog):
    model = nn.ModuleDict({"large": nn.Linear(1024, 1024), "head": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model["head"].parameters(), 1e-2)
    with caplog.at_level(logging.WARNING, "halfstep"), halfstep.initialize(model, optimizer, "O2", low="bf16"):
        pass
    (line,) = [each for each in caplog.messages if "no optimizer updates" in each]
    assert "frozen='low'" in line
    assert "save 2.00 MiB" in line


def test_inference_stores_all_weights_low():
    torch.manual_seed(0)
    model = Transformer().requires_grad_(False)
    with halfstep.initialize(model, None, "O2", low="bf16"):
        assert {p.dtype for p in body_of(model)} == {torch.bfloat16, torch.float32}  # norms
        assert model.positions.dtype is torch.bfloat16


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.parametrize("how", ["unfreeze", "add_param_group", "add_optimizers"])
def test_a_weight_that_gets_an_optimizer_later_is_stored_as_trained_ones_exactly(how, low):
    model, optimizer, session = opened(low=low)
    body = body_of(model)
    if how == "unfreeze":
        optimizer.add_param_group({"params": body})
    step(model, session)
    before = [p.detach().clone() for p in body]
    assert {p.dtype for p in body} == {torch.float32}
    for p in body:
        p.requires_grad_(True)
    if how == "add_param_group":
        optimizer.add_param_group({"params": body})
    elif how == "add_optimizers":
        session.add_optimizers([torch.optim.AdamW(body, 1e-2)])
    if low == "bf16":  # a step of nothing: the weights only move, bit for bit
        for group in (group for each in session.optimizers for group in each.param_groups):
            group["lr"], group["weight_decay"] = 0.0, 0.0
    step(model, session)
    assert {p.dtype for p in body} == {session.plan.low.dtype, torch.float32}  # the norms
    assert model.positions.dtype is session.plan.low.dtype
    assert all("no optimizer" not in formats.reason for formats in session.assignment.modules)
    state = {id(p): model.state_dict()[name] for name, p in model.named_parameters()}
    same = [torch.equal(state[id(p)], value) for p, value in zip(body, before, strict=True)]
    assert all(same) if low == "bf16" else not any(same)
    step(model, session)
    model(IDS)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_a_copy_of_the_model_reads_low_and_is_written_exactly():
    model, _, session = opened()
    with session:
        twin = copy.deepcopy(model)
        assert dtypes(twin, session) == dtypes(model, session)
        twin.positions.data.lerp_(torch.ones(1, 5, 8), RATE)
        assert twin.positions.dtype is torch.float32
        assert not torch.equal(twin.positions, model.positions)


def test_close_gives_the_class_of_each_module_back():
    model, _, session = opened()
    session.close()
    assert type(model) is Transformer
    assert "positions" not in vars(Transformer)
    model.positions = nn.Parameter(torch.zeros(1, 5, 8))
    model(IDS)


def test_a_session_state_that_an_earlier_version_saved_still_loads():
    _, _, session = opened()
    with session:
        state = session.state_dict()
        del state["plan"]["frozen"]
        session.load_state_dict(state)


def test_an_empty_list_of_optimizers_keeps_what_is_frozen_for_those_that_come():
    torch.manual_seed(0)
    model = Pair()
    with halfstep.initialize(model, [], "O2", low="bf16") as session:
        assert model.teacher.weight.dtype is torch.float32
        assert model.student.weight.dtype is torch.bfloat16
        session.add_optimizers([torch.optim.SGD(model.student.parameters(), 1e-2)])
        session.backward(model(torch.ones(2, 8)).square().mean())
        session.step()
        assert model.teacher.weight.dtype is torch.float32
