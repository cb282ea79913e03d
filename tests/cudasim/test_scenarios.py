"""Sessions on CUDA: places, copies that arrive late, streams, and what may not happen while a graph is captured.

The rows with a simulated device alone (`simulated`) set what a GPU does by itself; the others run on a GPU too.
"""

import gc
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import SetupError
from halfstep.explain.diagnose.counter import WINDOW
from halfstep.explain.report.run import read_log
from halfstep.formats import BF16
from halfstep.plan.levels import level
from halfstep.plan.optable import effective
from halfstep.records import StepRecord
from halfstep.train.cast.ops import OpEngine
from halfstep.train.kernels import devices

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]
device = sys.modules.get("tests.cudasim.device")
simulated = pytest.mark.skipif(device is None, reason="needs the simulated device of tests/cudasim")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLANS = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]
plans = pytest.mark.parametrize(("name", "low"), PLANS)
PLACES = [
    pytest.param(("cuda:0", "cuda:0"), id="one"),
    pytest.param(("cuda:1", "cuda:1"), id="not-the-current", marks=two_devices),
    pytest.param(("cuda:0", "cuda:1"), id="two", marks=two_devices),
]
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW-lr-on-cpu": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3)),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Lion": halfstep.Lion,
    "Lamb": halfstep.Lamb,
    "NovoGrad": halfstep.NovoGrad,
    "Lamb-lr-on-cpu": lambda params: halfstep.Lamb(params, lr=torch.tensor(1e-3)),
    "NovoGrad-lr-on-cpu": lambda params: halfstep.NovoGrad(params, lr=torch.tensor(1e-3)),
}


class Split(nn.Module):
    """A model on one device or two."""

    def __init__(self, first, last):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16), nn.ReLU()).to(first)
        self.last = nn.Linear(16, 4).to(last)

    def forward(self, x):
        return self.last(self.first(x).to(self.last.weight.device))


def opened(name="O2", low="bf16", optimizer="AdamW", places=("cuda:0", "cuda:0")):
    torch.manual_seed(0)
    model = Split(*places)
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, halfstep.initialize(model, made, name, low=low)


def step(model, optimizer, session, seed, *, poisoned=False):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = torch.inf if poisoned else 0.0
    optimizer.zero_grad()
    session.backward(model(x.to(next(model.parameters()).device)).float().square().mean())
    if device is not None:
        device.taken()
        device.LAUNCHES.clear()
    return session.step(max_norm=1.0)


@plans
@pytest.mark.parametrize("places", PLACES)
def test_a_step_skips_what_is_not_finite_and_waits_for_nothing(name, low, places):
    parts = opened(name, low, places=places)
    records = [step(*parts, seed, poisoned=seed == 1) for seed in range(4)]
    if device is not None:
        assert device.waits(device.taken()) == {}
    assert [bool(record.skipped) for record in records] == [False, True, False, False]
    assert records[0].skipped.device == torch.device(places[1])  # the loss's


@pytest.mark.parametrize(("name", "low"), [("O1", "fp16"), ("O1", "bf16"), ("O2", "fp16")])
@pytest.mark.parametrize("max_norm", [0.01, None])
def test_a_step_is_as_long_as_its_true_gradients_or_as_their_limit(name, low, max_norm):
    model = nn.Linear(8, 8, bias=False).cuda()
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    with halfstep.initialize(model, made, name, low=low) as session:
        before = model.state_dict()["weight"].clone()
        session.backward(model(torch.ones(1, 8, device="cuda")).float().sum() / 64)  # 64 gradients of as much
        record = session.step(max_norm=max_norm)
        moved = float((before - model.state_dict()["weight"]).norm())
    assert float(record.grad_norm) == pytest.approx(1 / 8)
    assert moved == pytest.approx(max_norm or 1 / 8, rel=1e-3)


@simulated
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@plans
def test_no_row_of_the_table_waits(optimizer, name, low):
    parts = opened(name, low, optimizer)
    for seed in range(2):
        step(*parts, seed)
    assert device.waits(device.taken()) == {}


