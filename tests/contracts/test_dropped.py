"""A session that nobody closes: when it is gone, with its model, all that it held of the process is as before."""

import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import halfstep
from halfstep import Rule
from halfstep.explain.diagnose.counter import WINDOW
from halfstep.train.cast.opregistry import MARKERS, REGISTRY
from tests.contracts.cases import PLANS, Net, every_plan, start, train
from tests.contracts.test_close import HOOKS

SWISH = types.ModuleType("halfstep_tests_dropped")
SWISH.swish = lambda x: x * torch.sigmoid(x)


def process():
    """What a session may change of the process."""
    return {
        "kernels": {key: len(device.sites) for key, device in REGISTRY._devices.items()},
        "markers": sorted(REGISTRY._slots),
        "softmax": torch._C._dispatch_dump("aten::softmax.int"),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "cache tag": torch.compiler.config.cache_key_tag,
        "modes": _get_current_dispatch_mode_stack(),
        "stance": torch._dynamo.eval_frame._stance.stance if "torch._dynamo" in sys.modules else "default",
        "swish": SWISH.swish,
        "onednn": torch.backends.mkldnn.enabled,
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", *MARKERS)],
        "module hooks": len(nn.modules.module._global_forward_hooks),
    }


def nothing(session, model, optimizer):
    train(session, model, optimizer, range(2))


def a_probe(session, model, optimizer):
    session.observe(every=1)
    train(session, model, optimizer, range(2))


def two_probes_in_mid_step(session, model, optimizer):
    session.observe(every=1, tensors=("weight", "update"))
    session.observe(every=1)
    session.backward(model(torch.randn(16, 8)).sum())


def a_recorded_step(session, model, optimizer):
    train(session, model, optimizer, range(WINDOW + 1), poison=range(WINDOW + 1))
    model(torch.randn(16, 8))


def blame_and_check(session, model, optimizer):
    halfstep.blame(session, lambda: model(torch.randn(16, 8)).sum())
    halfstep.check(session, lambda: model(torch.randn(16, 8)).sum())


def compiled(session, model, optimizer):
    train(session, torch.compile(model, backend="eager"), optimizer, range(2))


USES = [nothing, a_probe, two_probes_in_mid_step, a_recorded_step, blame_and_check, compiled]


@pytest.mark.parametrize("use", USES, ids=[use.__name__ for use in USES])
@every_plan
@pytest.mark.slow_but("O0-bf16-a_", "O1-fp16-nothing", "O1-fp16-two", "O2-bf16-nothing", "O2-bf16-two")
def test_what_a_dropped_session_held_of_the_process_goes_with_it(name, low, use):
    before = process()
    model, optimizer, session = start(name, low, loss_scale=1.0 if low == "fp16" else None)
    use(session, model, optimizer)
    gone = weakref.ref(session)
    del session, model, optimizer
    gc.collect()
    assert gone() is None
    assert process() == before


def test_functions_that_op_changes_replaced_are_put_back(monkeypatch):
    monkeypatch.setitem(sys.modules, SWISH.__name__, SWISH)
    written = SWISH.swish
    model = Net()
    session = halfstep.initialize(
        model, torch.optim.AdamW(model.parameters()), "O1", low="bf16", ops={"deny": [f"{SWISH.__name__}:swish"]}
    )
    assert SWISH.swish is not written
    del session, model
    gc.collect()
    assert SWISH.swish is written


def test_of_two_sessions_the_one_that_is_left_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, SWISH.__name__, SWISH)
    ops = {"deny": [f"{SWISH.__name__}:swish"]}

    class Swish(nn.Linear):
        def forward(self, x):
            return SWISH.swish(super().forward(x))

    kept, dropped = Swish(4, 4), Swish(4, 4)
    session = halfstep.initialize(kept, plan="O1", low="bf16", ops=ops)
    other = halfstep.initialize(dropped, plan="O1", low="bf16", ops=ops)
    del dropped, other
    gc.collect()
    with torch.no_grad():
        wanted = kept(torch.ones(2, 4))
        inside = []
        monkeypatch.setattr(torch, "sigmoid", lambda x, own=torch.sigmoid: inside.append(x.dtype) or own(x))
        assert torch.equal(kept(torch.ones(2, 4)), wanted)
    assert inside == [torch.float32]
    session.close()


def test_dropped_sessions_take_no_place_from_new_ones():
    for index in range(2 * len(MARKERS)):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        ops = {"deny": ["relu", "gelu", "silu", "mish", "celu", "selu", "elu", "tanh", "sin", "cos"][: index + 1]}
        session = halfstep.initialize(model, plan="O1", low="bf16", ops=ops)
        del session, model
        gc.collect()
    assert REGISTRY._slots == {}


@pytest.mark.parametrize("held", ["model", "probe", "neither"])
def test_a_dropped_probe_leaves_a_model_at_o0_as_it_was(held):
    model, optimizer, session = start("O0", "bf16")
    probe = session.observe(every=1)
    train(session, model, optimizer, range(2))
    seen = len(probe.flush())
    assert seen > 0
    if held != "probe":
        del probe
    del session
    gc.collect()
    assert process()["stance"] == "default"
    assert all(not getattr(module, hooks) for module in model.modules() for hooks in HOOKS)
    if held == "probe":
        assert probe.flush() == []


@pytest.mark.parametrize(("name", "low"), PLANS[1:3])
def test_a_session_lives_on_with_its_model(name, low):
    model, optimizer, session = start(name, low)
    train(session, model, optimizer, range(2))
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is not None
    again = halfstep.initialize(model, optimizer, name, low=low, rules=[Rule("head", halfstep.FULL)])
    assert gone() is None or gone().closed
    train(again, model, optimizer, range(2))
    again.close()
    assert all(p.dtype is torch.float32 for p in model.parameters())
