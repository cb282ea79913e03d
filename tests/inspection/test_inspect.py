"""What an inspection counts, against a dispatch mode written here and torch's own counter; planted costs are found."""

import itertools
import json
import math
import re
from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import halfstep
from halfstep import FULL, OpChange, Rule
from halfstep.explain.report.lines import to_json
from halfstep.explain.report.step import _of_inspection, inspection_report
from halfstep.lab.inspection import inspect, meter, savings
from halfstep.lab.inspection.inspect import kernel_rows
from halfstep.lab.inspection.meter import Call, Shape
from halfstep.lab.inspection.savings import gain, narrowed, padded
from halfstep.machine import AVX2, AVX512_BF16
from tests.models.zoo import TASKS

LEVELS = [("O0", "bf16"), ("O1", "bf16"), ("O2", "bf16"), ("O3", "bf16"), ("O1", "fp16"), ("O2", "fp16")]


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.a, self.b = nn.Linear(8 * 36, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.b(F.gelu(self.a(self.conv(x).flatten(1))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


class Counting(TorchDispatchMode):
    """Counts what the dispatcher is asked for: written for this test, and knows nothing of halfstep."""

    def __init__(self):
        super().__init__()
        self.casts, self.ops = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        floats = [t.dtype for t in tree_leaves((args, kwargs)) if torch.is_tensor(t) and t.is_floating_point()]
        if func.is_view or func.namespace == "prim":
            return result
        self.ops[func._schema.name.partition("::")[2]] += 1
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and floats:
            made = result.dtype
            if made.is_floating_point and made is not floats[-1]:
                self.casts[floats[-1], made] += 1
        return result


def session_of(model, level="O1", low="bf16", **options):
    return halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), level, low=low, **options)


def inspected(loss, *args, **options):
    with session_of(*args, **options) as session:
        return halfstep.inspect(session, loss)


def gains(monkeypatch, share=0.5):
    """Has every comparison find that a change saves this share of a call's time, and tells of each."""
    monkeypatch.setattr(savings, "_WORTH", 0.0)
    monkeypatch.setattr(savings, "gain", lambda call, change: share * call.seconds)


@pytest.mark.parametrize(("level", "low"), LEVELS)
@pytest.mark.slow_but("O1-fp16", "O2-bf16")
def test_operators_and_casts_are_those_of_an_independent_count(level, low):
    model, x = Net(), torch.randn(2, 3, 8, 8)
    native = {} if level == "O0" else {"emulate": False, "loss_scale": 1.0}
    with session_of(model, level, low, **native) as session:
        found = halfstep.inspect(session, lambda: model(x).square().mean())
        with Counting() as counted:
            session.backward(model(x).square().mean())
    ops = Counter()
    for row in found.rows:
        ops[row.operator] += row.calls
    names = {"mm", "addmm", "convolution_backward", "gelu", "gelu_backward", "_to_copy", "sum"}
    assert {name: ops[name] for name in names} == {name: counted.ops[name] for name in names}
    assert ops["conv2d"] == counted.ops["convolution"] == 1
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    casts = {(cast.source, cast.target): cast.calls for cast in found.casts}
    assert casts == {(short[a], short[b]): count for (a, b), count in counted.casts.items()}
    assert sum(row.share for row in found.rows) == pytest.approx(1)


UNCOUNTED = [  # by torch's counter, which knows attention on a CPU from 2.15 on
    name
    for name, op in (
        ("flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        ("mkldnn_rnn", "mkldnn_rnn_layer"),
    )
    if getattr(torch.ops.aten, op) not in flop_registry
]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.slow_but("ResNet-O1", "LSTM-O2")
def test_every_operator_cast_and_flop_of_six_models_is_counted(task, level, monkeypatch, on_processor):
    """Convolutions, both attentions, an LSTM, embeddings, tied weights and norms, as they are written ordinarily."""
    if task == "LSTM" and level != "O0" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no bf16 LSTM on this CPU")
    on_processor(AVX512_BF16)  # an emulated product is several operations to a mode that does not know of it
    gains(monkeypatch, 0.0)
    monkeypatch.setattr(savings, "taken", lambda call: 0.0)
    monkeypatch.setattr(savings, "_ROUNDS", 0)
    torch.manual_seed(0)
    model, (batch,) = TASKS[task].build(), TASKS[task].batches(1)
    with session_of(model, level) as session:
        found = halfstep.inspect(session, lambda: TASKS[task].loss(model, batch))
        with FlopCounterMode(display=False) as counter, Counting() as counted:
            TASKS[task].loss(model, batch).backward()
    ops = Counter()
    for row in found.rows:
        ops[re.sub(r"^conv(_transpose)?[123]d$", "convolution", row.operator)] += row.calls
    assert ops == counted.ops
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    casts = {(cast.source, cast.target): cast.calls for cast in found.casts}
    assert casts == {(short[a], short[b]): count for (a, b), count in counted.casts.items()}
    assert bool(casts) == (level != "O0")
    known = sum(row.flops for row in found.rows if not any(name in row.operator for name in UNCOUNTED))
    assert known == counter.get_total_flops() > 0


@pytest.mark.parametrize(("level", "low"), LEVELS)
@pytest.mark.slow_but("O1-bf16", "O3")
def test_flops_are_those_of_torchs_counter(level, low):
    model, x = Net(), torch.randn(2, 3, 8, 8)
    found = inspected(lambda: model(x).square().mean(), model, level, low)
    plain = Net()
    with FlopCounterMode(display=False) as counter:
        plain(x).square().mean().backward()
    assert sum(row.flops for row in found.rows) == counter.get_total_flops()


def test_flops_of_attention_and_lstm_are_those_of_their_products():
    model, x = Attention(), torch.randn(3, 5, 16)
    found = inspected(lambda: model(x).square().mean(), model)
    by_name = {row.operator: row.flops for row in found.rows if "attention" in row.operator}
    # 3 texts x 2 heads, 5 x 5 scores of 8 numbers: two products forward, five backward, 2 operations each
    assert sorted(by_name.values()) == [2 * 2 * 6 * 5 * 5 * 8, 5 * 2 * 6 * 5 * 5 * 8]
    lstm = nn.LSTM(4, 6)
    found = inspected(lambda: lstm(torch.ones(7, 2, 4))[0].square().mean(), lstm)
    counted = {row.operator: row.flops for row in found.rows if row.operator.startswith("mkldnn_rnn")}
    once = 2 * 7 * 2 * (4 * 24 + 6 * 24)  # 7 steps, 2 texts: 24 gates of 4 inputs and 6 states
    assert counted in ({"mkldnn_rnn_layer": once, "mkldnn_rnn_layer_backward": 2 * once}, {})


def test_the_least_of_some_passes_counts_and_a_busy_machine_is_told(monkeypatch):
    ticks = itertools.count()
    clock = itertools.accumulate(1e-3 if next(ticks) % 33 else 1.0 for _ in itertools.count())  # a pause now and then
    monkeypatch.setattr(meter, "clock_of", lambda device: lambda: next(clock))
    found = inspected(lambda: model(torch.ones(2, 3, 8, 8)).square().mean(), model := Net())
    assert found.seconds == pytest.approx(1e-3 * sum(row.calls for row in found.rows))
    assert found.disturbed > 1.5
    for shown in (str(list(_of_inspection(found))), str(found), found._repr_html_()):
        assert "Other work ran on this machine" in shown


def test_a_model_without_a_fault_has_no_saving(monkeypatch):
    gains(monkeypatch)
    for level in ("O1", "O2"):
        model, x = Net(), torch.randn(2, 3, 8, 8)
        rules = [Rule("conv", FULL)] if level == "O1" else ()
        found = inspected(lambda model=model, x=x: model(x).square().mean(), model, level, rules=rules)
        codes = [saving.code for saving in found.savings]
        assert codes == (["ran full"] if level == "O1" else [])


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_rule_that_keeps_products_full_is_named_with_the_edit_that_undoes_it(level, monkeypatch):
    gains(monkeypatch)
    model, x = Net(512), torch.randn(64, 3, 8, 8)
    with session_of(model, level, rules=[Rule("a", FULL)]) as session:
        closure = lambda: model(x).square().mean()  # noqa: E731
        first = halfstep.inspect(session, closure).savings[0]
        plan = session.plan.edit(*first.cure)
    assert (first.code, first.place.partition(",")[0]) == ("ran full", "a")
    assert "Rule('a', FULL) keeps it in fp32" in first.evidence.replace("pattern=", "").replace("policy=", "")
    with session_of(model, plan, low=None) as session:
        after = halfstep.inspect(session, closure)
        assert session.assignment.of("a").compute is halfstep.BF16
    assert after.savings == ()


def test_a_denied_operation_is_named_with_the_edit_that_allows_it(monkeypatch):
    gains(monkeypatch)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    found = inspected(lambda: model(x).square().mean(), model, ops={"deny": ["conv2d"]})
    assert found.savings[0].cure == (OpChange("allow", "conv2d"),)
    assert "the plan denies conv2d" in found.savings[0].evidence


def test_what_a_format_does_not_make_faster_is_not_told(monkeypatch):
    gains(monkeypatch, -0.5)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    with session_of(model, rules=[Rule("a", FULL)]) as session:
        assert halfstep.inspect(session, lambda: model(x).square().mean()).savings == ()


def test_a_weight_that_is_cast_twice_is_named(monkeypatch):
    gains(monkeypatch, -0.5)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fixed = nn.Parameter(torch.randn(1024, 1024), requires_grad=False)  # autocast keeps casts of no such
            self.head = nn.Linear(1024, 1)

        def forward(self, x):
            return self.head(x @ self.fixed @ self.fixed)

    model, x = Twice(), torch.randn(2, 1024)
    found = inspected(lambda: model(x).square().mean(), model, "O1")
    first = next(saving for saving in found.savings if saving.code == "cast again")
    assert (first.place, first.evidence) == ("fixed", "cast to bf16 2 times in one forward pass")
    found = inspected(lambda: model(x).square().mean(), model, "O2")
    assert "fixed" in {saving.place for saving in found.savings if saving.code == "cast again"}  # frozen: kept fp32


def test_an_operation_that_runs_natively_where_products_are_emulated_is_named_if_its_fp32_form_is_faster(
    monkeypatch, on_processor
):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 1)

        def forward(self, x):
            return self.down((self.up(x).square() + 1) ** 0.5)

    monkeypatch.setattr(savings, "_HEAVY", 0.0)
    monkeypatch.setattr(savings, "_WORTH", 0.0)
    monkeypatch.setattr(savings, "gain", lambda call, change: -1.0)
    wide = []

    def of_powers(call, to):
        wide.append(to)
        return 1.0 if call.func in (torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.addmm.default) else -1.0

    monkeypatch.setattr(savings, "gain_of_casts", of_powers)
    model, x = Root(), torch.randn(16, 8)
    for row, named in ((AVX2, ["pow"]), (AVX512_BF16, [])):
        on_processor(row)
        found = inspected(lambda: model(x).square().mean(), model, "O2", low="bf16")
        slow = [saving for saving in found.savings if saving.code == "ran slow"]
        assert [saving.evidence.partition(" ")[0].partition("::")[2] for saving in slow] == named
        if slow:
            assert set(wide) == {torch.float32}
            assert slow[0].advice == "deny pow, or keep the module in fp32"


def test_sizes_that_are_not_aligned_are_named_with_the_next_that_are(monkeypatch):
    gains(monkeypatch)
    for width, advice in ((1003, "pad 1003 to 1008"), (1008, None)):
        model, x = Net(width), torch.randn(8, 3, 8, 8)
        found = inspected(lambda model=model, x=x: model(x).square().mean(), model, "O2")
        told = [saving.advice for saving in found.savings if saving.code == "not aligned" and saving.place[:1] == "a"]
        assert told == ([] if advice is None else [advice])


class Stream(nn.Module):
    """Blocks whose stream gets something added before them."""

    def __init__(self, add):
        super().__init__()
        self.first, self.add = nn.Linear(8, 8), add
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("pe", torch.randn(4, 8))

    def forward(self, x):
        h = self.add(self, self.first(x), x)
        for block in self.blocks:
            h = h + block(h)
        return h


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda self, h, x: h + x, "an input is added here; 3 modules cast them to"),
        (lambda self, h, x: h + self.pe, "the buffer 'pe' is added here; 3 modules cast them to"),
        (lambda self, h, x: h + x.to(h.dtype), None),
        (lambda self, h, x: h, None),
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_fp32_stream_is_named_with_what_the_step_takes_without_it(add, what, level, monkeypatch):
    gains(monkeypatch)
    ticks = itertools.count()
    monkeypatch.setattr(meter, "clock_of", lambda device: lambda: next(ticks))  # each operation takes one second
    model, x = Stream(add), torch.randn(4, 8)
    found = inspected(lambda: model(x).square().mean(), model, level)
    streams = [saving for saving in found.savings if saving.code == "wide stream"]
    if what is None or level == "O1":  # where weights are fp32 streams are
        assert streams == []
        return
    (saving,) = streams
    assert what in saving.evidence
    assert ("input='low'" in saving.advice) == ("input" in what)
    assert saving.place.startswith("(model), test_inspect.py:")
    with session_of(Stream(lambda self, h, x: h + (x if "input" in what else self.pe).to(h.dtype)), level) as session:
        kept = session.runtime.roots[0]
        low = halfstep.inspect(session, lambda: kept(x).square().mean())
    gone = sum(row.calls for row in found.rows) - sum(row.calls for row in low.rows)
    assert saving.seconds == gone + 1 > 4  # the cast of what is added is within its operation


