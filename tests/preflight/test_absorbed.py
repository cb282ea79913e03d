"""Overflows that are absorbed: planted ones are named by check and by blame, healthy patterns are left in peace."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import FULL, Rule
from tests.contracts.cases import Kept
from tests.preflight.planted import Does

INF = math.inf
WIDE = 3e3  # the layer before a pattern gives 3,000 * (-1 ... 1): fits fp16, its squares do not
ROWS, COLUMNS = 16, 8


class Fixed(nn.Module):
    """What a pattern does, to values that do not depend on random numbers, and on no weight but by a factor of 1."""

    def __init__(self, pattern, gain):
        super().__init__()
        self.first = nn.Linear(COLUMNS, COLUMNS, bias=False)
        self.pattern = pattern
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(COLUMNS) * gain)

    def forward(self, x):
        return self.pattern(self.first(x))


def inputs():
    """Returns rows of values between -1 and 1 that fp16 has exactly; none is 0, and they include 1."""
    return (torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 32 - 15.5) / 16


def checked(pattern, plan, gain, low="fp16"):
    """Returns the findings of a check that are about absorbed overflow, and the codes of all above a note."""
    model = Fixed(Does(pattern), gain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with halfstep.initialize(model, optimizer, plan, low=low, emulate=True) as session:
        found = halfstep.check(session, lambda: model(inputs()).float().mean(), precision=False)
    codes = [each.code for each in found if each.severity != "note"]
    return [each for each in found if each.code == "overflow absorbed"], codes


def causal(x):
    scores = x @ x.transpose(0, 1)
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -INF).softmax(-1) @ x


def masked_twice(x):
    least = torch.finfo(x.dtype).min
    mask = torch.zeros_like(x).masked_fill(torch.arange(COLUMNS) > 3, least)
    return ((x + mask) + mask).softmax(-1)


def constant_mask(x):
    mask = torch.ones(COLUMNS, dtype=x.dtype).masked_fill(torch.arange(COLUMNS) > 3, 0)
    return (x + (1 - mask) * -1e9).softmax(-1)


def attends(x):
    q = x.view(1, 2, ROWS, COLUMNS // 2)
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def top_k(x):
    least = x.topk(3, -1).values[:, -1:]
    return x.masked_fill(x < least, -INF).softmax(-1)


def padded(x):
    return F.pad(x, (0, 2), value=-INF).softmax(-1)


def running_least(x):
    least = torch.full_like(x[0], INF)
    for row in x:
        least = torch.minimum(least, row)
    return least


def gumbel(x):
    uniform = torch.linspace(0, 1, x.numel(), dtype=x.dtype).view_as(x)  # with 0 and 1: -log(-log(u)) is -inf and inf
    return (x - torch.log(-torch.log(uniform))).clamp(-9, 9)


HEALTHY = {  # each is the same in fp32, or rounds to it
    "causal -inf": (causal, 1.0),
    "finfo.min twice": (masked_twice, 1.0),
    "(1 - mask) * -1e9": (constant_mask, 1.0),
    "square below a bound": (lambda x: (x * x).clamp(max=100).sqrt(), WIDE),
    "where behind exp": (lambda x: torch.where(x > 0, torch.ones_like(x), x.exp()), 100.0),
    "where behind square": (lambda x: torch.where(x.abs() > 9, torch.ones_like(x), x * x), WIDE),
    "x log x": (lambda x: x.relu() * (x.relu() + 1e-4).log(), 1.0),
    "nan_to_num(0 * -inf)": (lambda x: torch.nan_to_num(x.relu() * x.relu().log()), 1.0),
    "xlogy": (lambda x: torch.xlogy(x.relu(), x.relu()), 1.0),
    "gumbel": (gumbel, 1.0),
    "top-k -inf": (top_k, 1.0),
    "bool mask": (attends, 1.0),
    "-inf pad": (padded, 1.0),
    "inf to begin with": (running_least, 1.0),
    "saturating sigmoid": (lambda x: torch.sigmoid(x * 1e3), WIDE),
    "saturating tanh": (lambda x: torch.tanh(x * 1e3), WIDE),
    "clamp": (lambda x: (x * 1e3).clamp(-6, 6), WIDE),
    "relu6": (lambda x: F.relu6(x * 1e3), WIDE),
    "sign": (lambda x: torch.sign(x * 1e3) * x, WIDE),
    "argmax": (lambda x: x.gather(-1, (x * 1e3).argmax(-1, keepdim=True)), WIDE),
    "comparison": (lambda x: x * (x * 1e3 > 5), WIDE),
    "logsumexp of -inf": (lambda x: torch.logsumexp(x.masked_fill(x < 0, -INF), -1).clamp(min=-9), 1.0),
}


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_patterns_are_left_in_peace(name, plan):
    assert len(HEALTHY) == 22
    assert checked(HEALTHY[name][0], plan, HEALTHY[name][1])[0] == []


def rms_in_place(x):
    square = x.detach().clone()
    square.mul_(square)
    return x * square.mean(-1, keepdim=True).add_(1e-3).rsqrt_()


def own_variance(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred**2).mean(-1, keepdim=True).sqrt()


def own_softmax(x):
    exponentials = (x - 20).exp() * torch.ones_like(x)
    return exponentials / exponentials.sum(-1, keepdim=True)


# The largest square is (3,000 * 15.5 / 16)**2 = 8.4 million, 128 times what fp16 has; the root of a mean of squares is
# thousands, so that what divides by it is 0. At O1 the table computes pow and square in fp32, where nothing overflows.
PLANTED = {  # what overflows, what absorbs it, and whether at O1 too
    "RMS norm": (lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3), "mul", "rsqrt", True),
    "RMS norm by pow": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3), "pow", "rsqrt", False),
    "RMS norm in place": (rms_in_place, "mul", "rsqrt", True),
    "l2 normalise": (lambda x: x / (x * x).sum(-1, keepdim=True).sqrt(), "mul", "div", True),
    "variance": (own_variance, "pow", "div", False),
    "x / (1 + mean square)": (lambda x: x / (1 + x.square().mean(-1, keepdim=True)), "pow", "div", False),
    "1 / (1 + x^2)": (lambda x: 1 / (1 + x * x), "mul", "reciprocal", True),
    "sigmoid": (lambda x: torch.sigmoid(x * x / 1e7), "mul", "sigmoid", True),
    "nan_to_num": (lambda x: torch.nan_to_num(x * x / 1e3, posinf=0.0), "mul", "nan_to_num", True),
}


@pytest.mark.parametrize("plan", ["O1", "O2"])
@pytest.mark.parametrize("name", PLANTED)
def test_planted_ones_are_named_with_a_cure(name, plan):
    pattern, origin, by, at_o1 = PLANTED[name]
    found, codes = checked(pattern, plan, WIDE)
    if plan == "O1" and not at_o1:
        assert codes == []
        return
    assert codes == ["overflow absorbed"]
    (finding,) = found
    assert finding.severity == "warning"
    assert finding.place.startswith("pattern, test_absorbed.py:")
    first, _, then = finding.evidence.partition(";")
    assert first.startswith(f"{origin} gives ")
    assert then.startswith(f" {by} ")
    assert finding.cure == (Rule("pattern", FULL),)


@pytest.mark.parametrize("pattern", [own_softmax, lambda x: (x * x) - (x * x)], ids=["softmax", "difference"])
def test_what_ends_in_nan_is_seen_already(pattern):
    gain = 34.0 if pattern is own_softmax else WIDE  # exp(34 * 15.5 / 16 - 20) is 412,000
    found, codes = checked(pattern, "O2", gain)
    assert (found, codes) == ([], ["not finite"])


def test_a_cure_leaves_the_loss_finite():
    found, _ = checked(lambda x: torch.nan_to_num(x * x, posinf=0.0), "O2", WIDE)  # which FULL gives back in fp16: inf
    ((rule,),) = (finding.cure for finding in found)
    assert (rule.pattern, rule.policy.output) == ("pattern", "full")


def test_bf16_has_the_range_of_fp32():
    assert checked(PLANTED["RMS norm"][0], "O2", WIDE, low="bf16") == ([], [])


class UnitRows(nn.Module):
    """An RMS norm that its name does not tell, so that no level computes it in fp32 by itself."""

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


class Classifier(nn.Module):
    """Its first layer gives values of hundreds, whose squares are beyond fp16: its norm then gives zeros."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(16, 64), UnitRows(), nn.Linear(64, 5)
        self.stem.weight.data.mul_(300)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)))


