"""The native loop and the torch operations count what NumPy counts, to the last element."""

import re
from pathlib import Path

import numpy
import pytest
import torch

from halfstep.records import BINS, COUNTS, DOUBLES
from halfstep.train.kernels import library, stats
from halfstep.train.kernels.native import WIDTH
from halfstep.train.kernels.stats import RUN, add_stats, empty_rows, is_sampled
from tests.scale.sync import no_cuda_sync

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WAYS = [
    pytest.param("native", marks=pytest.mark.skipif(library.find() is None, reason="needs the compiled loops")),
    "eager",
]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setattr(stats, "loops", lambda: None)
    return request.param


def row_of(t, **options):
    rows = empty_rows(1, t.device)
    add_stats([t], rows, [0], **options)
    return rows[0]


def doubles(row):
    return row[-3:].view(torch.float64).tolist()


def counted(values):
    """The 261 counts of float64 values by NumPy, and sum, sum of squares and amax of the finite ones."""
    finite = values[numpy.isfinite(values)]
    exponents = numpy.frexp(finite[finite != 0])[1] - 1
    histogram = numpy.bincount(numpy.clip(exponents + 127, 0, 255), minlength=256)
    counts = [
        values.size,
        (values == 0).sum(),
        (values < 0).sum(),
        numpy.isinf(values).sum(),
        numpy.isnan(values).sum(),
    ]
    sums = [finite.sum(), (finite * finite).sum(), numpy.abs(finite).max(initial=0.0)]
    return [*histogram.tolist(), *map(int, counts)], sums


def check(row, t):
    counts, sums = counted(t.double().numpy())
    assert row[: BINS + len(COUNTS)].tolist() == counts
    scale = sums[1] ** 0.5 * t.numel() ** 0.5  # cancellation in the sum
    assert doubles(row) == [pytest.approx(sums[0], abs=1e-12 * scale), pytest.approx(sums[1], rel=1e-12), sums[2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_is_counted_as_numpy_counts_it(way, dtype):
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    check(row_of(patterns), patterns)
    for pattern in patterns.split(1)[
        :: 2**8 - 1
    ]:  # and alone, where a count in the wrong entry has no one to hide behind
        check(row_of(pattern), pattern)


def test_every_exponent_of_fp32_is_counted_as_numpy_counts_it(way):
    high = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    patterns = (high + torch.tensor([0, 1, 0x7FFF, 0xFFFF])).to(torch.int32).view(torch.float32).flatten()
    check(row_of(patterns), patterns)


def test_fp64_beyond_the_exponents_of_fp32_counts_in_the_first_and_the_last_entry(way):
    values = torch.tensor(
        [2.0**-1074, 2.0**-127, 2.0**-126, -(2.0**127), 2.0**128, 1e150, torch.inf, torch.nan, -0.0],
        dtype=torch.float64,
    )
    row = row_of(values)
    assert {e: n for e, n in enumerate(row[:BINS].tolist()) if n} == {0: 2, 1: 1, 254: 1, 255: 2}
    check(row, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 3, 15, 17, 511, 513, 2**15 - 1, 2**15 + 1, 100_003])
def test_sizes_around_every_boundary_of_the_loop(way, dtype, size):
    t = (torch.randn(size, dtype=torch.float64) * torch.logspace(-9, 4, max(size, 1), dtype=torch.float64)[:size]).to(
        dtype
    )
    t[::7] = 0
    t[5::11] = torch.inf
    t[6::13] = -torch.inf
    t[8::17] = torch.nan
    check(row_of(t), t)


def test_results_do_not_depend_on_the_number_of_threads():
    t = torch.randn(300_000)
    before, rows = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(row_of(t))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_adding_parts_to_one_row_equals_counting_the_whole(way):
    whole = torch.randint(-(2**12), 2**12, (100_000,)).float() / 64  # sums of these are exact in any order
    rows = empty_rows(2, whole.device)
    parts = [whole[:1], whole[1:40_000], whole[40_000:]]
    add_stats([whole, *parts[:2]], rows, [0, 1, 1])
    add_stats(parts[2:], rows, [1])
    assert rows.shape == (2, WIDTH)
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(6, 5, 4, 3).to(memory_format=torch.channels_last),
        torch.randn(50, 40).t(),
        torch.randn(50, 40)[:, 3:17:2],
        torch.randn(5, 1).expand(5, 100),
        torch.tensor(3.5),
        torch.randn(4, 4, requires_grad=True),
        torch.randn(30).to(torch.float8_e4m3fn),
        torch.tensor([2**25 - 1, -(2**40) + 1, 0]),
        torch.tensor([True, False, True]),
    ],
    ids=["channels_last", "transposed", "strided", "expanded", "scalar", "leaf", "fp8", "integers", "truths"],
)
def test_any_layout_is_read_as_its_elements(way, t):
    check(row_of(t), t.detach().double().contiguous().flatten())


