"""The compiled loops against the eager reference: the same bits over optimizers, masters, formats, shapes and skips."""

import ctypes
import functools
import itertools
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch.optim import SGD, Adam, AdamW

from halfstep.train.kernels import library, native
from halfstep.train.kernels.batch import Batch, Place
from halfstep.train.optim import implementations
from halfstep.train.optim.optimizers import Lion
from halfstep.train.scale.norm import read_with_torch
from hatch_build import FLAGS
from tests.optim.cases import ADAMS, FALSE, OWN, TRUE, assert_same_bits, has_kernel, matrices, options_of, own_run

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled loops")

MASTERS = [
    (None, torch.float32),
    ("copy", torch.bfloat16),
    ("copy", torch.float16),
    ("split", torch.bfloat16),
    ("none", torch.bfloat16),
    ("none", torch.float16),
]


@pytest.fixture(scope="session")
def least(pool_folder):
    """The loops built once for the least of this kind of processors: without AVX2 and instructions for fp16."""
    made = pool_folder.with_name("loops.so")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with FileLock(f"{made}.lock"):
        if not made.exists():
            sources = map(str, library.find().parent.glob("*.cpp"))
            subprocess.run(["g++", *FLAGS, "-O1", "-fopenmp", *sources, "-o", str(made)], check=True)
    return made


@pytest.fixture(scope="class", params=["this processor", "AVX2", "any processor"])
def processor(request):
    """Runs the loops of processors of this class, of those with AVX2, and of the least."""
    found = library.find()
    if request.param == "any processor":
        found = request.getfixturevalue("least")
    elif request.param == "AVX2":
        others = [path for path in library.find().parent.glob("loops-x86-64-v3-*.so") if path != found]
        if not others:
            pytest.skip("this processor's loops are those")
        found = others[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "loops", functools.cache(native.loops.__wrapped__))
        patch.setattr(native, "load", lambda: ctypes.CDLL(str(found)))
        yield


def every_layout():
    """Marks a test over optimizers and layouts; the fast rows have each option once, and of each class one in all."""
    compiled = [own for own in OWN if has_kernel("native", *own)]
    firsts = {cls: options for cls, options in reversed(compiled)}
    rows = [
        pytest.param(*own, *layout, marks=[pytest.mark.slow] * (i % len(MASTERS) != j and own[1] is not firsts[own[0]]))
        for i, own in enumerate(compiled)
        for j, layout in enumerate(MASTERS)
    ]
    return pytest.mark.parametrize(("cls", "options", "kind", "low"), rows)


# One below, at and above a vector, a block (128), and a part (16,384); and the shapes with other strides.
NUMELS = (1, 15, 16, 17, 127, 128, 129, 16383, 16384, 16385, 32769)


def shapes():
    g = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, generator=g) for n in NUMELS]
    tensors.append(torch.randn(4, 3, 5, 5, generator=g).to(memory_format=torch.channels_last))
    tensors += [torch.randn(6, 9, generator=g).t(), torch.randn((), generator=g)]
    return tensors


def run_of(cls, options, kind, low, implementation):
    run = own_run(cls, options, kind, low, implementation)
    run.params = [torch.nn.Parameter(value.clone(memory_format=torch.preserve_format)) for value in shapes()]
    run.optimizer.param_groups[0]["params"] = run.params
    for p in run.params if kind else ():
        run.store.track(p)
    return run


KEPT = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, {"lr": 1e-2, "betas": (0.99, 0.999), "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Lion, {"lr": 1e-2, "weight_decay": 0.3}),
]


def rows_kept(*widths):
    """Marks a test over ways to keep moments, optimizers and layouts."""
    masters = [master for master in MASTERS if master != ("none", torch.float16)]
    marks = [("kept", widths), (("cls", "options"), KEPT), (("kind", "low"), masters)]
    return lambda test: functools.reduce(lambda made, mark: pytest.mark.parametrize(*mark)(made), marks, test)


def grads_of(run, seed, dtype, scale=1024.0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(p.shape, generator=g) * scale * 0.01).to(dtype) for p in run.params]


