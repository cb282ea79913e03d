"""Updates in units of last places: the unit of every value, and the compiled loop against the reference."""

import math

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from halfstep.records import BINS, COUNTS, DOUBLES
from halfstep.train.kernels import library
from halfstep.train.kernels.stats import add_stats, empty_rows, in_last_places, takes_updates
from halfstep.train.optim.steppers import watching
from tests.kernels.test_native import every_layout, grads_of, rows_kept, run_of
from tests.optim.cases import FALSE, TRUE, assert_same_bits, matrices, own_run

needs_compiler = pytest.mark.skipif(library.find() is None, reason="needs the compiled loops")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_unit_of_every_value_is_the_distance_to_the_next(dtype):
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = patterns[patterns.isfinite()]
    values = patterns.double()
    distances = values[1:] - values[:-1]
    one = torch.ones_like(distances)
    for sign in (1, -1):
        assert torch.equal(in_last_places(one, sign * patterns[:-1]), 1 / distances)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unit_of_wide_formats_is_the_distance_to_the_next(dtype):
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, 1.0, 2.0, 1e-30, 3e38])]).to(dtype)
    after = torch.nextafter(values.abs(), torch.tensor(torch.inf, dtype=dtype)).double() - values.abs().double()
    keep = values != 0 if dtype is torch.float64 else values.abs() >= 0
    places = in_last_places(torch.ones_like(after), values)
    assert torch.equal(places[keep], (1 / after)[keep])


def watched(run, grads, factor=None, skipped=FALSE):
    found = []
    with watching(run.stepper, run.store, factor, skipped, run.params, grads, found.append):
        return found


def native_rows(coming, sample=None):
    rows = empty_rows(len(coming.params), torch.device("cpu"))
    assert takes_updates(coming.batch, coming.row.options(coming.group), rows)
    coming.add_to(rows, range(len(coming.params)), sample=sample)
    return rows


def reference_rows(coming, sample=None):
    rows = empty_rows(len(coming.params), torch.device("cpu"))
    for index in range(len(coming.params)):
        for stored, update in coming.parts(index, sample):
            add_stats([in_last_places(update, stored)], rows, [index], sample=sample)
    return rows


def assert_same_rows(rows, expected):
    counts = BINS + len(COUNTS)
    assert torch.equal(rows[:, :counts], expected[:, :counts])
    sums, expected_sums = (r[:, -len(DOUBLES) :].contiguous().view(torch.float64) for r in (rows, expected))
    assert torch.equal(sums[:, 2], expected_sums[:, 2])
    torch.testing.assert_close(sums[:, 1], expected_sums[:, 1], rtol=1e-12, atol=0)
    scale = (expected_sums[:, 1] * expected[:, BINS]).sqrt()  # cancellation in the sum
    assert ((sums[:, 0] - expected_sums[:, 0]).abs() <= 1e-12 * scale).all()


@needs_compiler
@every_layout()
def test_the_loop_counts_what_the_reference_counts(cls, options, kind, low):
    assert_counted(run_of(cls, options, kind, low, "native"), kind, low)


@needs_compiler
@rows_kept("full", "bf16", "8bit")
def test_the_loop_counts_what_the_reference_counts_with_moments_in_codes(cls, options, kind, low, kept):
    assert_counted(own_run(cls, options, kind, low, "native", params=matrices(), kept=kept), kind, low)


def assert_counted(run, kind, low):
    for seed in range(4):  # the first one too, when there is no state, and after a skipped one
        grads = grads_of(run, seed, torch.float32 if kind is None or seed == 3 else low)
        factor = None if seed == 2 else torch.tensor(2.0**-10 * 0.7)
        before = run.everything()
        comings = watched(run, grads, factor)
        before = before if seed and run.moments is None else run.everything()  # states of zeros are there then
        assert sum(len(coming.params) for coming in comings) == len(run.params)
        for coming in comings:
            for sample in (None, 1000):
                assert_same_rows(native_rows(coming, sample), reference_rows(coming, sample))
        assert_same_bits(run.everything(), before)
        run.step(grads, factor, torch.tensor(seed == 0))


@needs_compiler
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_every_16_bit_weight_has_its_unit_in_the_loop(low):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(low)
    run = own_run(SGD, {"lr": 1.0}, "none", low)
    run.params = run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(t) for t in patterns.split(256)]
    for p in run.params:
        run.store.track(p)
    for gradient in (1.0, -(2.0**-30), math.inf, math.nan):
        (coming,) = watched(run, [torch.full_like(p, gradient, dtype=torch.float32) for p in run.params])
        assert_same_rows(native_rows(coming), reference_rows(coming))


@needs_compiler
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("cls", "options"), [(AdamW, {"lr": 1e-2, "weight_decay": 0.1}), (Adam, {"lr": 1e-2, "weight_decay": 0.1})]
)
def test_every_16_bit_gradient_and_weight_decays_alike_in_the_loop(cls, options, low):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(low)
    run = own_run(cls, options, "none", low)
    run.params = run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(t) for t in patterns.split(256)]
    for p in run.params:
        run.store.track(p)
    (coming,) = watched(run, list(patterns.flip(0).split(256)), torch.tensor(0.3))
    assert_same_rows(native_rows(coming), reference_rows(coming))


@needs_compiler
def test_a_skipped_step_adds_zeros_and_a_parameter_without_a_place_nothing():
    run = run_of(AdamW, {"lr": 1e-2}, "split", torch.bfloat16, "native")
    (coming,) = watched(run, [torch.full_like(p, math.nan) for p in run.params], skipped=TRUE)
    assert_same_rows(native_rows(coming), reference_rows(coming))
    assert native_rows(coming)[:, BINS : BINS + 2].tolist() == [[p.numel(), p.numel()] for p in run.params]
    for skipped in (FALSE, TRUE):
        (coming,) = watched(run, grads_of(run, 0, torch.bfloat16), skipped=skipped)
        rows, whole = empty_rows(1, torch.device("cpu")), native_rows(coming)
        coming.add_to(rows, [0 if index == 3 else None for index in range(len(run.params))], sample=None)
        assert torch.equal(rows[0], whole[3])


@needs_compiler
def test_threads_do_not_change_a_row(two_threads):
    run = run_of(AdamW, {"lr": 1e-2}, "split", torch.bfloat16, "native")
    (coming,) = watched(run, grads_of(run, 0, torch.bfloat16))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(native_rows(coming))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_loop_does_not_take_goes_to_the_reference(dtype):
    run = own_run(AdamW, {"lr": 1e-2}, dtype=dtype)
    coming = watched(run, [torch.ones_like(p) for p in run.params])[-1]
    if dtype is torch.float32:
        assert coming.params == run.params[-1:]  # no dense block of memory
    rows = empty_rows(len(coming.params), torch.device("cpu"))
    assert not takes_updates(coming.batch, coming.row.options(coming.group), rows)
    coming.add_to(rows, range(len(coming.params)), sample=None)
    assert rows[:, BINS].tolist() == [p.numel() for p in coming.params]