def classifier():
    torch.manual_seed(0)
    model, x, y = Classifier(), torch.randn(32, 16), torch.randint(0, 5, (32,))
    return model, lambda: F.cross_entropy(model(x), y)


def trained(plan):
    model, loss = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with halfstep.initialize(model, optimizer, plan, low="fp16") as session:
        for _ in range(60):
            optimizer.zero_grad()
            session.backward(loss())
            session.step()
        return float(loss().detach())


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_a_run_that_learns_nothing_is_named_before_and_its_cure_trains(plan):
    model, loss = classifier()
    with halfstep.initialize(model, torch.optim.AdamW(model.parameters()), plan, low="fp16") as session:
        (finding,) = [each for each in halfstep.check(session, loss, precision=False) if each.severity != "note"]
        edited = session.plan.edit(*finding.cure)
    assert (finding.code, finding.cure) == ("overflow absorbed", (Rule("norm", FULL),))
    full = trained("O0")
    assert trained(plan) > 1.3  # of log(5) = 1.6
    assert trained(edited) == pytest.approx(full, abs=0.1)


def findings_of(sink):
    return [each for each in sink.others if isinstance(each, halfstep.Finding)]


@pytest.mark.parametrize("plan", ["O1", "O2"])
def test_blame_says_it_where_all_is_finite(plan, caplog):
    (model, loss), sink = classifier(), Kept()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        caplog.at_level(logging.WARNING, "halfstep"),
        halfstep.initialize(model, optimizer, plan, low="fp16", loss_scale=1.0, sinks=[sink]) as session,
    ):
        assert halfstep.blame(session, loss) is None
        assert [each for each in halfstep.check(session, loss) if each.severity != "note"] == findings_of(sink)[:1]
    assert findings_of(sink)[0].cure == (Rule("norm", FULL),)
    assert "overflow absorbed" in caplog.text


