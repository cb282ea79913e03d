"""Two processes that train one model: what one of them looks at alone, and what each says of the other."""

import functools

import pytest
import torch
from torch import nn

import halfstep
from halfstep import NumericsError, Scaling, SetupError
from halfstep.explain.diagnose.counter import WINDOW
from tests.contracts.cases import overflowing

DDP = nn.parallel.DistributedDataParallel
ACCUMULATED = [("O0", "bf16"), ("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "fp16")]
COMES_DOWN = Scaling("dynamic", init=2.0**12)  # to its floor of 1, in 12 skips


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def batch(rank, step=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def opened(low="bf16", *, level="O1", loss_scale=None, **wrapping):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, level, low=low, loss_scale=loss_scale)
    return session, optimizer, model, DDP(model, **wrapping)


def guarded(rank, low, *, broken=(1,), late=False, level="O1", loss_scale=None, **wrapping):
    """Trains on batches that are not finite on the `broken` ranks, or whose gradients alone are not, if `late`.

    Returns the step that raised, and the verdict.
    """
    session, optimizer, _, wrapped = opened(low, level=level, loss_scale=loss_scale, **wrapping)
    inputs = batch(rank) * (torch.nan if rank in broken and not late else 1.0)
    try:
        for _ in range(8 * WINDOW):
            optimizer.zero_grad()
            loss = wrapped(inputs).float().mean()
            session.backward(overflowing(loss) if rank in broken and late else loss)
            session.step()
    except NumericsError as error:
        verdict = error.verdict
        return session.status().steps, verdict.kind, verdict.operator, verdict.phase, str(error)
    finally:
        session.close()
    return None


def trained(rank, look):
    """Trains for four steps, with `look(session, loss of a batch)` on rank 1 alone after the first; returns weights."""
    session, optimizer, model, wrapped = opened()
    for step in range(4):
        optimizer.zero_grad()
        session.backward(wrapped(batch(rank, step)).float().square().mean())
        session.step()
        if look is not None and step == 0 and rank == 1:
            look(session, lambda: wrapped(batch(rank) * torch.nan).float().mean())
    session.close()
    return [round(float(t.double().sum()), 6) for t in model.parameters()]


def accumulated(rank, level, low, *, apart=False):
    """Trains on two batches a step, of which only the second has its gradients reduced; returns the model's results.

    Or on two losses `apart`, whose scales differ; returns that of the second, too.
    """
    scale = Scaling("dynamic", init=2.0**8) if apart else None if level == "O0" else 2.0**10
    session, optimizer, model, wrapped = opened(low, level=level, loss_scale=scale)
    if apart:
        state = session.state_dict()
        state["scales"]["1"] = {**state["scales"]["0"], "scale": 2.0**7}
        session.load_state_dict(state)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            session.backward(wrapped(batch(rank, 2 * step)).float().square().mean())
        loss = wrapped(batch(rank, 2 * step + 1)).float().square().mean()
        session.backward(loss, loss_id=int(apart))
        session.step()
    scales = session.status().scales
    session.close()
    return [p.detach().flatten().tolist() for p in model.parameters()], scales.get(1)


def predicted(rank, *, alone):
    """Lets rank 1 ask what-if of a model that both then step once."""
    model = network()
    wrapped = DDP(model)
    if alone and rank == 1:
        halfstep.whatif(lambda: wrapped(batch(rank)).square().mean(), model, "bf16", steps=1, plan="O1")
    wrapped(batch(rank)).square().mean().backward()
    return [round(float(p.grad.double().sum()), 6) for p in model.parameters()]


def refused(rank):
    model = network()
    wrapped = DDP(model)
    try:
        halfstep.whatif(lambda: wrapped(batch(rank)).square().mean(), model, "bf16", steps=1)
    except SetupError as error:
        return str(error)
    return ""


def pooled(folder, slow):
    later = {
        "view": (functools.partial(guarded, gradient_as_bucket_view=True), ("bf16",)),
        "low weights, fp16": (functools.partial(guarded, level="O2", loss_scale=COMES_DOWN), ("fp16",)),
    }
    return (later if slow else {}) | {
        "bf16": (guarded, ("bf16",)),
        "fp16": (functools.partial(guarded, loss_scale=COMES_DOWN), ("fp16",)),
        "backward": (functools.partial(guarded, loss_scale=COMES_DOWN, late=True), ("fp16",)),
        "low weights": (functools.partial(guarded, level="O2"), ("bf16",)),
        "both": (functools.partial(guarded, broken=(0, 1)), ("bf16",)),
        "plain": (trained, (None,)),
        "blame": (trained, (halfstep.blame,)),
        "check": (trained, (halfstep.check,)),
        **{f"accumulated {level} {low}": (accumulated, (level, low)) for level, low in ACCUMULATED},
        **{f"apart {level}": (functools.partial(accumulated, apart=True), (level, "fp16")) for level in ("O1", "O2")},
        "gradients": (functools.partial(predicted, alone=False), ()),
        "whatif": (functools.partial(predicted, alone=True), ()),
        "refused": (refused, ()),
    }


@pytest.mark.slow_but("[bf16", "[fp16", "[low weights]")
@pytest.mark.parametrize("run", ["bf16", "view", "fp16", "low weights", "low weights, fp16"])
def test_gradients_that_another_process_spoiled_are_said_to_be_its(found, run):
    own, others = found[1][run], found[0][run]
    assert own[1:3] == ["input data", "linear"]
    assert others[1:4:2] == ["another process", "backward"]
    assert others[2] in (("alltoall_base", "allreduce") if run.startswith("low weights") else ("allreduce",))
    assert "see the verdicts of the other processes" in others[4]
    assert "would not help" not in others[4]


@pytest.mark.slow_but("[bf16", "[fp16", "[backward")
@pytest.mark.parametrize(
    ("run", "last"),
    [("bf16", WINDOW + 3), ("view", WINDOW + 3), ("fp16", WINDOW + 3), ("backward", 2 * WINDOW + 4)],
)
def test_all_processes_stop_at_the_step_after_that_of_the_floor_of_the_scale_or_of_eight_bad_losses(found, run, last):
    assert [each[run][0] for each in found] == [last, last]


def test_a_process_whose_own_batch_is_bad_too_names_that(found):
    assert [each["both"][1] for each in found] == ["input data", "input data"]


@pytest.mark.parametrize("look", ["blame", "check"])
def test_a_process_may_look_alone_in_the_middle_of_training(found, look):
    assert found[0][look] == found[1][look] == found[0]["plain"] == found[1]["plain"]


@pytest.mark.parametrize(("level", "low"), ACCUMULATED[1:])
def test_gradients_of_several_batches_are_reduced_once_at_every_level(found, level, low):
    one, other = (each[f"accumulated {level} {low}"] for each in found)
    assert one == other
    for trained, full in zip(one[0], found[0]["accumulated O0 bf16"][0], strict=True):
        torch.testing.assert_close(torch.tensor(trained), torch.tensor(full), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_losses_with_scales_of_their_own_are_reduced_together(found, level):
    (one, scale), (other, _) = (each[f"apart {level}"] for each in found)
    assert scale == 2.0**7
    assert one == other


def test_a_process_may_ask_what_if_alone(found):
    assert found[0]["whatif"] == found[1]["whatif"] == found[0]["gradients"] == found[1]["gradients"]


def test_what_if_would_store_the_weights_of_a_wrapped_model_low_and_is_refused(found):
    assert "wrapped in DistributedDataParallel" in found[0]["refused"]
