"""An overflow is followed in fp32 to the operation that absorbs it; what fp32 has too, or rounds the same, is none."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from halfstep.explain.tape.recorder import OpRecorder
from halfstep.formats import FP16
from halfstep.modes import uncompiled
from halfstep.torch_internals import tree_leaves
from halfstep.train.cast.products import Emulation

LOW = torch.float16


def found(function, *inputs, emulated=False):
    """Returns what the result of a call with fp16 inputs absorbed: who overflowed, who absorbed it, and the numbers."""
    recorder = OpRecorder([])
    with uncompiled(Emulation(FP16), recorder) if emulated else recorder:
        result = function(*(torch.tensor(values, dtype=LOW) for values in inputs))
    recorder.trail.end(tree_leaves(result))
    return [(each.origin.of.aten, each.by.aten, each) for each in recorder.trail.found]


@pytest.mark.parametrize("emulated", [False, True])
def test_the_numbers_are_those_of_fp32(emulated):
    (first,) = found(lambda x: torch.rsqrt((x * x).mean(-1, keepdim=True)), [[300.0, 400.0]], emulated=emulated)
    origin, by, absorbed = first
    assert (origin, by) == ("mul", "rsqrt")
    # 300 squared is 90,000 and 400 squared 160,000, both beyond 65,504; 1 / sqrt(125,000) = 0.0028284
    said = absorbed.said("mul", None, "rsqrt", None)
    assert (said.exact, said.format, said.got, said.off) == (160_000.0, "fp16", 0.0, 1.0)
    assert absorbed.want == pytest.approx(0.0028284, rel=1e-3)


def test_the_largest_number_of_the_format_and_the_next_that_rounds_to_infinity():
    assert not found(lambda x: 1 / (x + x), [32752.0 - 16])  # 65,472 fits
    assert not found(lambda x: 1 / (x * 1.0002), [65504.0])  # 65,517.1 rounds down to 65,504
    assert found(lambda x: 1 / (x * 1.0003), [65504.0])  # 65,523.7 rounds up to infinity, from 65,520 on


@pytest.mark.parametrize(("gain", "count"), [(1.04, 0), (1.06, 1)])
def test_within_five_percent_it_is_no_harm(gain, count):
    value = 65504.0 * gain  # nan_to_num makes 65,504 of its infinity: off by 1 - 1 / gain
    assert len(found(lambda x: torch.nan_to_num(x * (value / 4096.0)), [4096.0])) == count


def test_one_row_of_many_is_found():
    rows = [[1.0, 2.0]] * 63 + [[300.0, 400.0]]
    ((_, by, absorbed),) = found(lambda x: torch.rsqrt((x * x).mean(-1, keepdim=True)), rows)
    assert (by, absorbed.got) == ("rsqrt", 0.0)


def test_far_points_of_a_kernel_are_no_harm_beside_near_ones():
    # 1 / (1 + 300**2) is 1.1e-5: nothing beside the 0.5 and 1 of the same row
    assert not found(lambda x: 1 / (1 + x * x), [[0.0, 1.0, 300.0]])


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(x),
        lambda x: torch.mul(x, x, out=x),
        lambda x: x[:1].mul_(x[:1]),
        lambda x: x.copy_(x * x),
        lambda x: x.t().mul_(x.t()).t().reshape(-1),
    ],
    ids=["in place", "out=", "view", "copy", "reshape"],
)
def test_views_and_in_place_operations_carry_it(write):
    def function(x):
        write(x)
        return torch.rsqrt(x.view(-1)[:2].detach())

    ((origin, by, _),) = found(function, [[300.0, 400.0], [1.0, 1.0]])
    assert (origin.rstrip("_"), by) == ("mul", "rsqrt")


def test_what_is_written_over_is_gone():
    def function(x):
        y = x * x
        y.zero_()
        return 1 / (1 + y)

    def part(x):
        y = x * x
        y[0] = 1.0
        return 1 / y

    assert not found(function, [300.0])
    assert not found(part, [300.0, 2.0])


def test_an_argument_is_as_its_operation_leaves_it():
    x = torch.tensor([300.0, 2.0], dtype=LOW)
    count = torch.zeros(2, dtype=torch.int64)
    recorder = OpRecorder([])
    with recorder:
        x.mul_(x).add_(x)
        count.add_(1)
    assert x.tolist() == [torch.inf, 8.0]
    assert count.tolist() == [1, 1]


def test_memory_that_nobody_wrote_to_has_no_trail():
    def function(x):
        y = x.new_empty(4).fill_(torch.inf)
        del y
        return 1 / (1 + x.new_empty(4).abs())

    assert not found(function, [1.0])


@pytest.mark.parametrize("function", [torch.nn.functional.dropout, torch.bernoulli], ids=["dropout", "bernoulli"])
def test_random_numbers_are_drawn_once(function):
    x = torch.full((64,), 0.5, dtype=LOW)
    torch.manual_seed(0)
    plain = function(x), torch.rand(3)
    torch.manual_seed(0)
    with OpRecorder([]):
        recorded = function(x), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_a_cast_to_fp32_carries_it():
    assert [names[:2] for names in found(lambda x: 1 / (x * x).float().mean(), [300.0])] == [("mul", "reciprocal")]


def test_the_backward_pass_is_the_scales_business():
    def function(x):
        y = x.requires_grad_() * 2.0
        y.register_hook(lambda grad: 1 / (grad * 60000.0 * 2))
        y.sum().backward()

        factors = iter([1.0, 60000.0])  # overflows only where the checkpoint runs it again
        again = checkpoint(lambda y: 1 / (1 + y * next(factors)), x, use_reentrant=False)
        again.sum().backward()
        return y, again, x.grad

    assert not found(function, [300.0])


def test_each_origin_is_told_once():
    def function(x):
        square = x * x
        return 1 / square, torch.rsqrt(square)

    assert [names[:2] for names in found(function, [300.0])] == [("mul", "reciprocal")]


def scale_of(x):
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1)


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * scale_of(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def in_place(x):
    held = torch.zeros_like(x)
    held[:1].copy_(scale_of(x.detach()))
    return x * held


def kept(x):
    x.kept = torch.zeros_like(x)
    x.kept.copy_(scale_of(x.detach()))
    return x.kept


READ = {  # whose result is computed from what absorbed the overflow, by whatever way
    "with gradients": lambda x: x * scale_of(x),
    "detached before": lambda x: x * scale_of(x.detach()),
    "detached after": lambda x: x * scale_of(x).detach(),
    "without gradients": lambda x: x * torch.no_grad()(scale_of)(x),
    "custom function": Scales.apply,
    "comparison": lambda x: torch.where(scale_of(x) > 1e-4, x, -x),
    "argmax": lambda x: x.gather(-1, torch.cat([scale_of(x), scale_of(x) * 2]).argmax(-1, keepdim=True)),
    "round": lambda x: x * torch.round(scale_of(x) * 1e4),
    "in place": in_place,
    "written over in part": lambda x: (held := kept(x), held[1:].zero_(), x + held)[-1],
    "out= of itself": lambda x: (held := kept(x), torch.mul(held, 2, out=held), x + held)[-1],
    "a diagnostic before": lambda x: (scale_of(x), (square := x * x), 1 / square, x * torch.rsqrt(square))[-1],
}


@pytest.mark.parametrize("name", READ)
def test_what_the_result_was_computed_from_counts(name):
    assert found(lambda x: READ[name](x.requires_grad_()), [300.0, 400.0])[0][:2] == ("mul", "rsqrt")


def counted(x):
    x.count = torch.zeros(2)
    x.count.add_(scale_of(x.detach()))
    return x * 2


def zeroed(x):
    return x + kept(x).zero_()


def copied(x):
    return x + kept(x).copy_(x.detach())


def into(x):
    return x + torch.mul(x.detach(), 2, out=kept(x))


UNREAD = {  # diagnostics that nobody reads
    "with gradients": lambda x: (x * 2, scale_of(x))[0],
    "detached": lambda x: (x * 2, scale_of(x.detach()))[0],
    "without gradients": lambda x: (x * 2, torch.no_grad()(scale_of)(x))[0],
    "read by another": lambda x: (x * 2, scale_of(x.detach()).log())[0],
    "sparse": lambda x: (x * 2, scale_of(x).expand(2, 2).to_sparse())[0],
    "counted": counted,
    "zeroed": zeroed,
    "written over": copied,
    "out=": into,
    "logged": lambda x: (x * 2, scale_of(x).tolist())[0],
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_the_result_was_not_computed_from_does_no_harm(name):
    assert not found(lambda x: UNREAD[name](x.requires_grad_()), [300.0, 400.0])


def test_an_overflow_that_ends_in_nan_or_infinity_is_seen_elsewhere():
    assert not found(lambda x: torch.softmax(x * x, -1), [300.0, 1.0])
    assert not found(lambda x: (x * x).sum(), [300.0, 1.0])