class Buffers(nn.Module):
    """Streams that buffers widen, one after another; the product of the last is the largest."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2 * count))
        for number in range(count):
            self.register_buffer(f"pe_{number}", torch.randn(4, 8))

    def forward(self, x):
        total = 0
        for number in range(len(self.blocks) // 2):
            h = self.blocks[2 * number](x).to(torch.bfloat16) + getattr(self, f"pe_{number}")
            for _ in range(number + 1):
                total = total + self.blocks[2 * number](h) + self.blocks[2 * number + 1](h)
        return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "tick", "calls"),
    [(1, 0, 3 * 2), (3, 0, 3 * 4), (5, 0, 3 * 4), (1, 60, 2), (5, 60, 4)],
)
def test_streams_of_the_costliest_sources_alone_are_measured_and_once_where_a_step_is_slow(
    sources, tick, calls, monkeypatch
):
    """A closure runs once to warm up and some times to be metered; then a round is a run as it is, and one a source."""
    gains(monkeypatch)
    ticks, seconds = itertools.count(), itertools.count(step=tick)
    monkeypatch.setattr(meter, "clock_of", lambda device: lambda: next(ticks))
    monkeypatch.setattr(savings, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(inspect, "_SECONDS", math.inf)
    model, x, count = Buffers(sources), torch.randn(4, 8), []
    found = inspected(lambda: count.append(0) or model(x).square().mean(), model, "O2")
    assert len(count) == 1 + inspect._PASSES + calls
    streams = [saving for saving in found.savings if saving.code == "wide stream"]
    named = {next(f"pe_{i}" for i in range(sources) if f"'pe_{i}'" in saving.evidence) for saving in streams}
    assert named == {f"pe_{i}" for i in range(sources)[-3:]}  # those whose casts take most
    assert {"2 more sources were not measured" in saving.evidence for saving in streams} == {sources == 5}


def test_a_gain_is_the_seconds_that_a_change_saves(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("halfstep.timing.perf_counter", lambda: now[0])

    def call(tensor):
        now[0] += {torch.float64: 0.008, torch.float32: 0.004, torch.bfloat16: 0.003}[tensor.dtype]

    def made(dtype):
        return Call(call, None, (), (), 1, 0, 0.004, args=(Shape.of(torch.ones(3, dtype=dtype)),), kwargs={})

    low, full = torch.bfloat16, torch.float32
    assert gain(made(full), narrowed(full, low)) == pytest.approx(0.001)
    assert gain(made(full), narrowed(full, full)) == pytest.approx(0.0)
    assert gain(made(torch.float64), narrowed(torch.float64, full)) == pytest.approx(0.004)
    assert gain(made(torch.float64), narrowed(full, low)) == pytest.approx(0.0)  # nothing in it is fp32
    assert gain(made(low), padded(8)) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ((0.5,) * 10 + (1.5,), 0.5),  # one turn that something else slowed
        ((0.5,) * 9 + (1.5,) * 2, -0.5),
        ((0.9, 1.2, 0.8, 0.9, 1.1), -0.16),  # between the two worst of five, 0.4 of the way
        ((0.5, 0.6), 0.41),
    ],
)
def test_a_gain_is_what_nine_in_ten_turns_save(then, expected, monkeypatch):
    monkeypatch.setattr(savings, "take_turns", lambda calls, **_: {"now": [1.0] * len(then), "then": list(then)})
    made = Call(torch.neg, None, (), (), 1, 0, 1.0, args=(Shape.of(torch.ones(3)),), kwargs={})
    assert gain(made, narrowed(torch.float32, torch.bfloat16)) == pytest.approx(expected)


@pytest.mark.parametrize(("seconds", "turns"), [(1.0, 9), (1.01, 2)])
def test_a_slow_call_is_made_nine_times_and_a_very_slow_one_twice(seconds, turns, monkeypatch):
    count, now = Counter(), [0.0]
    monkeypatch.setattr("halfstep.timing.perf_counter", lambda: now[0])

    def call(tensor):
        now[0] += seconds
        count[tensor.dtype] += 1

    made = Call(call, None, (), (), 1, 0, seconds, args=(Shape.of(torch.ones(3)),), kwargs={})
    gain(made, narrowed(torch.float32, torch.bfloat16))
    assert set(count.values()) == {turns + 3}  # tried once, and warmed up and timed once to know how often a turn calls


def test_each_shape_is_timed_once_for_all_modules(monkeypatch):
    timed = []
    monkeypatch.setattr(savings, "_WORTH", 0.0)
    monkeypatch.setattr(savings, "gain", lambda call, change: timed.append(str((call.func, call.args))) or call.seconds)
    model, x = nn.Sequential(*(nn.Linear(12, 12) for _ in range(3))), torch.randn(4, 12)
    found = inspected(lambda: model(x).square().mean(), model, "O2")
    assert len([saving for saving in found.savings if saving.code == "not aligned"]) == 3
    assert len(timed) == len(set(timed)) > 0


@pytest.mark.parametrize(("level", "full", "then"), [("O0", "", "fp32"), ("O1", "", "bf16"), ("O1", "b", "fp32")])
def test_a_product_in_fp64_is_named_with_what_it_gains_in_the_plans_format(level, full, then, monkeypatch):
    """Each call takes a second in fp64 and less in others, so that the saving says what it was measured against."""
    shorter = {"fp64": 1.0, "fp32": 0.5, "bf16": 0.125}
    dtypes = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}

    def gain(call, change):
        def takes(change):
            return shorter[dtypes[change(next(each for each in call.args if isinstance(each, Shape))).dtype]]

        return takes(lambda shape: shape) - takes(change)

    monkeypatch.setattr(savings, "_WORTH", 0.0)
    monkeypatch.setattr(savings, "gain", gain)

    class Double(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), Projection()

        def forward(self, x):
            return self.b(self.a(x))

    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("basis", torch.eye(16, dtype=torch.float64))

        def forward(self, x):
            return (x.double() @ self.basis).float()

    model, x = Double(), torch.randn(4, 16)
    found = inspected(lambda: model(x).square().mean(), model, level, rules=[Rule(full, FULL)] if full else ())
    (saving,) = [saving for saving in found.savings if saving.place.startswith("b,")]
    assert saving.code == "ran full"
    assert saving.evidence.startswith("2 products in fp64, ")  # forward, and the gradient of its input
    assert "x.float()" in saving.advice
    assert saving.seconds == pytest.approx(2 * (1.0 - shorter[then]))


def test_a_call_that_cannot_be_made_again_gains_nothing():
    def call(tensor):
        if tensor.dtype is not torch.float32:
            raise RuntimeError("no kernel")

    made = Call(call, None, (), (), 1, 0, 0.004, args=(Shape.of(torch.ones(3)),), kwargs={})
    assert gain(made, narrowed(torch.float32, torch.bfloat16)) == 0


def test_a_change_of_shapes_keeps_their_layout():
    def of(tensor):
        return Shape.of(tensor)

    assert padded(8)(of(torch.empty(10, 3))) == of(torch.empty(16, 3))
    assert padded(8)(of(torch.empty(10, 30).t())) == of(torch.empty(16, 32).t())
    assert padded(8)(of(torch.empty(9).expand(4, 9))) == of(torch.empty(16).expand(4, 16))
    images = torch.empty(2, 12, 5, 5).to(memory_format=torch.channels_last)
    assert padded(8)(of(images)) == of(torch.empty(2, 16, 5, 5).to(memory_format=torch.channels_last))
    low = narrowed(torch.float32, torch.bfloat16)
    assert low(of(torch.empty(2))).dtype is torch.bfloat16
    assert low(of(torch.empty(2, dtype=torch.int64))).dtype is torch.int64


@pytest.mark.parametrize(("level", "low"), LEVELS)
@pytest.mark.slow_but("O2-fp16")
def test_nothing_of_the_model_has_changed_afterwards(level, low):
    model, x = Net(), torch.randn(2, 3, 8, 8)
    model.norm = nn.BatchNorm1d(8)
    model.forward = None
    del model.forward
    with session_of(model, level, low) as session:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = torch.get_rng_state()
        halfstep.inspect(session, lambda: F.dropout(model.norm(model(x))).square().mean())
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_report_and_json_hold_what_was_found(monkeypatch):
    gains(monkeypatch)
    model, x = Net(512), torch.randn(64, 3, 8, 8)
    found = inspected(lambda: model(x).square().mean(), model, rules=[Rule("a", FULL)])
    lines = [str(part) for part in inspection_report(found, what="Net under O1 in bf16").renderables]
    assert any(line.startswith("ran full at a") for line in lines)
    assert any("edit: Rule" in line for line in lines)
    assert "  edit: plan.edit(Rule('a', Policy('full', 'low', 'low')))" in str(found).splitlines()
    fields = json.loads(to_json(found))
    assert len(fields["rows"]) == len(found.rows)


def test_the_report_says_how_much_ran_on_tensor_cores():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    found = inspected(lambda: model(x).square().mean(), model)
    assert found.kernels == ()  # of a CPU
    rows = kernel_rows([("ampere_bf16_s16816gemm_bf16_128x64", 0.003), ("ampere_sgemm_128x64_tn", 0.001)])
    shown = inspection_report(replace(found, kernels=rows), what="Net").renderables
    said = "matrix product: 4.00 ms in kernels, 75% of it on tensor cores; not: ampere_sgemm_128x64_tn"
    assert said in [str(part) for part in shown]


def test_each_module_has_its_policy_and_what_decided_it():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    with session_of(model, "O2", rules=[Rule("a", FULL)]) as session:
        found = halfstep.inspect(session, lambda: model(x).square().mean())
    rows = {row.name: row for row in found.modules}
    assert list(rows) == ["", "conv", "a", "b"]
    assert [(rows[name].param, rows[name].compute) for name in ("conv", "a", "b")] == [
        ("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "bf16"),
    ]  # fmt: skip
    assert [(rows[name].type, rows[name].reason) for name in ("a", "b")] == [("Linear", "rule 'a'"), ("Linear", "O2")]
    lines = [str(part) for part in inspection_report(found, what="Net").renderables]
    assert "1 Linear (a): param fp32, compute fp32, output input; why: rule 'a'" in lines
    assert "1 Linear (b): param bf16, compute bf16, output -; why: O2" in lines
    header, *assigned = map(str.split, str(session.assignment).splitlines()[1:])
    assert header == ["module", "type", "param", "compute", "output", "why"]
    shown = [(row.name or "(model)", row.type, row.param, row.compute, row.output) for row in found.modules]
    assert shown == [tuple(words[:5]) for words in assigned]  # the same words for the same thing


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("rules", "denied", "module", "patterns"),
    [
        (("*", "a.b"), (), "a.b", {"*", "a.b"}),
        (("a.b", "*"), (), "a.a", {"*", "a.b"}),  # two rules on a module have to agree
        (("a", "a.b"), (), "a.b", {"a.b"}),
        (("a", "a.b"), (), "a.a", {"a"}),
        (("a",), ("linear",), "a.b", {"a"}),
        (("type:Module",), (), "a.a", {"type:Module"}),  # a base class
    ],
)
def test_the_edits_of_a_finding_are_all_that_it_takes(level, rules, denied, module, patterns, monkeypatch):
    gains(monkeypatch)
    x, model = torch.randn(4, 8), nn.Sequential()
    model.add_module("a", nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8))))

    def full(plan, **options):
        with session_of(model, plan, **options) as session:
            found = halfstep.inspect(session, lambda: model(x).square().mean()).savings
            return session.plan, {each.place.partition(",")[0]: each for each in found if each.code == "ran full"}

    plan, found = full(level, rules=[Rule(name, FULL) for name in rules], ops={"deny": list(denied)})
    cure = found[module].cure
    assert {edit.pattern for edit in cure if isinstance(edit, Rule)} == patterns
    assert [edit.op for edit in cure if isinstance(edit, OpChange)] == list(denied)
    assert module not in full(plan.edit(*cure), low=None)[1]


def test_an_edit_that_the_model_refuses_is_not_named(monkeypatch):
    """Low weights beside fp32 running statistics, which no kernel takes."""
    gains(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    found = inspected(lambda: model(torch.randn(4, 8)).square().mean(), model, "O2", rules=[Rule("*", FULL)])
    (saving,) = found.savings
    assert "Rule('*', FULL) keeps it in fp32" in saving.evidence
    assert saving.cure == ()


def test_a_custom_operation_has_its_namespace_in_its_name():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.library._scoped_library("inspected", "DEF") as library:
        library.define("mul(Tensor a) -> Tensor")
        library.impl("mul", lambda a: a * 2, "CompositeExplicitAutograd")
        with session_of(model) as session:
            found = halfstep.inspect(session, lambda: (model(x) + torch.ops.inspected.mul(x)).square().mean())
    assert [row.calls for row in found.rows if row.operator == "inspected::mul"] == [1]


def test_an_operation_that_an_fp32_input_promotes_is_named_with_the_edit_that_allows_it(monkeypatch):
    gains(monkeypatch)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    found = inspected(lambda: model(x).square().mean(), model, ops={"promote": ["conv2d"]})
    assert found.savings[0].cure == (OpChange("allow", "conv2d"),)
    assert "the plan promotes conv2d, and an input is fp32" in found.savings[0].evidence


@pytest.mark.parametrize(("denied", "codes"), [((), []), (("scaled_dot_product_attention",), ["ran full"])])
def test_attention_that_goes_backward_wide_is_no_finding(denied, codes, monkeypatch):
    gains(monkeypatch)
    model, x = Attention(), torch.randn(3, 8, 16)
    found = inspected(lambda: model(x).square().mean(), model, ops={"deny": list(denied)})
    assert any("flash_attention" in row.operator and "fp32" in row.formats for row in found.rows)
    assert [saving.code for saving in found.savings] == codes
