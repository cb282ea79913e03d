"""Rehearsals: what a closure sees of the session and its models while it runs again, and that nothing of it stays."""

import copy

import pytest
import torch
from torch import nn

import halfstep
from halfstep import SessionError
from tests.diagnose.faults.hosts import Cnn, images, targets
from tests.diagnose.faults.plants import Gain


def opened(model, plan="O1", **options):
    return halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan, low="fp16", **options)


def fails(model, look=lambda: None):
    inputs, labels = images(), targets()

    def closure():
        look()
        return nn.functional.cross_entropy(model(inputs), labels)

    return closure


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_a_rehearsal_adds_no_attribute_to_the_session_and_no_forward_to_modules(plan):
    model = Cnn(Gain())
    session = opened(model, plan)
    own, parts = set(vars(session)), [set(vars(module)) for module in model.modules()]
    classes = [type(module) for module in model.modules()]
    seen = []

    def look():
        assert set(vars(session)) == own
        seen.append([{n for n in vars(m) if n != "_halfstep_stand_in"} for m in model.modules()])

    verdict = halfstep.blame(session, fails(model, look))
    assert "tried" in verdict.advice  # on copies, too
    assert len(seen) > 3
    assert all(each == parts for each in seen)
    assert [set(vars(module)) for module in model.modules()] == parts
    assert [type(module) for module in model.modules()] == classes


def test_parts_that_a_closure_calls_itself_are_those_of_the_copy_under_its_plan():
    model = Cnn(Gain())
    session = opened(model)
    inputs, labels, formats = images(), targets(), set()

    def closure():
        with session.autocast():
            x = model.plant(model.norm(model.conv1(inputs)))
            formats.add(x.dtype)
            x = torch.relu(model.conv2(x)).mean((2, 3))
            return nn.functional.cross_entropy(model.head(x), labels)

    verdict = halfstep.blame(session, closure)
    assert verdict is not None
    assert "in fp32 the closure's loss is" in verdict.evidence
    assert formats == {torch.float16, torch.float32}


@pytest.mark.usefixtures("process_group")
def test_a_wrapper_of_data_parallel_training_is_left_as_it_is():
    model = Cnn(Gain())
    session = opened(model)
    wrapper = nn.parallel.DistributedDataParallel(model)
    own, inputs, labels, seen = set(vars(wrapper)), images(), targets(), []

    def closure():
        seen.append(set(vars(wrapper)) - {"_halfstep_stand_in"})
        return nn.functional.cross_entropy(wrapper(inputs), labels)

    verdict = halfstep.blame(session, closure)
    assert verdict is not None
    assert verdict.module == "plant"
    assert all(each == own for each in seen)
    assert type(wrapper) is nn.parallel.DistributedDataParallel
    assert set(vars(wrapper)) == own


def test_a_copy_that_a_closure_makes_runs_itself():
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)
    session = opened(model)
    outputs = []

    def closure():
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.zero_()
            outputs.append(float(teacher(inputs).abs().max()))
        return (model(inputs) * 1e6).half().float().square().mean()

    verdict = halfstep.blame(session, closure)
    assert verdict is not None
    assert outputs
    assert set(outputs) == {0.0}


class Adapted(nn.Module):
    """A linear layer to whose weight is added what its caller leaves in an attribute."""

    def __init__(self):
        super().__init__()
        self.weight, self.up = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.full((4, 2), 400.0))

    def forward(self, x):
        return nn.functional.linear(x, self.weight + self.extra)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_what_a_closure_writes_to_an_attribute_the_copies_have_too(plan, trained):
    torch.manual_seed(0)
    model = Adapted()
    session = opened(model, plan, on_failure="warn")

    def closure():
        model.extra = model.up @ model.up.new_full((2, 8), 400.0)  # 400 * 400 * 2 is 320,000
        return model(torch.ones(4, 8)).float().square().mean().sqrt()

    if trained:
        session.backward(closure())
        session.step()
    verdict = halfstep.blame(session, closure)
    said = f"{verdict.evidence}; {verdict.advice}"
    assert "does not repeat" not in said
    assert "cannot be copied" not in said
    assert (verdict.operator, bool(verdict.cure)) == (("linear", True) if plan == "O1" else ("matmul", False))
    assert ("tried: the closure's loss is then" in said) == (plan == "O1")
    assert ("the code also reads weights of the original ones" in said) == (plan == "O2")


def test_a_rehearsal_inside_a_closure_is_refused_and_ends_the_outer_one():
    model = Cnn(Gain())
    session = opened(model)
    with pytest.raises(SessionError, match="cannot be called inside a closure"):
        halfstep.blame(session, lambda: halfstep.check(session, lambda: None))
    loss = fails(model)()
    session.backward(loss)  # open for training again
    session.step()


@pytest.mark.parametrize("method", ["backward", "step", "unscale_"])
def test_a_closure_cannot_train(method):
    model = Cnn(Gain())
    session = opened(model)
    given = {"backward": [torch.ones((), requires_grad=True)]}.get(method, [])
    with pytest.raises(SessionError, match="leave out backward and step"):
        halfstep.blame(session, lambda: getattr(session, method)(*given))


@pytest.mark.parametrize("given", [None, "closed", object()], ids=["None", "closed", "object"])
def test_blame_takes_an_open_session(given):
    model = nn.Linear(4, 4)
    if given == "closed":
        given = opened(model)
        given.close()
    with pytest.raises(
        SessionError, match=r"takes an open session, .*; pass first what .*: halfstep\.blame\(session, closure\)"
    ):
        halfstep.blame(given, lambda: model(torch.ones(4)).sum())


class Notes:
    """A watcher that keeps what it is told."""

    pending = None

    def __init__(self):
        self.told = []

    def carry(self, scale):
        self.told.append(("carry", float(scale)))

    def after_step(self, record, parts, scales, stopping):
        self.told.append(("step", record.step, len(parts), {loss: float(scale) for loss, scale in scales.items()}))

    def close(self):
        self.told.append("close")


def test_a_watcher_is_told_of_each_backward_pass_and_step_and_of_the_end():
    model = nn.Linear(4, 4)
    session = opened(model, loss_scale=8.0)
    notes = Notes()
    session.watchers.append(notes)
    session.backward(model(torch.ones(4)).sum(), loss_id=3)
    session.step()
    assert notes.told == [("carry", 8.0), ("step", 1, 1, {3: 8.0})]
    halfstep.blame(session, lambda: model(torch.ones(4)).sum())
    assert notes.told[2:] == ["close"]  # what it has left on for the next step
    session.close()
    assert notes.told[3:] == ["close"]


@pytest.mark.parametrize(("plan", "watched"), [("O0", False), ("O1", True)])
def test_the_guardian_watches_where_steps_may_be_skipped(plan, watched):
    model = nn.Linear(4, 4)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters()), plan, low="bf16") as session:
        assert bool(session.watchers) is watched
    with halfstep.initialize(model, None, plan, low="bf16") as session:
        assert bool(session.watchers) is watched  # an optimizer may come later