def test_complex_and_conjugate_and_sparse_are_read_as_their_numbers(way):
    z = torch.complex(torch.randn(20), torch.randn(20))
    check(row_of(z.conj()), torch.view_as_real(z.conj().resolve_conj()).flatten())
    check(row_of(z.conj().imag), -z.imag)
    values = torch.tensor([[1.0, -2.0], [0.0, 4.0]])
    check(row_of(torch.sparse_coo_tensor([[0, 5]], values, (8, 2))), values.flatten())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_reads_the_same_runs_natively_and_eagerly(monkeypatch, dtype):
    t = torch.randn(100_000).to(dtype)
    compiled = row_of(t, sample=4096 + 5)
    monkeypatch.setattr(stats, "loops", lambda: None)
    eager = row_of(t, sample=4096 + 5)
    assert compiled[BINS] == 4096
    assert torch.equal(compiled[: BINS + len(COUNTS)], eager[: BINS + len(COUNTS)])


def test_a_sample_lies_inside_and_is_spread_over_rows_and_columns(way):
    places = torch.arange(2**17, dtype=torch.float64)
    index = stats.sampled_places(places.numel(), 2**12, places.device)
    assert len(set(index.tolist())) == 2**12
    assert torch.equal(index // 2048 * 2048, torch.arange(2**12) // RUN * 2048)  # one run in each of 64 equal stretches
    columns = index % 256  # a matrix of rows of 256 would show some columns only, were the runs evenly spaced
    assert torch.bincount(columns, minlength=256).min() > 4
    assert doubles(row_of(places, sample=2**12))[0] == index.sum()


@pytest.mark.parametrize(("size", "read"), [(63, 63), (64, 64), (65, 64), (128, 64)])
def test_a_sample_is_at_least_one_run_and_never_more_than_there_is(way, size, read):
    t = torch.ones(size)
    assert row_of(t, sample=1)[BINS] == read
    assert is_sampled(t, 1) == (read < size)
    assert not is_sampled(t, None)


def test_flushing_of_subnormals_changes_no_count(way):
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    counts, _ = counted(patterns.double().numpy())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        row = row_of(patterns)
    finally:
        torch.set_flush_denormal(False)
    assert row[: BINS + len(COUNTS)].tolist() == counts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_counts_as_the_cpu_does_and_does_not_wait(dtype):
    t = torch.randn(200_003, dtype=torch.float64).mul_(torch.logspace(-6, 3, 200_003, dtype=torch.float64)).to(dtype)
    t[::5] = 0
    t[3::7] = torch.inf
    t[4::9] = torch.nan
    on_device, rows = t.cuda(), empty_rows(1, torch.device("cuda"))
    with no_cuda_sync():
        add_stats([on_device], rows, [0])
    check(rows[0].cpu(), t)


def test_the_columns_of_the_cpp_loops_are_the_fields_of_the_record():
    listed = re.search(r"kLastBin = 255, (.*) };", Path(library.__file__).with_name("stats.cpp").read_text())[1]
    assert [name[1:].lower() for name in listed.split(", ")] == [*COUNTS, *DOUBLES]