@every_layout()
@pytest.mark.parametrize("steps", [11, pytest.param(50, marks=pytest.mark.slow)])
def test_steps_have_the_bits_of_the_reference(cls, options, kind, low, steps):
    runs = [run_of(cls, options, kind, low, name) for name in ("native", "eager")]
    formats = [low] if kind is None else [low, torch.float32]
    for seed in range(steps):
        grads = grads_of(runs[0], seed, formats[seed % len(formats)])
        found = torch.tensor(seed % 7 == 3)
        if found:
            grads[3].view(-1)[0] = math.inf
        factor = None if seed % 5 == 4 else torch.tensor(2.0**-10 * 0.7)
        for run in runs:
            if isinstance(options["lr"], float):
                run.optimizer.param_groups[0]["lr"] = options["lr"] * (1 - seed / 100)
            run.step(grads, factor, found)
    assert_same_bits(runs[0].everything(), runs[1].everything())


@rows_kept("full", "bf16", "8bit")
def test_what_is_kept_in_codes_or_rounded_at_random_has_the_bits_of_the_reference(
    cls, options, kind, low, kept, monkeypatch, two_threads
):
    """Also in parts that end within slices and between them."""
    runs = [own_run(cls, options, kind, low, n, params=matrices(), kept=kept) for n in ("native", "eager", "eager")]
    for seed in range(4):
        grads = [g * torch.exp(4 * torch.randn(g.shape)) for g in grads_of(runs[0], seed, low)]  # of any magnitude
        found, factor = torch.tensor(seed == 2), torch.tensor(2.0**-10 * 0.7)
        if found:
            grads[3].view(-1)[0] = math.inf
        for run, threads, chunk in zip(runs, (2, 1, 1), (2**19, 2**19, 1024), strict=True):
            torch.set_num_threads(threads)
            monkeypatch.setitem(implementations._CHUNK, "cpu", chunk)
            run.step([g.to(low) for g in grads], factor, found)
    for run in runs[1:]:
        assert_same_bits(run.everything(), runs[0].everything())


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("kind", "low"), [(None, torch.float32), ("split", torch.bfloat16)])
def test_codes_of_a_shard_of_columns_have_the_bits_of_the_reference(kind, low):
    """The index of an element in the whole tensor, of which its random bits are a hash, jumps from row to row."""
    runs = []
    for implementation in ("native", "eager"):
        weight = torch.nn.Parameter(torch.ones(300, 128))
        runs.append(
            own_run(Lion, {"lr": 1e-2, "betas": (0.9, 0.999)}, kind, low, implementation, params=[weight], kept="8bit")
        )
        runs[-1].moments.place = lambda p: Place(1, 2**32 - 12800, 128, 320)
        for seed in range(3):
            runs[-1].step(grads_of(runs[-1], seed, low))
    assert_same_bits(runs[0].everything(), runs[1].everything())


@pytest.mark.usefixtures("processor")
def test_groups_that_stay_in_registers_have_the_bits_of_the_reference():
    """Beside zeros, values that no code tells from 0, NaN, spreads around what 4 bits of fractions leave room for."""
    g = torch.Generator().manual_seed(1)
    spread = torch.exp(12 * torch.randn(40, 128, generator=g)) * torch.randn(40, 128, generator=g).sign() * 1e-12
    spread[2, 1::2], spread[3, 5], spread[4] = 1, math.nan, torch.randn(128, generator=g)
    spread[1, ::2], spread[2, ::2] = 0, 1e-42
    patterns = spread.view(torch.int32)
    patterns[4, 5] = 0x7FFFFFFF  # a NaN that a sum would carry away
    patterns[0] = torch.arange(128) * 400 + (torch.arange(128) % 2 << 31)  # of either sign, of which noise makes codes
    for row, word in enumerate(range(-16, 17), start=5):
        patterns[row], patterns[row, 9] = 0x3F800000, 0x3F800000 - (126 << 19) + (word << 16)
    layouts = [(None, torch.float32), ("split", torch.bfloat16)]
    optimizers = [
        (AdamW, {"lr": 1e-2, "betas": (0.0, 0.999), "weight_decay": 0.0}),  # whose first moment is the gradient
        (SGD, {"lr": 1e-2, "momentum": 0.9}),
    ]
    for (cls, options), (kind, low), kept in itertools.product(optimizers, layouts, ("full", "bf16", "8bit")):
        runs = []
        for name in ("native", "eager"):
            params = [
                torch.nn.Parameter(torch.randn(shape, generator=g.manual_seed(2))) for shape in ((40, 128), (127,))
            ]
            runs.append(own_run(cls, options, kind, low, name, params=params, kept=kept))
            if kind:
                params[0].data[:, 7] = params[0].data[1] = 0  # written over weights, of which some stay so
            for seed in range(3):
                runs[-1].step([spread.to(low), grads_of(runs[-1], seed, low)[1]])
        assert_same_bits(runs[0].everything(), runs[1].everything())


