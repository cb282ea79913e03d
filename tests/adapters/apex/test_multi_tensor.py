"""`amp_C` in torch: each operation against torch's own or a slow loop, its flag, and what does not fit together."""

import itertools

import pytest
import torch

from halfstep.adapters.apex import multi_tensor as amp_c
from halfstep.errors import SetupError

LOW = [torch.float16, torch.bfloat16]
DTYPES = [*LOW, torch.float32]
INF, NAN = float("inf"), float("nan")


def flag():
    return torch.zeros(1, dtype=torch.int32)


def lists(count, dtype=torch.float32, scale=1.0):
    """Lists of tensors of two shapes, each with numbers of its own."""
    g = torch.Generator().manual_seed(3)
    return [[(torch.randn(shape, generator=g) * scale).to(dtype) for shape in ((3, 5), (7,))] for _ in range(count)]


def apply(op, noop, tensor_lists, *args):
    return amp_c.multi_tensor_applier(op, noop, tensor_lists, *args)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_is_computed_in_fp32_and_rounded_once(dtype, out_dtype):
    (given,), (outs,), noop = lists(1, dtype), lists(1, out_dtype), flag()
    apply(amp_c.multi_tensor_scale, noop, [given, outs], 1 / 3)
    for value, out in zip(given, outs, strict=True):
        assert torch.equal(out, (value.float() * (1 / 3)).to(out_dtype))
    assert noop.item() == 0


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 1])
def test_the_flag_of_scale_tells_of_inputs_and_stays(place, bad):
    (given, outs), noop = lists(2), flag()
    given[place].view(-1)[-1] = bad
    apply(amp_c.multi_tensor_scale, noop, [given, outs], 0.5)
    assert noop.item() == 1
    given[place].view(-1)[-1] = 1.0
    apply(amp_c.multi_tensor_scale, noop, [given, outs], 0.5)
    assert noop.item() == 1


def test_a_finite_input_that_overflows_its_output_is_not_flagged():
    noop, out = flag(), torch.zeros(1, dtype=torch.float16)
    apply(amp_c.multi_tensor_scale, noop, [[torch.tensor([60000.0])], [out]], 2.0)
    assert (out.item(), noop.item()) == (INF, 0)


@pytest.mark.parametrize(("dtype_x", "dtype_y", "out_dtype"), list(itertools.product(DTYPES, repeat=3)))
def test_axpby(dtype_x, dtype_y, out_dtype):
    (x, y), noop = (lists(2, dtype_x)[0], lists(2, dtype_y)[1]), flag()
    (outs,) = lists(1, out_dtype)
    apply(amp_c.multi_tensor_axpby, noop, [x, y, outs], 2.0, -3.0, -1)
    for one, other, out in zip(x, y, outs, strict=True):
        assert torch.equal(out, (one.float() * 2.0 + other.float() * -3.0).to(out_dtype))
    assert noop.item() == 0


@pytest.mark.parametrize(("bad", "check", "expected"), [(b, c, int(c in (-1, b))) for b in (0, 1) for c in (-1, 0, 1)])
def test_axpby_checks_what_it_is_told_to(bad, check, expected):
    (x, y, outs), noop = lists(3), flag()
    (x, y)[bad][1][0] = NAN
    apply(amp_c.multi_tensor_axpby, noop, [x, y, outs], 1.0, 1.0, check)
    assert noop.item() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm_of_all_and_of_each(dtype):
    (given,), noop = lists(1, dtype), flag()
    total, each = apply(amp_c.multi_tensor_l2norm, noop, [given], True)
    expected = [float(sum(float(v) ** 2 for v in t.view(-1))) ** 0.5 for t in given]
    torch.testing.assert_close(each, torch.tensor(expected))
    torch.testing.assert_close(total, torch.tensor([sum(e**2 for e in expected) ** 0.5]))
    assert (total.dtype, each.dtype) == (torch.float32, torch.float32)
    assert apply(amp_c.multi_tensor_l2norm, noop, [given])[1].numel() == 0
    assert noop.item() == 0


