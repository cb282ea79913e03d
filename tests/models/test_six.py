"""Each of six common models trains at every level in every format as it does in fp32, with no line of it changed."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.initialize import initialize
from tests.models.zoo import TASKS

STEPS = 30
PRODUCTS = (nn.Linear, nn.Conv2d, nn.LSTM)
NORMS = ("GroupNorm", "LayerNorm", "RMSNorm")
PLANS = [(level, low) for level in ("O1", "O2", "O3") for low in ("bf16", "fp16")]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

pytestmark = pytest.mark.usefixtures("one_thread")  # the models are too small for two
every_task = pytest.mark.parametrize("task", TASKS)
every_plan = pytest.mark.parametrize(("level", "low"), PLANS, ids=["-".join(plan) for plan in PLANS])


@dataclass(frozen=True)
class Run:
    """A training run: its losses, the steps that were skipped, and the model, closed."""

    losses: tuple[float, ...]
    skipped: frozenset[int]
    model: nn.Module


@functools.cache
def train(task: str, level: str, low: str) -> Run:
    torch.manual_seed(0)
    model = TASKS[task].build()
    optimizer = TASKS[task].optimizer(model.parameters())
    losses, skipped = [], set()
    with initialize(model, optimizer, level, low=low) as session:
        for step, batch in enumerate(TASKS[task].batches(STEPS)):
            optimizer.zero_grad()
            loss = TASKS[task].loss(model, batch)
            session.backward(loss)
            if session.step().skipped:
                skipped.add(step)
            losses.append(loss.item())
    return Run(tuple(losses), frozenset(skipped), model)


@functools.cache
def train_plain(task: str, skipped: frozenset[int]) -> Run:
    """The same in fp32 without halfstep; it too leaves out the steps that were skipped."""
    torch.manual_seed(0)
    model = TASKS[task].build()
    optimizer = TASKS[task].optimizer(model.parameters())
    losses = []
    for step, batch in enumerate(TASKS[task].batches(STEPS)):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.zero_grad()
        loss = TASKS[task].loss(model, batch)
        loss.backward()
        if step in skipped:
            model.load_state_dict(before, strict=False)
        else:
            optimizer.step()
        losses.append(loss.item())
    return Run(tuple(losses), skipped, model)


def distance(run: Run, other: Run) -> float:
    """The mean absolute difference of two loss curves, as a fraction of the second's mean."""
    gaps = [abs(a - b) for a, b in zip(run.losses, other.losses, strict=True)]
    return sum(gaps) / sum(other.losses)


@pytest.mark.slow_but("LSTM", "diffusion")
@every_task
def test_the_task_can_be_learned(task: str) -> None:
    losses = train_plain(task, frozenset()).losses
    assert max(losses[-5:]) < losses[0] / 3


@pytest.mark.slow_but("LSTM", "diffusion")
@every_task
def test_o0_is_plain_training(task: str) -> None:
    assert train(task, "O0", "bf16").losses == train_plain(task, frozenset()).losses


@every_task
@every_plan
@pytest.mark.slow_but("O2-fp16-LSTM", "O3-bf16-diffusion")
def test_it_trains_as_in_fp32(task: str, level: str, low: str) -> None:
    run = train(task, level, low)
    assert distance(run, train_plain(task, run.skipped)) < (0.05 if low == "bf16" else 0.01)


@every_task
@every_plan
@pytest.mark.slow_but("O1-bf16-ResNet", "O1-bf16-LSTM", "O2-fp16-T5", "O2-fp16-LSTM", "O3-bf16-GPT with a")
def test_few_steps_are_skipped(task: str, level: str, low: str) -> None:
    skipped = train(task, level, low).skipped
    assert len(skipped) <= (2 if low == "fp16" and level != "O3" else 0)


def note_outputs(model: nn.Module) -> dict[str, torch.dtype]:
    """Fills the dictionary it returns with the dtype that each layer with a matrix product gives out."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str, output: Any) -> None:
        seen[name] = (output[0] if isinstance(output, tuple) else output).dtype

    for name, module in model.named_modules():
        if isinstance(module, PRODUCTS):
            module.register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
    return seen


@every_task
@every_plan
def test_layers_run_low_and_the_loss_is_full(task: str, level: str, low: str) -> None:
    model = TASKS[task].build()
    seen = note_outputs(model)
    (batch,) = TASKS[task].batches(1)
    with initialize(model, None, level, low=low):
        loss = TASKS[task].loss(model, batch)
    assert seen
    assert set(seen.values()) == {DTYPES[low]}
    assert loss.dtype is torch.float32


@every_task
@every_plan
def test_weights_are_stored_as_the_level_says(task: str, level: str, low: str) -> None:
    model = TASKS[task].build()
    with initialize(model, None, level, low=low):
        for module in model.modules():
            # BatchNorm's kernel takes low weights with low statistics only
            keeps_statistics = isinstance(module, nn.BatchNorm2d)
            full = level == "O1" or keeps_statistics or (level == "O2" and type(module).__name__ in NORMS)
            expected = torch.float32 if full else DTYPES[low]
            assert {p.dtype for p in module.parameters(recurse=False)} <= {expected}
        assert {b.dtype for b in model.buffers()} <= {torch.float32, torch.int64}


@every_task
@every_plan
def test_evaluation_runs_under_the_plan(task: str, level: str, low: str) -> None:
    model = TASKS[task].build().eval()
    batch, *_ = TASKS[task].batches(1)
    with torch.inference_mode():
        expected = model(*batch[: 2 if task == "diffusion" else 1])
        with initialize(model, None, level, low=low):
            out = model(*batch[: 2 if task == "diffusion" else 1])
    error = (out - expected).norm() / expected.norm()
    assert 0 < error < (0.05 if low == "bf16" else 0.01)


@every_task
@every_plan
@pytest.mark.slow_but("O1-bf16", "O2-fp16", "O3-bf16")
def test_close_leaves_a_plain_model_that_learned(task: str, level: str, low: str) -> None:
    run = train(task, level, low)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert type(run.model) is type(TASKS[task].build())
    with torch.no_grad():
        final = TASKS[task].loss(run.model, TASKS[task].batches(1)[0])
    assert final < run.losses[0] / 2
