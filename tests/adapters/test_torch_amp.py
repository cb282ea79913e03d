"""torch.amp's names on halfstep's drop-ins: what scripts written for torch.amp see."""

import contextlib
import copy
import inspect
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep.adapters.torch_amp import PLACES, install
from halfstep.machine import AVX2, AVX512_BF16
from halfstep.train.cast.opregistry import REGISTRY

BEFORE_2_12 = torch.__version__ < "2.12"

# Operations of each of torch's lists, with the formats of what they are given.
OPERATIONS = {
    "low list": (lambda a, b: a @ b, torch.float32, torch.float32),
    "low list, mixed": (lambda a, b: torch.mm(a, b), torch.float32, torch.bfloat16),
    "fp32 list": (lambda a, b: nn.functional.mse_loss(a, b), torch.bfloat16, torch.bfloat16),
    "widest": (lambda a, b: torch.cat([a, b]), torch.float32, torch.bfloat16),
    "no list": (lambda a, b: a.exp() + b, torch.bfloat16, torch.bfloat16),
    "convolution": (lambda a, b: nn.functional.conv1d(a[None], b[:, :, None]), torch.float32, torch.float32),
}


@pytest.fixture
def installed():
    undo = install()
    yield
    undo()


@pytest.mark.parametrize("cache", [None, True, False])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_gives_torchs_bits_and_formats(name, dtype, enabled, cache):
    operation, *formats = OPERATIONS[name]
    given = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).to(f) for i, f in enumerate(formats)]

    def run(kind):
        with kind("cpu", dtype, enabled, cache):
            try:
                return operation(*given)
            except RuntimeError as error:
                return str(error)

    ours, theirs = run(halfstep.autocast), run(torch.autocast)
    assert type(ours) is type(theirs)
    assert ours == theirs if isinstance(ours, str) else ours.dtype is theirs.dtype and torch.equal(ours, theirs)


def test_autocast_has_torchs_signature_and_errors():
    names = [str(p) for p in inspect.signature(halfstep.autocast).parameters]
    assert names == [str(p) for p in inspect.signature(torch.autocast).parameters]
    for wrong, error in (((7,), ValueError), (("nowhere",), RuntimeError), ((torch.bfloat16,), ValueError)):
        with pytest.raises(error) as ours:
            halfstep.autocast(*wrong)
        with pytest.raises(error) as theirs:
            torch.autocast(*wrong)
        assert str(ours.value).startswith(f"{theirs.value}; autocast expected the type of a device, such as 'cuda'")
    with pytest.warns(UserWarning, match="Disabling autocast"):
        halfstep.autocast("cpu", torch.float64)
    with contextlib.nullcontext() if BEFORE_2_12 else pytest.raises(TypeError, match="requires a callable"):
        halfstep.autocast("cpu")(3)


def test_an_instance_may_be_entered_again_inside_itself():
    region = halfstep.autocast("cpu", torch.bfloat16)
    with region, region:
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")

    @halfstep.autocast("cpu", torch.bfloat16)
    def recursive(depth):
        return recursive(depth - 1) if depth else (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    assert recursive(3) is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_an_instance_may_be_used_in_several_threads_at_a_time():
    region, barrier, found = halfstep.autocast("cpu", torch.bfloat16), threading.Barrier(2), []

    def work(wait_inside):
        barrier.wait()
        with region:
            if wait_inside:
                barrier.wait()  # the other thread has left by then
        if not wait_inside:
            barrier.wait()
        found.append(torch.is_autocast_enabled("cpu"))

    threads = [threading.Thread(target=work, args=(inside,)) for inside in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False, False]


def test_an_exception_ends_it_and_a_disabled_region_inside_is_fp32():
    with halfstep.autocast("cpu", torch.bfloat16), halfstep.autocast("cpu", enabled=False):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with pytest.raises(KeyError), halfstep.autocast("cpu", torch.bfloat16):
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.skipif(BEFORE_2_12, reason="torch.compile breaks a graph where a class makes one of another class")
def test_it_is_copied_pickled_and_compiled_as_torchs():
    region = pickle.loads(pickle.dumps(copy.deepcopy(halfstep.autocast("cpu", torch.bfloat16))))
    with region:
        assert torch.is_autocast_enabled("cpu")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        with halfstep.autocast("cpu", torch.bfloat16):
            return x @ x

    assert compiled(torch.ones(2, 2)).dtype is torch.bfloat16


class Regions(nn.Module):
    """Has regions of its own in its forward; made before, made there, the deprecated way, and off."""

    def __init__(self, breaks):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kept = torch.autocast("cpu", torch.bfloat16)
        self.breaks = breaks

    def forward(self, x):
        found = []
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.amp.autocast("cpu", dtype=torch.bfloat16):
            x = self.fc(x)
            found.append(x.dtype)
            if self.breaks:
                torch._dynamo.graph_break()
            with torch.autocast("cpu", enabled=False):
                found.append(self.fc(x.to(self.fc.weight.dtype)).dtype)
        with self.kept, torch.cpu.amp.autocast(dtype=torch.bfloat16):
            found.append(self.fc(x).dtype)
        return x, found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that torch gives after a graph break
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("level", [None, "O1", "O2"])
@pytest.mark.slow_but("O2")
def test_a_compiled_forward_with_regions_of_its_own_is_as_the_eager_one(level, breaks, installed, on_processor):
    on_processor(AVX512_BF16)
    if BEFORE_2_12 and not breaks:
        pytest.skip("torch.compile breaks a graph where a class makes one of another class")
    torch.manual_seed(0)
    model, x = Regions(breaks), torch.randn(2, 4)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=not breaks)
    with contextlib.ExitStack() as stack:
        if level is not None:
            stack.enter_context(halfstep.initialize(model, None, level, low="bf16"))
        (out, formats), (expected, eager) = compiled(x), model(x)
    stored = torch.bfloat16 if level == "O2" else torch.float32
    assert formats == eager == [torch.bfloat16, stored, torch.bfloat16]
    assert torch.equal(out, expected)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_regions_emulate_products_where_the_cpu_has_no_units_and_say_so_once(low, installed, on_processor, caplog):
    on_processor(AVX2)
    layer, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for _ in range(2):
        with torch.autocast("cpu", low), torch.autocast("cpu", low):
            out, _ = layer(x)
            product = a @ b
            assert torch.einsum("i,j->ij", a[0], b[0]).dtype is torch.float32
            assert torch.einsum("ij,jk->ik", a, b).dtype is low
            with torch.autocast("cpu", enabled=False):
                assert (a @ b).dtype is torch.float32
        out.float().sum().backward()
    assert out.dtype is low
    assert layer.weight_ih_l0.grad.isfinite().all()
    assert torch.equal(product, (a.to(low).float() @ b.to(low).float()).to(low))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("as a GPU's tensor cores do (x86 AVX2)")
    assert not torch.is_autocast_enabled("cpu")