@simulated
@pytest.mark.parametrize(
    ("name", "low", "optimizer", "steps"),
    [("O2", "bf16", each, 2) for each in OPTIMIZERS]
    + [("O3", "bf16", each, 2) for each in ("Lamb", "NovoGrad")]
    + [("O2", "fp16", "Lamb", WINDOW)],  # the last of these sends to the host what was found in all
)
def test_launches_do_not_grow_with_the_tensors(name, low, optimizer, steps):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(22))).cuda()
    made = OPTIMIZERS[optimizer](model.parameters())
    with halfstep.initialize(model, made, name, low=low) as session:
        for number in range(steps):
            made.zero_grad()
            session.backward(model(torch.ones(1, 8, device="cuda")).float().sum())
            device.taken()
            device.LAUNCHES.clear()
            session.step(max_norm=1.0)
            assert number == 0 or device.launches(device.taken()) <= 20


@simulated
@pytest.mark.parametrize("loss", [torch.float16, torch.float32, torch.float64])
def test_the_numbers_of_a_step_go_to_a_log_in_one_copy(loss, tmp_path):
    skipped, scale, norm = (torch.tensor(value, device="cuda") for value in (False, 2.0, 0.5))
    record = StepRecord(1, skipped, scale, norm, loss=torch.tensor(4.0, dtype=loss, device="cuda"), bad_loss=~skipped)
    with halfstep.RunLog(tmp_path / "run.jsonl") as log:
        device.taken()
        device.LAUNCHES.clear()
        log(record)
        assert device.launches(device.taken()) == 2  # they are packed and copied
    (values,) = read_log(tmp_path / "run.jsonl").steps
    assert (values.skipped, values.scale, values.grad_norm, values.loss, values.bad_loss) == (
        False,
        2.0,
        0.5,
        4.0,
        True,
    )


@pytest.fixture
def late():
    """Has copies to the host arrive when an event behind them was asked twice, or waited for, and not before."""
    torch.ops.cudasim.late(2)
    yield
    torch.ops.cudasim.late(-1)


@simulated
@two_devices
@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
def test_what_is_read_on_the_host_has_arrived(late, place, tmp_path):
    model, optimizer, session = opened("O2", "fp16", places=(place, place))
    with halfstep.RunLog(tmp_path / "run.jsonl") as log:
        probe = session.observe(every=1)
        for seed in range(12):
            record = step(model, optimizer, session, seed, poisoned=seed in (3, 4))
            log(record)
        seen = probe.flush()
    assert session.status().skipped == 2
    assert {each.stats.nans for each in seen if each.step < 3} == {0}
    values = halfstep.read_log(tmp_path / "run.jsonl").steps
    assert [value.skipped for value in values] == [seed in (3, 4) for seed in range(12)]


