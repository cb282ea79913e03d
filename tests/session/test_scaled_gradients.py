"""Loops that treat gradients wrong that carry the loss scale are told so once; loops that treat them right are not."""

import functools

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import Refuses
from tests.scale.sync import NoSync

X = torch.linspace(-1, 1, 32).view(4, 8)
clip, clip_value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_


class Loop:
    """A loop of some steps; a subclass has a habit of its own."""

    stepping = "session"

    def __init__(self, level, low="fp16"):
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = self.make_optimizer()
        self.before()
        self.session = halfstep.initialize(self.model, self.optimizer, level, low=low, stepping=self.stepping)

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), 0.1)

    def before(self):
        """Prepares the model."""

    def loss(self):
        return self.model(X).float().square().mean()

    def zero(self):
        self.optimizer.zero_grad()

    def backward(self):
        self.session.backward(self.loss())

    def change(self):
        """What comes between the backward pass and the step."""

    def step(self):
        self.session.step()

    def run(self, steps=5):
        for _ in range(steps):
            self.zero()
            self.backward()
            self.change()
            self.step()
        self.session.close()


def loop(*bases, **methods):
    return type("Loop", (*bases, Loop), methods)


def hook(function):
    return lambda self: self.model[2].bias.register_hook(function)


def clamped(gradient):
    return torch.clamp(gradient, -1, 1)


def clamped_inputs(module, inputs, outputs):
    return tuple(None if each is None else each.clamp(-1, 1) for each in inputs)


def in_place(p):
    p.grad.clamp_(-1, 1)


class Clamp:
    def __call__(self, gradient):
        return gradient.clip(-1, 1)


def stray(self):
    self.model(X).float().abs().mean().backward()


def one_by_one(self):
    for p in self.model.parameters():
        p.grad = p.grad.clamp(-1, 1)


CHANGED = {
    "clip_grad_norm_": loop(change=lambda self: clip(self.model.parameters(), 1.0)),
    "clip_grad_value_": loop(change=lambda self: clip_value(self.model.parameters(), 1.0)),
    "of the last layer alone": loop(change=lambda self: clip(self.model[2].parameters(), 1.0)),
    "another gradient assigned": loop(change=one_by_one),
    "a stray backward": loop(change=stray),
    "a stray backward, accumulated": loop(backward=lambda self: [Loop.backward(self) for _ in "ab"], change=stray),
}
HOOKED = {
    "a lambda": loop(before=hook(lambda g: g.clamp(-1, 1))),
    "a function": loop(before=hook(clamped)),
    "a partial": loop(before=hook(functools.partial(torch.clamp, min=-1, max=1))),
    "an object": loop(before=hook(Clamp())),
    "after accumulation": loop(before=lambda self: self.model[0].weight.register_post_accumulate_grad_hook(in_place)),
    "of a module": loop(before=lambda self: self.model[2].register_full_backward_hook(clamped_inputs)),
}


