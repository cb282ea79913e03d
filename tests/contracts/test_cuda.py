"""On a GPU: a step waits for nothing, and all of it can be captured in a CUDA graph and replayed, overflow included."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import halfstep
from tests.contracts.cases import batch, differing, mixed_plans, snapshot
from tests.contracts.cases import make as make_on_cpu
from tests.scale.sync import no_cuda_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad"),  # of leaves that met the warm-up's stream before
]
OPTIMIZERS = {
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.1, amsgrad=True),
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
POISONED = (2, 4)  # steps whose input has an infinity
STEPS = 7


@contextmanager
def no_sync():
    torch.cuda.synchronize()
    with no_cuda_sync():
        yield


def on_cuda(step):
    inputs, targets = batch(step)
    if step in POISONED:
        inputs[0, 0] = torch.inf
    return inputs.cuda(), targets.cuda()


def start(name, low, optimizer, **options):
    model, _ = make_on_cpu()
    model.cuda()
    opt = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model, opt, halfstep.initialize(model, opt, name, low=low, **options)


def step(model, opt, session, inputs, targets):
    opt.zero_grad()
    session.backward(nn.functional.mse_loss(model(inputs), targets))
    return session.step(max_norm=1.0)


def capture(model, opt, session, inputs, targets, warmup):
    """Warms up on a stream of its own, as torch asks for, captures one step, and returns the graph and its record."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step(model, opt, session, inputs, targets)
        opt.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record = step(model, opt, session, inputs, targets)
    return graph, record


@mixed_plans
@optimizers
def test_a_step_does_not_wait_for_the_device(name, low, optimizer):
    model, opt, session = start(name, low, optimizer)
    batches = [on_cuda(i) for i in range(STEPS)]
    step(model, opt, session, *batches[0])
    with no_sync():
        records = [step(model, opt, session, *batches[i]) for i in range(1, STEPS)]
    assert [i for i, record in enumerate(records, 1) if bool(record.skipped)] == list(POISONED)
    assert not any(record.synced for record in records)


@mixed_plans
def test_a_loss_that_is_infinite_skips_its_step_though_no_gradient_is(name, low):
    model, opt, session = start(name, low, "AdamW")
    inputs, targets = on_cuda(0)
    step(model, opt, session, inputs, targets)
    was = snapshot(model, opt)
    session.backward(nn.functional.mse_loss(model(inputs), targets) + torch.inf)
    record = session.step(max_norm=1.0)
    assert bool(record.skipped)
    assert bool(record.grad_norm.isfinite())
    assert differing(was, snapshot(model, opt)) == []


@pytest.mark.silicon
@mixed_plans
@optimizers
def test_a_replayed_step_does_what_an_eager_one_does(name, low, optimizer):
    warmup = 3
    eager, captured = start(name, low, optimizer), start(name, low, optimizer)
    first = on_cuda(0)
    static = [t.clone() for t in first]
    for _ in range(warmup):
        step(*eager, *first)
    graph, record = capture(*captured, *static, warmup)
    for i in range(1, STEPS):
        expected = step(*eager, *on_cuda(i))
        for held, new in zip(static, on_cuda(i), strict=True):
            held.copy_(new)
        graph.replay()
        assert bool(record.skipped) == bool(expected.skipped) == (i in POISONED)
        torch.testing.assert_close(record.scale, expected.scale)
        torch.testing.assert_close(record.grad_norm, expected.grad_norm, rtol=2e-2, atol=1e-3, equal_nan=True)
    for one, other in zip(eager[0].state_dict().values(), captured[0].state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)
    assert captured[2].status().skipped == eager[2].status().skipped == len(POISONED)
    assert captured[2].status().scales == eager[2].status().scales
    for _, _, session in (eager, captured):
        session.close()


@pytest.mark.silicon
@mixed_plans
@optimizers
def test_a_replay_that_overflows_changes_no_bit(name, low, optimizer):
    model, opt, session = start(name, low, optimizer)
    static = [t.clone() for t in on_cuda(0)]
    graph, record = capture(model, opt, session, *static, 2)
    graph.replay()
    was = snapshot(model, opt)
    for held, new in zip(static, on_cuda(POISONED[0]), strict=True):
        held.copy_(new)
    graph.replay()
    assert bool(record.skipped)
    assert differing(was, snapshot(model, opt)) == []
    for held, new in zip(static, on_cuda(1), strict=True):
        held.copy_(new)
    graph.replay()
    assert not bool(record.skipped)
    assert differing(was, snapshot(model, opt)) != []


@pytest.mark.silicon
@mixed_plans
def test_steps_without_a_graph_go_on_beside_one(name, low):
    model, opt, session = start(name, low, "AdamW")
    static = [t.clone() for t in on_cuda(0)]
    graph, record = capture(model, opt, session, *static, 2)
    for _ in range(20):
        step(model, opt, session, *on_cuda(1))
    graph.replay()
    assert not bool(record.skipped)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


FUSED = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_grad_scaler_waits_for_nothing_under_a_fused_optimizer(optimizer):
    model, _ = make_on_cpu()
    model.cuda()
    opt = FUSED[optimizer]([p for p in model.parameters() if p.requires_grad])
    scaler = halfstep.GradScaler(init_scale=1024.0)
    batches = [on_cuda(i) for i in range(STEPS)]

    def train(inputs, targets):
        opt.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()

    train(*batches[0])
    with no_sync():
        for inputs, targets in batches[1:]:
            train(inputs, targets)
    assert scaler.get_scale() == 1024.0 / 2 ** len(POISONED)