def test_no_edit_is_named_where_none_could_be_tried():
    model, loss = classifier()
    batches = iter([loss])
    with halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16") as session:
        (finding,) = [
            each
            for each in halfstep.check(session, lambda: next(batches)(), precision=False)
            if each.severity != "note"
        ]
    assert (finding.code, finding.cure) == ("overflow absorbed", ())
    assert "ran out of batches" in finding.advice


def test_outside_of_the_model_it_is_named_by_its_line():
    model, x = nn.Linear(COLUMNS, COLUMNS), inputs()

    def loss():
        out = model(x)
        square = (out.half() * 3e3).square()
        return (1 / (1 + square.mean())).float() + out.mean()

    with halfstep.initialize(model, torch.optim.AdamW(model.parameters()), "O2", low="fp16") as session:
        (finding,) = [each for each in halfstep.check(session, loss, precision=False) if each.severity != "note"]
    assert finding.code == "overflow absorbed"
    assert finding.place.startswith("(model), test_absorbed.py:")


def test_in_the_second_of_two_models_it_is_named_as_rules_do():
    model, loss = classifier()
    models = [nn.Linear(2, 2), model]
    with halfstep.initialize(models, torch.optim.AdamW(model.parameters()), "O2", low="fp16") as session:
        (finding,) = [each for each in halfstep.check(session, loss, precision=False) if each.severity != "note"]
        probe = session.observe(every=1, tensors="activation", absorbed=True)
        session.backward(loss())
        session.step()
        seen = probe.flush()
    assert (finding.place.partition(",")[0], finding.cure) == ("norm", (Rule("norm", FULL),))
    assert finding.evidence.endswith("; in model 1 (the first is 0)")
    assert {each.module for each in seen} >= {"1.stem", "1.norm"}  # as the probe names them
    assert [each.module for each in seen if each.kind == "absorbed"] == ["1.norm"]