# Roots in units of their last place; of the first four each is the only one that the product would round wrongly then.
# The last step divides by 0.5, whose inverse has no second part.
ROOTS = [(0.999, 24, 9075466), (0.999, 51, 15150409), (0.95, 1, 10528750), (0.95, 33, 12512468), (0.75, 1, 12345678)]


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kept", ["full", "8bit"])
@pytest.mark.parametrize(("beta2", "step", "root"), ROOTS)
def test_a_root_is_divided_by_its_correction_to_the_bit(beta2, step, root, kept):
    squares = torch.tensor(root**2 / beta2).view(torch.int32) + torch.arange(-62, 62, dtype=torch.int32)
    squares = torch.cat([squares.view(torch.float32), torch.tensor([0.0, 1e-45, math.inf, math.nan])])
    runs = []
    for name in ("native", "eager"):
        weight = torch.nn.Parameter(torch.zeros(64, 128))
        options = {"lr": 1.0, "betas": (0.9, beta2), "eps": 0.0, "weight_decay": 0.0}
        run = own_run(AdamW, options, implementation=name, params=[weight], kept=kept)
        means = torch.linspace(1, 2, 64)[:, None].expand(64, 128).clone()
        state = {"step": torch.tensor(step - 1.0), "exp_avg": means, "exp_avg_sq": squares.expand(64, 128).clone()}
        run.optimizer.state[weight] = state
        run.step([torch.zeros(64, 128)])
        runs.append(run.everything())
    assert_same_bits(*runs)


@pytest.mark.parametrize(("cls", "options"), [ADAMS[0], (SGD, {"lr": 0.1, "momentum": 0.9})])
def test_threads_do_not_change_a_bit(cls, options, two_threads):
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        run = run_of(cls, options, "split", torch.bfloat16, "native")
        for seed in range(3):
            run.step(grads_of(run, seed, torch.bfloat16), torch.tensor(0.1), FALSE)
        runs.append(run.everything())
    assert_same_bits(*runs)


def test_a_skip_writes_nothing_and_reads_no_infinity():
    run = run_of(AdamW, {"lr": 1e-2}, "split", torch.bfloat16, "native")
    run.step(grads_of(run, 0, torch.bfloat16), None, FALSE)
    before, versions = run.everything(), [p._version for p in run.params]
    run.step([torch.full_like(p, math.nan) for p in run.params], torch.tensor(math.inf), TRUE)
    assert_same_bits(run.everything(), before)
    assert all(p._version > version for p, version in zip(run.params, versions, strict=True))