class InStep(torch.optim.SGD):
    """Clips within its step, as many optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        clip(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def unscaled(self):
    self.session.unscale_()
    clip(self.model.parameters(), 1.0)


def twice(self):
    for _ in range(2):
        Loop.backward(self)


def alternate(self):
    """As a GAN does: a loss leaves gradients in parameters that another optimizer zeroes before its own loss."""
    for _ in range(2):
        self.optimizer.zero_grad(set_to_none=False)
        self.session.backward(self.loss())
    self.session.unscale_()
    self.optimizer.zero_grad(set_to_none=False)
    self.session.backward(self.loss())


def fails(self):
    """Its second pass raises after it has added to some gradients."""
    Loop.backward(self)
    refuses = Refuses.apply(self.model[0].weight).float().sum()
    with pytest.raises(ValueError, match="no"):  # later nodes run first
        self.session.backward(refuses + self.model[2](torch.ones(1, 8)).float().sum())


def own_step(self):
    clip(self.model.parameters(), 1.0)
    self.optimizer.step()


RIGHT = {
    "nothing": Loop,
    "unscale_ first": loop(change=unscaled),
    "max_norm": loop(step=lambda self: self.session.step(max_norm=1.0)),
    "zeroed in place": loop(zero=lambda self: self.optimizer.zero_grad(set_to_none=False)),
    "a plain backward first": loop(backward=lambda self: (stray(self), Loop.backward(self))),
    "never zeroed": loop(zero=lambda self: None),
    "accumulation": loop(backward=twice),
    "a pass that raises": loop(backward=fails),
    "zeroed in place between losses": loop(backward=alternate),
    "an optimizer that clips": loop(make_optimizer=lambda self: InStep(self.model.parameters(), 0.1)),
    "its own step": loop(stepping="optimizer", step=own_step),
    "a mask in a hook": loop(before=hook(lambda g: g * (g.abs() > 0))),
    "a gradient dropped": loop(change=lambda self: setattr(self.model[0].bias, "grad", None)),
    "read": loop(change=lambda self: [p.grad.norm() for p in self.model.parameters()]),
}


def told(caplog):
    return [record.getMessage() for record in caplog.records if "loss scale" in record.getMessage()]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_scaled_gradients_is_told_once(name, level, caplog):
    CHANGED[name](level).run()
    (said,) = told(caplog)
    assert "was changed between session.backward and session.step, while it carried the loss scale" in said
    assert "session.unscale_()" in said


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_that_limits_scaled_gradients_is_told_once(name, level, caplog):
    HOOKED[name](level).run()
    (said,) = told(caplog)
    where = {"after accumulation": "0.weight uses clamp_", "of a module": "2 uses clamp"}.get(name, "2.bias uses cl")
    assert said.startswith(f"a hook on the gradient of {where}")
    assert "if the hook limits gradients" in said  # what it uses may be for a copy that it only reads


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", RIGHT)
def test_loops_that_do_right_are_told_nothing(name, level, caplog):
    RIGHT[name](level).run()
    assert told(caplog) == []


@pytest.mark.parametrize("name", ["clip_grad_norm_", "a stray backward"])
def test_without_a_loss_scale_there_is_nothing_to_tell(name, caplog):
    CHANGED[name]("O2", "bf16").run()
    assert told(caplog) == []


def test_the_look_waits_for_no_device(caplog):
    bad = CHANGED["a stray backward"]("O1")
    for _ in range(2):
        bad.zero()
        bad.backward()
        bad.change()
        with NoSync():
            bad.step()
    assert len(told(caplog)) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_plain_backward_has_made_before_counts_in_full(level):
    def weights(level, **methods):
        torch.manual_seed(0)
        ran = loop(**methods)(level)
        ran.run()
        return torch.cat([p.detach().flatten() for p in ran.model.parameters()])

    both = weights("O0", backward=lambda self: (stray(self), Loop.backward(self)))
    alone = weights("O0")
    found = weights(level, backward=lambda self: (stray(self), Loop.backward(self)))
    assert (found - both).norm() < 0.05 * (alone - both).norm()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("times", "scale"), [(1e4, 2.0**15), (torch.inf, 2.0**16)])
def test_a_loss_that_cleared_gradients_made_infinite_lowers_the_scale_if_theirs_was_finite(times, scale, to_none):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with halfstep.initialize(model, optimizer, "O1", low="fp16") as session:
        session.backward((model(X).float() * times).mean())
        session.unscale_()
        with torch.no_grad():
            model.weight.add_(model.weight.grad)  # as sharpness-aware minimization does
        optimizer.zero_grad(set_to_none=to_none)
        session.backward(model(X).float().mean())
        assert bool(session.step().skipped)
        assert session.status().scales == {0: scale}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_code_may_assign_gradients_made_of_true_ones_to_weights_that_the_last_pass_left_without(low):
    model, head = nn.Linear(8, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    start = head.bias.detach().clone()
    with halfstep.initialize([model, head], optimizer, "O2", low=low) as session:
        for _ in range(2):  # as gradient surgery does
            for out in (head, nn.Identity()):
                optimizer.zero_grad()
                session.backward(out(model(X)).float().mean())
                session.unscale_()
            for p in head.parameters():
                p.grad = torch.ones(p.shape)
            assert not bool(session.step().skipped)
    torch.testing.assert_close(head.bias, start - 0.2)


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize(("level", "open_to"), [("O1", torch.float32), ("O2", None)])
def test_weights_without_a_gradient_are_open_to_fp32_until_the_next_pass(level, open_to, assigned):
    model, head = nn.Linear(8, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    with halfstep.initialize([model, head], optimizer, level, low="fp16") as session:
        session.backward(model(X).float().mean())
        session.unscale_()
        assert [p.grad_dtype for p in head.parameters()] == [open_to] * 2
        for p in head.parameters() if assigned else ():
            p.grad = torch.ones(p.shape)
        session.backward(model(X).float().mean())
        optimizer.zero_grad()
        session.backward(head(model(X)).float().mean())
        assert [p.grad_dtype for p in head.parameters()] == [p.dtype for p in head.parameters()]


class SecondOrder(torch.optim.Optimizer):
    """Differentiates gradients, as AdaHessian does."""

    def __init__(self, params):
        super().__init__(params, {})
        self.products = []

    def step(self, closure=None):
        (weight,) = self.param_groups[0]["params"]
        (product,) = torch.autograd.grad(weight.grad, weight, torch.ones_like(weight))
        self.products.append(product)
        with torch.no_grad():
            weight.sub_(weight.grad / product)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_an_optimizer_can_differentiate_the_gradients_of_o1(low):
    model = nn.Linear(4, 1, bias=False)
    model.weight.data.copy_(torch.tensor([[0.5, 0.25, -0.5, 1.0]]))
    optimizer = SecondOrder(model.parameters())
    with halfstep.initialize(model, optimizer, "O1", low=low) as session:
        for _ in range(1 if low == "bf16" else 3):  # the first two loss scales of fp16 overflow
            session.backward(model(torch.ones(1, 4)).float().square().sum(), create_graph=True)
            session.step()
            optimizer.zero_grad()  # the graph of the gradients holds the weight
    assert torch.stack(optimizer.products).equal(torch.full((1, 1, 4), 8.0))  # (w1 + .. + w4)^2 has 2 in its Hessian
    assert model.weight.equal(torch.tensor([[0.5, 0.25, -0.5, 1.0]]) - 2.5 / 8)