@simulated
def test_a_step_on_a_stream_of_its_own_frees_nothing_that_is_in_use():
    parts = opened()
    step(*parts, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for seed in range(3):
            step(*parts, seed)
    torch.cuda.current_stream().wait_stream(side)
    step(*parts, 3)


@simulated
@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_a_stream_may_get_while_another_uses_it_raises(waits):
    side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    with torch.cuda.stream(side):
        x.mul_(2.0)
    del x
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    with nullcontext() if waits else pytest.raises(RuntimeError, match="memory that another stream still uses"):
        torch.ones(8, device="cuda").mul_(2.0)


@simulated
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("warm", [1, 3])
def test_a_captured_step_copies_nothing_from_the_host(optimizer, warm, monkeypatch):
    for name, low in PLANS:
        model, made, session = opened(name, low, optimizer)
        for seed in range(warm):
            step(model, made, session, seed)
        compiled = set(device.LAUNCHES)
        x = torch.ones(16, 8, device="cuda")
        made.zero_grad()
        device.taken()
        device.LAUNCHES.clear()
        monkeypatch.setattr(device.Settings, "capturing", True)
        session.backward(model(x).float().square().mean())
        session.step(max_norm=1.0)
        monkeypatch.setattr(device.Settings, "capturing", False)
        counts = device.taken()
        assert [what for what in counts if "cpu" in what or what.startswith("wait")] == [], (name, low)
        assert set(device.LAUNCHES) <= compiled
        session.close()


def test_a_checkpoint_moved_to_the_cpu_resumes_on_the_device():
    parts = opened()
    for seed in range(3):
        step(*parts, seed)
    state = [moved(part.state_dict()) for part in parts]
    step(*parts, 3)
    again = opened()
    for part, held in zip(again, state, strict=True):
        part.load_state_dict(held)
    step(*again, 3)
    for one, other in zip(parts[0].state_dict().values(), again[0].state_dict().values(), strict=True):
        assert torch.equal(one, other)


def moved(held):
    if isinstance(held, torch.Tensor):
        return held.cpu()
    if isinstance(held, dict):
        return {key: moved(value) for key, value in held.items()}
    return [moved(value) for value in held] if isinstance(held, list) else held


@pytest.mark.parametrize("layout", ["unaligned", "channels_last"])
def test_weights_of_other_layouts_train(layout):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).cuda()
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    else:
        weight = model[0].weight
        weight.data = torch.zeros(weight.numel() + 1, device="cuda")[1:].view_as(weight).copy_(weight.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = halfstep.initialize(model, optimizer, "O1", low="bf16")
    before = model[0].weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        session.backward(model(torch.ones(2, 3, 8, 8, device="cuda")).square().mean())
        assert not bool(session.step(max_norm=1.0).skipped)
    assert not torch.equal(before, model[0].weight)


def test_a_model_on_the_gpu_and_the_cpu_is_refused():
    with pytest.raises(SetupError, match="several kinds of device"):
        opened(places=("cuda", "cpu"))


def test_each_of_five_tables_casts_as_it_says():
    engines, actions = [], effective(level("O2", BF16))
    try:
        for name in list(actions)[:5]:  # five tables, each with a marker of its own
            kept = {other: action for other, action in actions.items() if other != name}
            engines.append(OpEngine(kept, torch.bfloat16, "cuda"))
            engines[-1].open()
            with engines[-1].region():
                assert torch.exp(torch.ones(2, dtype=torch.bfloat16, device="cuda")).dtype == torch.bfloat16
                assert torch.ones(2, 2, device="cuda").matmul(torch.ones(2, 2, device="cuda")).dtype == torch.bfloat16
    finally:
        for engine in engines:
            engine.close()


@simulated
@pytest.mark.parametrize("low", [None, "bf16", "fp16"])
def test_a_gpu_without_units_for_a_format_is_told_of_and_trains(low, fresh_kernels, monkeypatch, caplog, said_before):
    said_before.undo()
    monkeypatch.setattr(device.Settings, "capability", (6, 1))
    assert not bool(step(*opened("O1", low), 0).skipped)
    (message,) = caplog.messages
    assert "this device (cuda sm61) has no" in message
    assert message.endswith("units: training at level O0 would be faster")


@simulated
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "missing",
            "Triton cannot be imported (import of triton halted; None in sys.modules); run: pip install triton",
        ),
        ("no compiler", "Triton does not run here: RuntimeError: Failed to find C compiler"),
    ],
)
def test_without_triton_a_session_says_so_once_and_trains_alike(how, said, fresh_kernels, monkeypatch, caplog):
    model, optimizer, session = opened()
    step(model, optimizer, session, 0)
    devices.triton_kernels.cache_clear()
    if how == "missing":
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.delitem(sys.modules, "halfstep.train.kernels.triton")
    else:
        monkeypatch.setattr(sys.modules["halfstep.train.kernels.triton"], "_read_kernel", NoCompiler())
    alone = opened()
    for _ in range(2):
        step(*alone, 0)
    assert {*device.LAUNCHES} <= {"foreach_norm"}
    (message,) = caplog.messages
    assert message.endswith(said)
    again = opened()
    step(*again, 0)
    for one, other in zip(model.parameters(), again[0].parameters(), strict=True):
        torch.testing.assert_close(one, other)


class NoCompiler:
    """A Triton kernel where there is no C compiler."""

    def __getitem__(self, grid):
        raise RuntimeError("Failed to find C compiler")


@pytest.fixture
def fresh_kernels(monkeypatch):
    yield
    monkeypatch.undo()
    gc.collect()  # sessions that were opened without
    devices.triton_kernels.cache_clear()