def test_autograd_notices_that_a_weight_was_written():
    w = torch.nn.Parameter(torch.ones(3))
    run = own_run(AdamW, {"lr": 0.1}, None, implementation="native")
    run.params = run.optimizer.param_groups[0]["params"] = [w]
    loss = (w * w).sum()
    run.step([torch.ones(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def fp16_borders():
    """Every fp16 number, what lies just in the middle of two neighbours, and the fp32 numbers around each of those."""
    numbers = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = numbers[numbers.isfinite()]
    after = torch.cat([numbers[1:], torch.tensor([65536.0])])
    middles = (numbers + after) / 2
    values = torch.cat(
        [numbers, middles, middles.nextafter(numbers), middles.nextafter(after), torch.tensor([1e6, math.inf])]
    )
    return torch.cat([values, -values[values != 0]])  # an update of zero has no minus sign


@pytest.mark.usefixtures("processor")
class TestFp16:
    """Weights in fp16, whose rounding the compiled loops do themselves."""

    def stored(self, weights, grads, lr=1.0, *, apart=False):
        params = [torch.nn.Parameter(each) for each in (weights.split(1) if apart else [weights])]
        run = own_run(SGD, {"lr": lr}, "none", torch.float16, "native", params=params)
        run.step(grads.split(1) if apart else [grads])
        return torch.cat([p.detach() for p in params])

    def test_every_border_is_rounded_as_torch_rounds_it(self):
        values = fp16_borders()
        assert_same_bits([self.stored(torch.zeros(values.shape), -values)], [values.half()])

    @pytest.mark.slow_but("AVX2")
    def test_every_border_is_rounded_alike_at_the_end_of_a_block(self):
        values = fp16_borders()[7::97]
        assert_same_bits([self.stored(torch.zeros(values.shape), -values, apart=True)], [values.half()])

    def test_every_number_is_read_as_it_is(self):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
        numbers = numbers[~numbers.isnan()]
        assert_same_bits([self.stored(numbers.clone(), torch.zeros(numbers.shape), lr=0.0)], [numbers])

    def test_nan_stays_nan(self):
        for size in (1, 40):
            assert self.stored(torch.zeros(size), torch.full((size,), math.nan)).isnan().all()


def test_the_peak_of_amsgrad_keeps_a_nan():
    grads = [torch.tensor([1.0, math.nan, 2.0] * 7)]
    found = []
    for name in ("native", "eager"):
        run = own_run(AdamW, {"lr": 1e-2, "amsgrad": True}, None, implementation=name)
        run.params = run.optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(21))]
        run.step(grads)
        run.step([torch.ones(21)])
        found.append(run.optimizer.state[run.params[0]]["max_exp_avg_sq"])
    assert found[0].isnan().tolist() == [False, True, False] * 7
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_a_learning_rate_in_a_tensor_has_the_bits_of_the_reference(cls, dtype):
    runs = [
        own_run(cls, {"lr": torch.tensor(1.1, dtype=dtype)}, "split", implementation=n) for n in ("native", "eager")
    ]
    for run in runs:
        run.params = run.params[:4]  # dense ones
        for seed in range(3):
            run.step(grads_of(run, seed, torch.bfloat16))
    assert_same_bits(runs[0].everything(), runs[1].everything())
    before = own_run(cls, {"lr": 1.1}, "split", implementation="native").params[0]
    assert not torch.equal(runs[0].params[0], before)


def test_the_loops_use_the_threads_that_torch_does(two_threads):
    run = own_run(SGD, {"lr": 0.1})
    batch = Batch("full", [torch.ones(3)], [], [torch.ones(3)])
    table = native.Table(batch)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        table.point(batch, options_of(run.optimizer), None, FALSE)
        assert table.tensors.threads == threads


class TestRead:
    """The norm, the test and the flags of one read."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_16_bit_pattern_is_judged_as_torch_judges_it(self, dtype):
        patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        low = torch.bfloat16 if dtype is torch.float32 else dtype
        grads = [t.to(dtype) for t in patterns.view(low).split(1)]
        flags = native.read(grads)[2]
        assert torch.equal(flags, ~torch.isfinite(torch.cat(grads)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-20, 1e-22, 1e-25, 1e25])
    def test_the_norm_is_float64s(self, dtype, scale):
        grads = [
            (torch.randn(n) * scale).clamp(-6e4, 6e4).to(dtype)
            if dtype is torch.float16
            else (torch.randn(n) * scale).to(dtype)
            for n in NUMELS
        ]
        norm, found, flags = native.read(grads)
        wide = torch.cat([g.double().reshape(-1) for g in grads]).square().sum().sqrt()
        torch.testing.assert_close(norm.double(), wide, rtol=1e-6, atol=0)
        assert not found
        assert flags.shape == (len(NUMELS),)
        assert not flags.any()

    @pytest.mark.parametrize("blocks", [*itertools.permutations([0.0, 1e-44, 1e-30, 1.0, 1e25, 1e36], 3)])
    def test_blocks_of_any_magnitude_follow_each_other(self, blocks):
        grad = torch.cat([torch.full((4096,), value) for value in blocks])
        norm, found, _ = native.read([grad])
        torch.testing.assert_close(norm.double(), grad.double().square().sum().sqrt(), rtol=1e-6, atol=0)
        assert not found
        for bad in (math.inf, math.nan):
            assert native.read([torch.cat([grad, torch.tensor([bad])])])[1]
            assert native.read([torch.cat([torch.tensor([bad]), grad])])[1]

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("where", [0, 63, 64, 4095, 4096, 16383, 16384, 69999])
    def test_a_flag_names_the_gradient(self, bad, where):
        grads = [torch.ones(70000) for _ in range(3)]
        grads[1][where] = bad
        _, found, flags = native.read(grads)
        assert found
        assert flags.tolist() == [False, True, False]

    def test_the_largest_numbers_are_finite(self):
        norm, found, _ = native.read([torch.full((5000,), torch.finfo(torch.float32).max)])
        assert not found
        assert norm.isinf()  # 70 times the largest fp32 number
        assert native.read([torch.full((1,), 3e38)])[0] == torch.tensor(3e38)

    def test_threads_do_not_change_a_bit(self, two_threads):
        grads = [torch.randn(n) for n in (100_000, 5, 77_777)]
        norms = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            norms.append(native.read(grads)[0])
        assert torch.equal(*norms)

    def test_gradients_stay_as_they_are(self):
        grads = [torch.randn(1000).bfloat16(), torch.full((3,), math.nan)]
        before = [g.clone() for g in grads]
        native.read(grads)
        assert_same_bits(grads, before)

    def test_none_and_empty_gradients(self):
        assert [t.tolist() for t in native.read([])] == [0.0, False, []]
        assert [t.tolist() for t in native.read([torch.zeros(0), torch.tensor([3.0])])] == [3.0, False, [False, False]]

    def test_what_it_does_not_take(self):
        assert native.can_read([torch.ones(2), torch.ones(2, 3).t()])
        assert not native.can_read([torch.ones(2), torch.ones(2).double()])
        assert not native.can_read([torch.ones(4, 4)[:, ::2]])
        assert not native.can_read([torch.ones(4).to_sparse()])

    def test_torchs_operations_give_the_same_flags(self):
        grads = [torch.ones(3), torch.tensor([math.nan]), torch.zeros(0), torch.tensor([1.0, math.inf]).bfloat16()]
        for read in (native.read, read_with_torch):
            norm, found, flags = read(grads)
            assert (found.item(), flags.tolist()) == (True, [False, True, False, True])
            assert not norm.isfinite()


@pytest.mark.parametrize("structure", [native._Tensors, native._Common])
def test_python_writes_the_fields_that_cpp_reads(structure):
    header = Path(library.__file__).with_name("blocks.h").read_text()
    (body,) = re.findall(rf"struct {structure.__name__[1:]} {{(.*?)^}};", header, re.MULTILINE | re.DOTALL)
    fields = re.findall(r"^  (.*?)(\w+)(\[kStates\])?;", re.sub("//.*", "", body), re.MULTILINE)
    bytes_of = {"int64_t": 8, "double": 8, "int32_t": 4}
    listed = [
        (name, (native._STATES if several else 1) * bytes_of.get(kind.strip(), 8)) for kind, name, several in fields
    ]
    assert [(name, getattr(structure, name).size) for name, _ in structure._fields_] == listed


class TestFits:
    def test_float64_weights_and_half_dense_ones_are_left_to_others(self):
        adam = options_of(own_run(*ADAMS[0]).optimizer)
        for weight, fits in ((torch.ones(3), True), (torch.ones(3).double(), False), (torch.ones(4, 4)[:, ::2], False)):
            assert native.fits(Batch("full", [weight], [], [weight]), adam) is fits