def test_what_emulates_is_taken_out_again_and_is_not_there_where_there_are_units(on_processor):
    x = torch.ones(2, 2)
    for row, there in ((AVX512_BF16, False), (AVX2, True)):
        on_processor(row)
        before = set(REGISTRY._slots)
        undo = install()
        with torch.autocast("cpu", torch.bfloat16):
            x @ x
        assert (set(REGISTRY._slots) != before) is there
        undo()
        assert set(REGISTRY._slots) == before
        assert halfstep.autocast.emulators is None


class Cube(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def test_custom_functions_see_it():
    x = torch.full((2,), 1.001, requires_grad=True)
    with halfstep.autocast("cpu", torch.bfloat16):
        out = Cube.apply(x)
    assert out.dtype is torch.float32
    assert torch.equal(out, x.detach() ** 3)
    out.sum().backward()
    assert torch.equal(x.grad, 3 * x.detach() ** 2)


SPELLINGS = {
    "torch.amp, for cuda": (
        lambda full: torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32 if full else None),
        lambda: torch.amp.custom_bwd(device_type="cuda"),
    ),
    "torch.cuda.amp": (
        lambda full: torch.cuda.amp.custom_fwd(cast_inputs=torch.float32) if full else torch.cuda.amp.custom_fwd,
        lambda: torch.cuda.amp.custom_bwd,
    ),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_functions_that_are_written_for_cuda_see_the_autocast_of_the_cpu(spelling, full, installed):
    forward_as, backward_as = (SPELLINGS[spelling][0](full), SPELLINGS[spelling][1]())

    class Product(torch.autograd.Function):
        @staticmethod
        @forward_as
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @backward_as
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.t(), a.t() @ gradient  # of two formats, unless autocast is as it was in forward

    a, b = (torch.randn(4, 4, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out = Product.apply(a, b)
    assert out.dtype is (torch.float32 if full else torch.bfloat16)
    out.float().sum().backward()
    ones = torch.ones(4, 4)
    expected = ones @ b.t() if full else (ones.bfloat16() @ b.t().bfloat16()).float()
    assert torch.equal(a.grad, expected)


def test_a_custom_function_of_no_device_is_refused_at_once(installed):
    for decorator in (torch.amp.custom_fwd, torch.amp.custom_bwd):
        with pytest.raises(ValueError, match="device_type"):
            decorator(device_type=0)


ORIGINALS = [getattr(module, name) for module, name, _ in PLACES]


def test_the_undo_puts_back_the_same_objects():
    undo = install()
    assert [getattr(module, name) for module, name, _ in PLACES] == [drop_in for *_, drop_in in PLACES]
    undo()
    assert all(getattr(m, name) is old for (m, name, _), old in zip(PLACES, ORIGINALS, strict=True))


def test_the_old_spellings_work_without_a_deprecation(installed):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with torch.cpu.amp.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
        assert torch.cpu.amp.GradScaler(init_scale=8.0).get_scale() == 8.0
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="CUDA is not available"), torch.cuda.amp.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        with pytest.warns(UserWarning, match="not available"):
            assert not torch.cuda.amp.GradScaler().is_enabled()


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_fp16_gradients_are_unscaled_in_fp32_and_stepped_in_fp16(unscale, fused):
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=2.0**-4, fused=fused)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**12)
    (scaler.scale((weight * torch.tensor([2.0**-30, 1.0])).sum().float())).backward()
    scaled = weight.grad.clone()
    assert weight.grad.dtype is torch.float16
    if unscale:
        scaler.unscale_(optimizer)
        assert weight.grad.dtype is torch.float32
        assert torch.equal(weight.grad, scaled.float() / 2.0**12)  # 2**-30 is below the least of fp16, 2**-24
        assert weight.grad[0] == 2.0**-30
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.tensor([1.0, 1.9375], dtype=torch.float16))
    optimizer.zero_grad()
    (weight * 1.0).sum().backward()
    assert weight.grad.dtype is torch.float16  # as if nothing had been


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_fp16_gradients_that_are_not_finite_skip_the_step(value):
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = halfstep.GradScaler("cpu", init_scale=4.0)
    scaler.scale((weight * value).sum().float()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.ones(2, dtype=torch.float16))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("first", ["step", "unscale_"])
def test_what_is_refused_leaves_fp16_gradients_as_they_are(first):
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = halfstep.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum().float()).backward()
    getattr(scaler, first)(optimizer)
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.unscale_(optimizer)
    assert weight.grad.dtype is before.dtype
    assert torch.equal(weight.grad, before)
