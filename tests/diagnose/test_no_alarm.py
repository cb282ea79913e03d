"""Healthy training gets no verdict, whatever the workload, the level and the format."""

import itertools
import logging

import pytest

import halfstep
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.cifar_resnet import CifarResNet
from halfstep.lab.workloads.imdb_lstm import ImdbLSTM
from halfstep.lab.workloads.load import Regression
from tests.contracts.cases import backward_and_step
from tests.models.zoo import TASKS

LEVELS = [(name, low) for name in ("O1", "O2", "O3") for low in ("bf16", "fp16")]
SMALL = {
    "char_lm": lambda data: CharLM(d=64, layers=2, heads=2, length=64),
    "regression": lambda data: Regression(d_in=128, d_out=64),
    "cifar_resnet": lambda data: CifarResNet(data=data, batch=32, width=8),
    "imdb_lstm": lambda data: ImdbLSTM(data=data, batch=16, embedding=32, hidden=32),
}


def assert_healthy(workload, level, low, steps, caplog):
    model = workload.build(0)
    optimizer = workload.optimizer(model, fused=False)
    batches = workload.batches(0)
    with caplog.at_level(logging.WARNING, "halfstep"):
        session = halfstep.initialize(model, optimizer, level, low=low)
        for inputs, targets in itertools.islice(batches, steps):
            optimizer.zero_grad()
            backward_and_step(session, workload.loss(model(inputs), targets), max_norm=workload.max_norm)
        inputs, targets = next(batches)
        optimizer.zero_grad()
        verdict = halfstep.blame(session, lambda: workload.loss(model(inputs), targets))
    assert verdict is None, str(verdict)
    assert caplog.text == ""
    session.close()


@pytest.mark.parametrize("name", ["char_lm", "regression"])
@pytest.mark.parametrize(("level", "low"), LEVELS, ids=["-".join(pair) for pair in LEVELS])
@pytest.mark.slow_but("O1-fp16-regression", "O2-bf16-char_lm")
def test_a_few_healthy_steps_get_no_verdict(name, level, low, caplog):
    assert_healthy(SMALL[name](None), level, low, 12, caplog)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("level", "low"), [("O1", "fp16"), ("O2", "bf16"), ("O3", "fp16")])
@pytest.mark.slow_but("O1-fp16-GPT with rotary buffers", "O1-fp16-diffusion", "bf16-LSTM")
def test_common_models_get_no_verdict(task, level, low, caplog):
    model = TASKS[task].build()
    optimizer = TASKS[task].optimizer(model.parameters())
    *batches, last = TASKS[task].batches(9)
    with caplog.at_level(logging.WARNING, "halfstep"), halfstep.initialize(model, optimizer, level, low=low) as session:
        for batch in batches:
            optimizer.zero_grad()
            backward_and_step(session, TASKS[task].loss(model, batch))
        verdict = halfstep.blame(session, lambda: TASKS[task].loss(model, last))
    assert verdict is None, str(verdict)
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("level", "low"), LEVELS, ids=["-".join(pair) for pair in LEVELS])
def test_a_healthy_run_gets_no_verdict(name, level, low, data_dir, caplog):
    assert_healthy(SMALL[name](data_dir), level, low, 100, caplog)
