"""After close(), also after an exception or Ctrl-C inside, all is as before, and the model is an ordinary fp32 one."""

import warnings

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import Same, backward_and_step, batch, every_plan, make, start, train

HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]
OPTIMIZER_HOOKS = [
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
]


def fingerprint(model, opt):
    modules = [
        (
            type(m),
            sorted(m.__dict__),
            {h: len(getattr(m, h)) for h in HOOKS},
            {k: b.dtype for k, b in m._buffers.items() if b is not None},
        )
        for m in model.modules()
    ]
    parameters = [
        (id(p), p.dtype, p.requires_grad, p.grad_dtype in (None, p.dtype), type(p)) for p in model.parameters()
    ]
    groups = [[id(p) for p in group["params"]] for group in opt.param_groups]
    own = {k: v for k, v in opt.__dict__.items() if k not in ("state", "param_groups", "_opt_called")}
    counts = {h: len(own.pop(h)) for h in OPTIMIZER_HOOKS if h in own}
    machine = (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("ipu"),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        torch._C._len_torch_dispatch_stack(),
        torch.nn.functional.softmax,
        torch.autograd.backward,
        nn.Linear.forward,
        torch.optim.AdamW.step,
    )
    return modules, parameters, groups, sorted(own), counts, machine


@every_plan
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_close_puts_everything_back(name, low, optimizer):
    model, opt = make(optimizer=optimizer)
    was = fingerprint(model, opt)
    session = halfstep.initialize(model, opt, name, low=low)
    train(session, model, opt, range(3))
    session.close()
    session.close()
    assert fingerprint(model, opt) == was


@every_plan
def test_the_closed_model_trains_on_in_plain_fp32(name, low):
    model, opt, session = start(name, low)
    train(session, model, opt, range(3))
    session.close()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    before = model.first.weight.detach().clone()
    for step in range(3, 5):
        inputs, targets = batch(step)
        opt.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        assert model.first.weight.grad.dtype is torch.float32
        opt.step()
        scheduler.step()
    assert not torch.equal(model.first.weight, before)


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.error = error

    def forward(self, x):
        x = self.layer(x)
        if self.error is not None:
            raise self.error
        return x


@every_plan
@pytest.mark.parametrize("error", [ValueError("from the model"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_an_exception_in_forward_leaves_nothing_on(name, low, error):
    model = Fails(error)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    was = fingerprint(model, opt)
    with pytest.raises(type(error)), halfstep.initialize(model, opt, name, low=low):
        model(torch.randn(2, 4))
    assert fingerprint(model, opt) == was


@every_plan
def test_a_session_goes_on_after_an_exception_in_forward(name, low):
    model = Fails(ValueError("once"))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, opt, name, low=low)
    with pytest.raises(ValueError, match="once"):
        model(torch.randn(2, 4))
    assert not torch.is_autocast_enabled("cpu")
    model.error = None
    backward_and_step(session, model(torch.randn(2, 4)).square().mean())


class Interrupts(Same):
    @staticmethod
    def backward(ctx, g):
        raise KeyboardInterrupt


@every_plan
def test_ctrl_c_in_backward_leaves_nothing_on(name, low):
    model = Fails(None)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    was = fingerprint(model, opt)
    session = halfstep.initialize(model, opt, name, low=low)
    with pytest.raises(KeyboardInterrupt):
        session.backward(Interrupts.apply(model(torch.randn(2, 4))).sum())
    opt.zero_grad()
    backward_and_step(session, model(torch.randn(2, 4)).square().mean())
    session.close()
    assert fingerprint(model, opt) == was


def test_a_closed_session_says_so():
    model, _, session = start("O1", "bf16")
    loss = model(batch(0)[0]).sum()
    session.close()
    for use in (
        lambda: session.backward(loss),
        session.step,
        session.unscale_,
        session.autocast,
        session.adopt_weights,
    ):
        with pytest.raises(halfstep.SessionError, match="closed"):
            use()


@every_plan
def test_schedulers_do_not_warn_before_during_or_after(name, low):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, opt = make()
        early = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
        session = halfstep.initialize(model, opt, name, low=low)
        late = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        for step in range(2):
            train(session, model, opt, [step])
            early.step()
            late.step()
        session.close()
        opt.zero_grad()
        model(batch(9)[0]).sum().backward()
        opt.step()
        early.step()
        late.step()


def test_two_sessions_do_not_see_each_other():
    """Interleaved step by step with others, each session trains exactly as it does alone."""
    from tests.contracts.cases import differing, snapshot

    plans = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16")]
    alone = []
    for name, low in plans:
        model, opt, session = start(name, low)
        train(session, model, opt, range(3))
        alone.append(snapshot(model, opt, session))
        session.close()
    together = [start(name, low) for name, low in plans]
    for step in range(3):
        for model, opt, session in together:
            train(session, model, opt, [step])
    for (model, opt, session), expected in zip(together, alone, strict=True):
        assert differing(snapshot(model, opt, session), expected) == []
    together[0][2].close()
    model, opt, session = together[1]
    train(session, model, opt, [3])
    for _, _, session in together[1:]:
        session.close()


@every_plan
def test_a_session_that_began_and_ended_in_inference_mode_leaves_weights_that_train(name, low):
    model, opt = make()
    with torch.inference_mode(), halfstep.initialize(model, None, name, low=low):
        model(batch(0)[0])
    model(batch(0)[0]).sum().backward()
    opt.step()


@every_plan
def test_a_session_may_begin_or_end_in_inference_mode(name, low):
    model, opt = make()
    with torch.inference_mode():
        session = halfstep.initialize(model, opt, name, low=low)
    train(session, model, opt, range(2))
    with torch.inference_mode():
        session.close()
    model(batch(0)[0]).sum().backward()
    opt.step()
