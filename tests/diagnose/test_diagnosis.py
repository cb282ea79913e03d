"""What is told of a failure: the number that vanished, and the edit whose loss is that of fp32."""

import json

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, Rule
from halfstep.kinds import Kind


def blamed(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, "O2", low="fp16") as session:
        return halfstep.blame(session, lambda: model(inputs).float().mean())


class EpsBefore(nn.Module):
    """Divides zero by zero and an eps, that is added some operations earlier."""

    def __init__(self, between):
        super().__init__()
        self.first, self.between = nn.Linear(8, 8), between

    def forward(self, x):
        y = self.first(x) * torch.tensor([[1.0], [0.0]], dtype=torch.float16)
        size = y.abs().amax(-1, keepdim=True) + 1e-8
        for _ in range(self.between):
            size = size * 1.0
        return y / size


@pytest.mark.parametrize(("between", "seen"), [(0, True), (6, True), (7, False)])
def test_an_eps_is_looked_for_some_operations_back(between, seen):
    verdict = blamed(EpsBefore(between), torch.ones(2, 8))
    assert (verdict.kind, verdict.operator) == ("invalid", "div")
    assert ("because 1e-08 is 0 in fp16" in verdict.evidence) == seen


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_an_eps_is_said_to_be_zero_in_the_format_that_it_was_added_in(plan):
    """At O1 the logarithm itself is fp32."""
    model = nn.Sequential(nn.Linear(8, 8), Does(lambda x: torch.log(x * 0 + 1e-8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, plan, low="fp16") as session:
        verdict = halfstep.blame(session, lambda: model(torch.ones(2, 8)).float().mean())
    assert (verdict.kind, verdict.operator) == ("invalid", "log")
    assert "because 1e-08 is 0 in fp16" in verdict.evidence
    assert "use 1e-06 or more" in verdict.advice


class Does(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, x):
        return self.does(x)


class Tiny(nn.Module):
    def forward(self, x):
        return torch.ones_like(x) * 2e-8


class Logs(nn.Module):
    def forward(self, x):
        return -torch.log(x + 1e-30)


class LogsOfTiny(nn.Module):
    """Numbers that fp16 rounds to zero, 17.7 after their logarithm; full from there on, that of the eps is 69.1."""

    def __init__(self):
        super().__init__()
        self.first, self.tiny, self.logs = nn.Linear(8, 8), Tiny(), Logs()

    def forward(self, x):
        y = self.first(x)
        return y + self.logs(self.tiny(y.detach()))


def test_an_edit_under_which_the_loss_is_another_is_no_cure():
    model = LogsOfTiny()
    verdict = blamed(model, torch.zeros(2, 8))
    assert (verdict.module, verdict.operator) == ("logs", "log")
    assert verdict.cure == (Rule("", FULL),)


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_is_its_text_wherever_it_is_written(kind):
    text = kind.name.lower().replace("_", " ")
    assert kind == text
    assert (str(kind), f"{kind}", json.loads(json.dumps(kind))) == (text, text, text)
