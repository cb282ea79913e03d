"""Networks with a plant, and what check finds in them."""

import torch
from torch import nn

import halfstep


class Two(nn.Module):
    """A linear layer, and after it whatever a test plants, in a module of its own."""

    def __init__(self, planted):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.planted = planted

    def forward(self, x):
        return self.planted(self.first(x))


class Does(nn.Module):
    """A module that does what a function says."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@torch.library.custom_op("halfstep_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)  # of two formats, unless autocast is on


product.register_autograd(
    lambda ctx, grad: (torch.mm(grad.to(ctx.right.dtype), ctx.right.t()).to(grad.dtype), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "right", inputs[1]),
)


def loss_of(model):
    return model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()


def opened(model, plan="O2", low="fp16", *, lr=0.0, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    return halfstep.initialize(model, optimizer, plan, low=low, **options)


def checked(model, plan="O2", low="fp16", *, trace=True, **options):
    """Returns the findings above a note of a session over the model, and its plan."""
    with opened(model, plan, low, **options) as session:
        found = halfstep.check(session, (lambda: loss_of(model)) if trace else None, precision=False)
        return [finding for finding in found if finding.severity != "note"], session.plan


def notes(model, plan="O2", low="fp16", **options):
    """Returns severity, code and place of all that is found where no step is traced."""
    with halfstep.initialize(model, None, plan, low=low, **options) as session:
        return [(finding.severity, finding.code, finding.place) for finding in halfstep.check(session)]


def steps(model, plan, **options):
    """Whether the loss of a step is finite."""
    with opened(model, plan, None, lr=1e-3, **options) as session:
        loss = loss_of(model)
        session.backward(loss)
        session.step()
        return bool(torch.isfinite(loss))


def only(findings):
    assert len(findings) == 1, [str(finding) for finding in findings]
    return findings[0]