def test_l2norm_takes_squares_that_fp32_does_not_and_flags_what_is_not_finite():
    noop = flag()
    total, _ = apply(amp_c.multi_tensor_l2norm, noop, [[torch.tensor([3e30, 4e30])]])
    torch.testing.assert_close(total, torch.tensor([5e30]))
    assert noop.item() == 0
    apply(amp_c.multi_tensor_l2norm, noop, [[torch.tensor([3.0, NAN])]])
    assert noop.item() == 1
    assert apply(amp_c.multi_tensor_l2norm, flag(), [[]])[0].item() == 0.0


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum, after, nesterov):
    (grads, weights, held), wd, lr, scale = lists(3), 0.1, 0.5, 0.25
    dampening = 0.0 if nesterov else 0.3
    low = [w.half() for w in weights]
    expected = [w.double() for w in weights]
    buffers = [None, None]
    for step in range(3):
        args = (wd, momentum, dampening, lr, nesterov, step == 0, after, scale)
        apply(amp_c.multi_tensor_sgd, flag(), [grads, weights, held, low], *args)
        for i, g in enumerate(grads):
            g, w = g.double() * scale, expected[i]
            g = g if after else g + wd * w
            if momentum:
                buffers[i] = g if buffers[i] is None else momentum * buffers[i] + (1 - dampening) * g
                g = g + momentum * buffers[i] if nesterov else buffers[i]
            expected[i] = w - lr * (g + wd * w if after else g)
    for weight, copy, value in zip(weights, low, expected, strict=True):
        torch.testing.assert_close(weight.double(), value, rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, weight.half())


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("correction", [0, 1])
def test_adam(correction, mode):
    (grads, weights), means, squares = lists(2), *([torch.zeros(3, 5), torch.zeros(7)] for _ in range(2))
    lr, betas, eps, wd = 0.1, (0.8, 0.9), 1e-3, 0.2
    expected = [[w.double(), torch.zeros_like(w).double(), torch.zeros_like(w).double()] for w in weights]
    for t in range(1, 4):
        rows = [grads, weights, means, squares]
        apply(amp_c.multi_tensor_adam, flag(), rows, lr, *betas, eps, t, mode, correction, wd)
        for row, g in zip(expected, grads, strict=True):
            w, m, v = row
            g = g.double() + (wd * w if mode == 0 else 0)
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
            c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if correction else (1, 1)
            u = (m / c1) / ((v / c2) ** 0.5 + eps) + (wd * w if mode == 1 else 0)
            row[:] = [w - lr * u, m, v]
    for i, row in enumerate(expected):
        for got, value in zip((weights[i], means[i], squares[i]), row, strict=True):
            torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_set_flag_leaves_every_bit_of_an_update(dtype):
    rows = lists(4, dtype)
    before = [[t.clone() for t in each] for each in rows]
    noop = torch.ones(1, dtype=torch.int32)
    rows[0][0].fill_(NAN)
    before[0][0].fill_(NAN)
    apply(amp_c.multi_tensor_sgd, noop, rows, 0.1, 0.9, 0.0, 0.1, False, False, False, 1.0)
    apply(amp_c.multi_tensor_adam, noop, rows, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.1)
    for each, old in zip(rows, before, strict=True):
        for t, value in zip(each, old, strict=True):
            assert torch.equal(t.nan_to_num(7.0), value.nan_to_num(7.0))


def slow_scale(state, found, growth, backoff, interval, hysteresis):
    """The rule in Python numbers: (scale, clean steps, overflows left)."""
    scale, clean, left = state
    if found:
        left -= 1
        return (scale * backoff if left <= 0 else scale), 0, left
    clean += 1
    if clean == interval:
        return (scale * growth if scale * growth < 2.0**128 else scale), 0, hysteresis
    return scale, clean, hysteresis


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_scale_goes_by_the_rule_for_every_run_of_six_steps(hysteresis):
    for found in itertools.product([False, True], repeat=6):
        state = (1024.0, 0, hysteresis)
        scale, clean, left = torch.tensor([1024.0]), torch.tensor([0], dtype=torch.int32), torch.tensor([hysteresis])
        for each in found:
            state = slow_scale(state, each, 2.0, 0.5, 2, hysteresis)
            given = torch.tensor([float(each)])
            returned = amp_c.update_scale_hysteresis(scale, clean, left, given, 2.0, 0.5, 2, hysteresis)
            assert returned is scale
            assert (scale.item(), clean.item(), left.item()) == state


def test_the_scale_does_not_grow_to_infinity():
    scale, clean, left = torch.tensor([2.0**127]), torch.tensor([0]), torch.tensor([1])
    amp_c.update_scale_hysteresis(scale, clean, left, torch.zeros(1), 2.0, 0.5, 1, 1)
    assert (scale.item(), clean.item()) == (2.0**127, 0)


def test_the_applier_hands_its_chunk_size_on():
    applier = amp_c.MultiTensorApply(64)
    assert applier(lambda *args: args, "flag", "lists", 1, 2) == (64, "flag", "lists", 1, 2)
    assert applier.available


@pytest.mark.parametrize(
    ("op", "given", "args", "said"),
    [
        (amp_c.multi_tensor_scale, lambda: lists(1), (1.0,), r"got lists of the lengths \[2\]; pass 2 lists of equal"),
        (amp_c.multi_tensor_scale, lambda: [lists(1)[0], lists(1)[0][:1]], (1.0,), r"the lengths \[2, 1\]; pass 2"),
        (amp_c.multi_tensor_scale, lambda: [lists(1)[0], lists(1)[0][::-1]], (1.0,), r"index 0 of the lists have"),
        (amp_c.multi_tensor_axpby, lambda: lists(3), (1.0, 1.0, 2), "arg_to_check=2; pass 0 for x, 1 for y, -1"),
        (amp_c.multi_tensor_adam, lambda: lists(4), (0.1, 0.9, 0.9, 0.0, 1, 2, 1, 0.0), "mode=2; pass 0 for L2"),
        (amp_c.multi_tensor_sgd, lambda: lists(2), (0, 0, 0, 0, 0, 0, 0, 1.0), "pass 3 lists of equal length: grad"),
    ],
)
def test_bad_input_gets_words(op, given, args, said):
    with pytest.raises(SetupError, match=said):
        apply(op, flag(), given(), *args)
