"""Habits of code that takes a model's outputs: each gives, at O1 and O2, what it gives in fp32 of the same logits.

A model here returns what it computes from `z`, low values that it keeps. What code outside makes of the outputs is
compared with what it makes of the same function of `z.float()`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*reduction.*:UserWarning")]
N, C = 32, 6
FIXED = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, C, generator=FIXED), torch.randint(0, C, (N,), generator=FIXED)
ZERO_OR_ONE = torch.randint(0, 2, (N, C), generator=FIXED).float()


class Net(nn.Module):
    """Gives `head(z)` of low values `z`; `head` is what fp32 code applies to `z.float()` too."""

    def __init__(self, head, spread):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.spread = nn.Linear(C, C), head, spread

    def forward(self, x):
        self.z = self.layer(x) * self.spread
        return self.head(self.z)


def focal(p):
    t = torch.where(ZERO_OR_ONE > 0, p, 1 - p)
    return (-((1 - t) ** 2) * t.clamp(min=1e-12).log()).mean()


def dice(p):
    return 1 - 2 * (p * ZERO_OR_ONE).sum() / (p + ZERO_OR_ONE).sum()


def policy_gradient(p):
    chosen = torch.distributions.Categorical(probs=p)
    return -(chosen.log_prob(Y) * X[:, 0]).mean() - 0.01 * chosen.entropy().mean()


def distillation(outputs):
    student, teacher = outputs
    return F.kl_div(student, teacher, reduction="batchmean") * 64


def normal(outputs):
    mean, log_variance = outputs
    return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()


def attend(z):
    weights = (z @ z.t()).softmax(-1)
    return weights @ z, weights


def detector(z):
    scores = z.sigmoid().t().contiguous().view(-1, 2)
    return torch.cat([scores, z.sigmoid().view(-1, 2)])


def sorted_by(values):
    return values.flatten().sort(descending=True).indices.float()


sigmoid, softmax, log_softmax = torch.sigmoid, lambda z: z.softmax(-1), lambda z: z.log_softmax(-1)

# what the model returns, how far its logits spread, what the loop makes of it; those with * failed before
HABITS = {
    "BCELoss of a sigmoid *": (sigmoid, 8, lambda p: F.binary_cross_entropy(p, ZERO_OR_ONE)),
    "BCELoss of one squeezed column *": (
        lambda z: sigmoid(z[:, :1]).squeeze(-1),
        8,
        lambda p: F.binary_cross_entropy(p, ZERO_OR_ONE[:, 0]),
    ),
    "the weighted logarithm of p and of 1 - p *": (
        sigmoid,
        6,
        lambda p: -(2 * ZERO_OR_ONE * p.log() + (1 - ZERO_OR_ONE) * (1 - p + 1e-8).log()).mean(),
    ),
    "a focal loss *": (sigmoid, 8, focal),
    "a Dice loss": (sigmoid, 4, dice),
    "the logit of a probability *": (sigmoid, 6, lambda p: torch.logit(p, eps=1e-6).square().mean()),
    "1 - p as a miss rate *": (sigmoid, 8, lambda p: (1 - p).log().clamp(min=-50).mean()),
    "NLLLoss of the logarithm of a softmax": (softmax, 8, lambda p: F.nll_loss((p + 1e-12).log(), Y)),
    "NLLLoss of a log_softmax": (log_softmax, 8, lambda p: F.nll_loss(p, Y)),
    "the sum of a row of a softmax is 1 *": (softmax, 2, lambda p: (p.sum(-1) - 1).abs().max() * 1e3 + p.sum()),
    "the entropy of a softmax": (softmax, 4, lambda p: -(p * (p + 1e-12).log()).sum(-1).mean()),
    "1 minus the largest of a softmax *": (softmax, 12, lambda p: (1 - p.max(-1).values).clamp(min=1e-12).log().mean()),
    "a policy gradient by Categorical(probs=...) *": (softmax, 3, policy_gradient),
    "a softmax at a temperature": (lambda z: (z / 4).softmax(-1), 8, lambda p: p.log().mean()),
    "distillation outside, of what one model returns *": (
        lambda z: ((z / 8).log_softmax(-1), ((z + z.roll(1, 0) * 0.1) / 8).softmax(-1)),
        4,
        distillation,
    ),
    "the difference of two probabilities *": (sigmoid, 4, lambda p: (p[1:] - p[:-1]).abs().min(0).values.sum() * 100),
    "the order of scores *": (sigmoid, 4, sorted_by),
    "a comparison with a threshold *": (sigmoid, 10, lambda p: (p < 0.9999).float().sum()),
    "an argmax over boxes *": (lambda z: sigmoid(z + 6), 4, lambda p: p.argmax(0).float()),
    "scores of boxes, copied and put together *": (detector, 8, lambda p: (1 - p + 1e-8).log().mean()),
    "an attention map that is used and returned": (attend, 1, lambda out: (out[1] * (out[1] + 1e-9).log()).sum()),
    "mean and logarithm of a variance": (lambda z: z.chunk(2, -1), 2, normal),
    "a dictionary of losses and probabilities *": (
        lambda z: {"p": z.sigmoid(), "z": z},
        8,
        lambda out: F.binary_cross_entropy(out["p"], ZERO_OR_ONE) + out["z"].square().mean(),
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_gives_what_fp32_gives(habit, level):
    head, spread, use = HABITS[habit]
    model = Net(head, spread)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with halfstep.initialize(model, optimizer, level, low="bf16", emulate=False):
        out = model(X)
        z = model.z.detach().float()
        exact = use(head(z))
        torch.testing.assert_close(use(out), exact, rtol=0.01, atol=1e-3)
        with torch.inference_mode():
            torch.testing.assert_close(use(model(X)), exact, rtol=0.01, atol=1e-3)
