"""halfstep inside Accelerate: the numbers of a loop by hand, resume from its files, and what it refuses."""

import runpy

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed; run ./dev adapters")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import halfstep  # noqa: E402
from halfstep.adapters import accelerate as adapter  # noqa: E402
from halfstep.adapters.accelerate import prepare, session_of  # noqa: E402
from halfstep.errors import SessionError, SetupError  # noqa: E402
from tests.trainers.loops import (  # noqa: E402
    ACCUMULATE,
    MAX_NORM,
    SETTINGS,
    Trained,
    bad_at,
    batches,
    by_hand,
    loss_of,
    network,
    optimizer_of,
    same_losses,
    same_weights,
    schedule_of,
    share,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accelerator_of(**settings):
    return Accelerator(cpu=True, **settings)


def opened(level, low, **settings):
    accelerator = accelerator_of(gradient_accumulation_steps=ACCUMULATE)
    model = network()
    optimizer = optimizer_of(model, **settings)
    prepared = prepare(accelerator, model, optimizer, schedule_of(optimizer), plan=level, low=low)
    return (accelerator, model, *prepared)


def train(level, low, trained, count=100, first=0, load=None, rank=None, **settings):
    accelerator, own, model, optimizer, schedule = opened(level, low, **settings)
    if load is not None:
        accelerator.load_state(load)
    for batch in share(batches(100, bad_at(level)), rank)[first:count]:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            trained.losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            if accelerator.sync_gradients:
                trained.skipped += accelerator.optimizer_step_was_skipped
            schedule.step()
            optimizer.zero_grad()
    trained.weights = {key: value.clone() for key, value in own.state_dict().items()}
    trained.rates = schedule.get_last_lr()
    return accelerator


def unscheduled(level, low):
    """By hand as Accelerate trains: its schedulers leave a skipped step out."""
    return by_hand(level, low, leave_out=True)


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_a_loop_trains_bit_for_bit_as_the_one_by_hand(level, low):
    trained, other = Trained(), unscheduled(level, low)
    accelerator = train(level, low, trained)
    assert same_losses(trained.losses, other.losses)
    assert same_weights(trained.weights, other.weights)
    assert trained.skipped == other.skipped == (0 if level == "O0" else 1)
    assert trained.rates == [other.rates[-1]]
    session_of(accelerator).close()


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_a_run_that_is_stopped_and_resumed_from_save_state_is_bit_identical(level, low, tmp_path):
    trained, other = Trained(), unscheduled(level, low)
    train(level, low, trained, 60).save_state(tmp_path / "at")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = train(level, low, trained, first=60, load=tmp_path / "at")
    assert same_losses(trained.losses, other.losses)
    assert same_weights(trained.weights, other.weights)
    assert session_of(accelerator).status().steps == 50
    held = load_file(tmp_path / "at" / "model.safetensors")
    assert {value.dtype for value in held.values()} == {torch.float32}
    network().load_state_dict(held)


@pytest.mark.parametrize(("name", "settings"), [("AdamW", {"fused": True}), ("RMSprop", {})])
def test_fused_and_other_optimizers_train_as_by_hand(name, settings):
    trained = Trained()
    train("O2", "bf16", trained, name=name, **settings)
    assert same_weights(trained.weights, by_hand("O2", "bf16", name=name, leave_out=True, **settings).weights)


def test_backward_takes_what_torchs_takes_and_a_step_its_closure():
    accelerator, _, model, optimizer, _ = opened("O2", "bf16")
    first, second = batches(2, None)
    accelerator.gradient_accumulation_steps = 1
    loss = loss_of(model, first)
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    optimizer.zero_grad()
    losses = []

    def closure():
        losses.append(loss_of(model, second))
        accelerator.backward(losses[-1])

    with torch.no_grad():
        optimizer.step(closure)
    assert len(losses) == session_of(accelerator).status().steps == 1


def test_what_accelerate_has_prepared_before_tells_its_skipped_steps():
    accelerator = accelerator_of()
    optimizer = optimizer_of(model := network())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    model, optimizer, schedule = prepare(accelerator, model, optimizer, schedule, plan="O1", low="bf16")
    flags, rates = [], []
    for number, batch in enumerate(batches(4, None)):
        accelerator.backward(loss_of(model, batch) * (torch.inf if number == 1 else 1))
        optimizer.step()
        flags.append(accelerator.optimizer_step_was_skipped)
        schedule.step()
        rates.append(schedule.get_last_lr())
        optimizer.zero_grad()
    assert flags == [False, True, False, False]
    assert rates[0] == rates[1] != rates[2]


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_an_optimizer_that_calls_its_closure_several_times_steps_as_by_hand(level):
    def trained(model, optimizer, backward):
        for batch in batches(3, None):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                backward(loss)
                return loss

            optimizer.step(closure)
        return {key: value.clone() for key, value in model.state_dict().items()}

    accelerator = accelerator_of()
    model = network()
    made = torch.optim.LBFGS(model.parameters(), lr=0.1)
    prepared, optimizer = prepare(accelerator, model, made, plan=level, low="bf16")
    found = trained(prepared, optimizer, accelerator.backward)
    assert session_of(accelerator).status().steps == 3
    assert not accelerator.optimizer_step_was_skipped
    other = network()
    own = torch.optim.LBFGS(other.parameters(), lr=0.1)
    with halfstep.initialize(other, own, level, low="bf16") as session:
        assert same_weights(found, trained(other, own, session.backward))


def test_mixed_precision_left_on_is_refused_by_the_line_to_change():
    accelerator = accelerator_of(mixed_precision="bf16")
    model = network()
    with pytest.raises(SetupError, match=r"mixed_precision='bf16' together with halfstep.*Accelerator\(\.\.\.\)"):
        prepare(accelerator, model, optimizer_of(model))
    assert accelerator.scaler is None


def test_a_model_is_on_its_device_before_the_session_opens():
    stored = []

    class Moved(torch.nn.Linear):
        def to(self, *args, **kwargs):
            stored.append(self.weight.dtype)
            return super().to(*args, **kwargs)

    accelerator = accelerator_of()
    prepare(accelerator, Moved(4, 4), plan="O2", low="bf16")
    assert stored[0] is torch.float32
    session_of(accelerator).close()


def test_a_model_that_fsdp1_wraps_is_refused_at_every_level():
    wrapped = type("FullyShardedDataParallel", (torch.nn.Linear,), {})(4, 4)
    with pytest.raises(SetupError, match=r"does not work with Accelerate's FSDP1; use one device.*or FSDP2 \("):
        prepare(accelerator_of(), wrapped, optimizer_of(wrapped), plan="O0")


def test_a_distributed_type_and_a_scaler_that_do_not_go_with_halfstep_are_refused():
    accelerator, model = accelerator_of(), network()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(SetupError, match=r"already has a scaler, .*; do not set it"):
        prepare(accelerator, model, optimizer_of(model))
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(SetupError, match=r"does not work with Accelerate's DEEPSPEED; use one device.*or FSDP2 \("):
        prepare(accelerator, model, optimizer_of(model))


def test_a_second_call_and_a_replaced_optimizer_are_refused_before_a_step():
    with pytest.raises(SetupError, match="called without a model; pass all models and optimizers"):
        prepare(accelerator_of(), optimizer_of(network()))
    accelerator, own, model, _, _ = opened("O1", "bf16")
    with pytest.raises(SetupError, match="one call of prepare"):
        prepare(accelerator, network())
    other = accelerator.prepare(optimizer_of(own, "SGD"))
    accelerator.backward(loss_of(model, batches(1, None)[0]))
    with pytest.raises(SetupError, match=r"this SGD is not an optimizer of the session.*prepare\(accelerator"):
        other.step()


def test_a_prepare_that_fails_leaves_nothing_for_the_next(monkeypatch):
    accelerator, model = accelerator_of(), network()
    with monkeypatch.context() as failing:
        failing.setattr(accelerator, "prepare_model", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            prepare(accelerator, model, optimizer_of(model), plan="O2", low="bf16")
    assert accelerator.scaler is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prepare(accelerator, model, optimizer_of(model), plan="O1", low="bf16")
    with pytest.raises(SetupError, match="already has a session"):  # which stays open
        prepare(accelerator, network())
    assert not session_of(accelerator).closed


def test_an_accelerator_without_a_session_and_another_version_are_told(monkeypatch):
    with pytest.raises(SessionError, match="prepare"):
        session_of(accelerator_of())
    monkeypatch.setattr(accelerate, "__version__", "0.30.1")
    with pytest.raises(SetupError, match=r"accelerate 0\.30\.1 is installed.*pip install 'accelerate>="):
        runpy.run_path(adapter.__file__)
