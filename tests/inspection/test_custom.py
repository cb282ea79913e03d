"""Custom operations that run in fp32 under a low plan: found by their time, with a gain only where one was measured."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import halfstep
from halfstep import FULL, OpChange, Rule
from halfstep.explain.report.step import inspection_report
from halfstep.lab.inspection import meter, savings
from halfstep.lab.inspection.meter import Call, Shape
from halfstep.lab.inspection.savings import gain_of_casts


def kept(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("halfstep_inspected::product_back", mutates_args=())
def product_back(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", enabled=False):
        return grad @ w.t(), x.t() @ grad


@torch.library.custom_op("halfstep_inspected::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    meter.clock_of(torch.device("cpu"))()  # where each of `inspected` takes a second: it takes two
    with torch.autocast("cpu", enabled=False):
        return x @ w


product.register_autograd(lambda ctx, grad: product_back(grad, *ctx.saved_tensors), setup_context=kept)


@torch.library.custom_op("halfstep_inspected::as_autocast", mutates_args=())
def as_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


as_autocast.register_autograd(lambda ctx, grad: (grad, None), setup_context=kept)


@torch.library.custom_op("halfstep_inspected::picky", mutates_args=())
def picky(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.from_numpy(x.numpy() @ w.numpy())


def by_products(ctx, grad):
    x, w = ctx.saved_tensors
    return grad @ w.t(), x.t() @ grad


picky.register_autograd(by_products, setup_context=kept)


@torch.library.custom_op("halfstep_inspected::grow", mutates_args=("x",))
def grow(x: torch.Tensor) -> None:
    meter.clock_of(torch.device("cpu"))()
    x.mul_(2)


class Net(nn.Module):
    def __init__(self, do):
        super().__init__()
        self.first, self.do, self.last = nn.Linear(8, 8), do, nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.last(self.do(self.first(x).float(), self.weight.float()))


@pytest.fixture
def inspected(monkeypatch):
    """Inspects a model that calls an operation; each operation takes a second, and low inputs save a half."""
    ticks = itertools.count()
    monkeypatch.setattr(meter, "clock_of", lambda device: lambda: next(ticks))
    monkeypatch.setattr(savings, "gain", lambda call, change: 0.5)
    monkeypatch.setattr(savings, "taken", lambda call: 0.0)

    def inspect(do, plan="O1", **options):
        model, x = nn.Sequential(Net(do)), torch.randn(4, 8)
        options = {"low": "bf16", **options} if isinstance(plan, str) else options
        with halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), plan, **options) as session:
            found = halfstep.inspect(session, lambda: model(x).float().square().mean())
            full = [saving for saving in found.savings if saving.code == "ran full"]
            return SimpleNamespace(full=full, plan=session.plan, all=found)

    return inspect


@pytest.fixture
def half(monkeypatch):
    """Has low inputs save a half of a custom operation too; in the forward, if it was called under autocast."""
    under = {"forward": torch.bfloat16, "backward": None}
    monkeypatch.setattr(savings, "gain_of_casts", lambda call, low: 0.5 * (call.autocast is under[call.note.phase]))


@pytest.mark.slow_but("O2")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_custom_operation_in_fp32_is_named_with_its_share_and_the_edit_that_lowers_it(level, inspected, half):
    found = inspected(lambda x, w: product(x, w), level)
    (saving,) = found.full
    assert saving.seconds == pytest.approx(1.0)  # of it and of what its backward pass calls
    assert saving.place.startswith("0, test_custom.py:")
    share = 3 / (1 + sum(row.calls for row in found.all.rows))
    assert saving.evidence == (
        f"halfstep_inspected::product ran in fp32 and took {share:.0%} of the step's time, backward pass included "
        "(its FLOPs are unknown): it is a custom op, which runs in the format of its inputs"
    )
    assert saving.cure == (OpChange("allow", f"{__name__}:product"),)
    assert saving.advice == f"allow {__name__}:product, or cast to bf16 inside it"
    again = inspected(lambda x, w: product(x, w), found.plan.edit(*saving.cure))
    assert again.full == []
    ran = [row.formats for row in again.all.rows if "product" in row.operator]
    assert sorted(ran) == ["bf16, bf16 -> bf16", "bf16, bf16, bf16 -> bf16, bf16"]
    both = inspected(lambda x, w: picky(product(x, w), w), level).full
    assert [each.seconds for each in both] == [1.5, 1.0]  # the backward pass of picky has two products


@pytest.mark.slow_but("0.5", "0.0_0")
@pytest.mark.parametrize(
    ("do", "level", "heavy"),
    [
        (lambda x, w: product(x, w), "O0", 0.0),
        (lambda x, w: product(x, w), "O1", 0.5),  # of the time
        (lambda x, w: product(x.bfloat16(), w.bfloat16()), "O1", 0.0),
        (lambda x, w: as_autocast(x, w), "O1", 0.0),
        (lambda x, w: x @ w, "O1", 0.0),
    ],
)
def test_nothing_is_said_of_one_that_is_light_or_runs_low_or_of_a_plan_that_leaves_all_as_written(
    do, level, heavy, inspected, half, monkeypatch
):
    monkeypatch.setattr(savings, "_HEAVY", heavy)
    assert not any("custom op" in saving.evidence for saving in inspected(do, level).full)


def test_one_that_low_inputs_do_not_make_faster_is_not_told(inspected, monkeypatch):
    monkeypatch.setattr(savings, "gain_of_casts", lambda call, low: -0.1)
    assert inspected(lambda x, w: product(x, w)).full == []


def test_one_that_refuses_the_low_format_promises_nothing_and_says_what_it_raises(inspected):
    found = inspected(lambda x, w: picky(x, w))
    (saving,) = found.full  # which its products of the backward pass are part of
    assert (saving.seconds, saving.cure) == (None, ())
    assert "the gain was not measured: with bf16 inputs it raises TypeError: Got unsupp" in saving.evidence
    assert saving.advice == "compute in bf16 inside it"
    assert f"ran full at {saving.place}: no gain measured" in [
        str(part) for part in inspection_report(found.all, what="Net").renderables
    ]
    assert f"ran full at {saving.place}: {saving.evidence}" in str(found.all).splitlines()


def test_one_that_python_does_not_define_is_never_called_with_low_inputs(inspected):
    seen = set()

    def double(x):
        seen.add(x.dtype)
        meter.clock_of(torch.device("cpu"))()
        return x * 2

    with torch.library._scoped_library("halfstep_foreign", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", double, "CompositeExplicitAutograd")
        (saving,) = inspected(lambda x, w: x @ torch.ops.halfstep_foreign.double(w.detach())).full
    assert seen == {torch.float32}
    assert (saving.seconds, saving.cure, saving.advice) == (None, (), "cast to bf16 inside it")
    assert saving.evidence.endswith("double is not defined in Python, and may read low inputs as fp32 memory")


def test_no_edit_is_named_that_would_not_reach_the_call(inspected, half):
    def grown(x, w):
        w = w.detach().clone()
        grow(w)  # an op change would have it change a copy
        return x @ w

    (saving,) = inspected(grown).full
    assert saving.cure == ()
    around = torch.ops.halfstep_inspected.product
    (saving,) = inspected(lambda x, w: around(x, w), ops={"allow": [f"{__name__}:product"]}).full
    assert saving.cure == ()
    assert f"the plan allows {__name__}:product, but this call used another name" in saving.evidence


def test_what_of_the_plan_has_it_full_is_named(inspected, half):
    name = f"{__name__}:product"
    (saving,) = inspected(lambda x, w: product(x, w), ops={"deny": [name]}).full
    assert "which the plan has on its deny list" in saving.evidence
    assert saving.cure == (OpChange("allow", name),)
    found = inspected(lambda x, w: product(x, w), rules=[Rule("", FULL)])
    (saving,) = [each for each in found.full if "custom op" in each.evidence]
    assert "and Rule('', FULL) keeps it in fp32" in saving.evidence
    assert OpChange("allow", name) in saving.cure
    assert not any(
        "custom op" in each.evidence
        for each in inspected(lambda x, w: product(x, w), found.plan.edit(*saving.cure)).full
    )


def test_a_gain_is_held_against_autocast_as_it_was_and_counts_the_casts_of_the_inputs(monkeypatch):
    """The calls of now have autocast on inside, where a product may run low already; those of then have it off."""
    now, seen = [0.0], Counter()
    monkeypatch.setattr("halfstep.timing.perf_counter", lambda: now[0])

    def call(tensor):
        seen[tensor.dtype, torch.is_autocast_enabled("cpu")] += 1
        now[0] += {torch.float32: 0.004, torch.bfloat16: 0.001}[tensor.dtype]

    def cast(value, dtype):
        now[0] += 0.001
        return value.to(dtype)

    monkeypatch.setattr("halfstep.train.cast.tree.cast_at_boundary", cast)
    given = (Shape.of(torch.ones(3)),)
    made = Call(call, None, (), (), 0, 0, 0.004, args=given, kwargs={}, autocast=torch.bfloat16)
    assert gain_of_casts(made, torch.bfloat16) == pytest.approx(0.002)
    assert set(seen) == {(torch.float32, True), (torch.bfloat16, False)}
