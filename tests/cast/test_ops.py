"""The op engine's regions: what they cast, where they end, and that nothing of them is left."""

import math
import subprocess
import sys
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import map as over_rows
from torch._higher_order_ops import scan
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import OpError, PlanError, SessionError
from halfstep.train.cast import opkernels, opregistry
from halfstep.train.cast.opkernels import OpSite
from halfstep.train.cast.opregistry import MARKERS, REGISTRY
from halfstep.train.cast.ops import Emulators, autocast
from tests.cast.engines import make_engine, opened
from tests.cast.op_samples import ALLOW, DENY, PROMOTE
from tests.cast.test_ops_rows import Tensors, run

pytestmark = pytest.mark.usefixtures("one_thread")
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def low(*shape):
    return torch.rand(*shape).to(BF16)


def autocast_state():
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda", *MARKERS)]


def dispatcher():
    """Returns the kernels at the autocast keys, op by op, as the dispatcher prints them."""
    keys = ("AutocastCPU", "AutocastCUDA")
    names = {name for key in keys for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    return {name: torch._C._dispatch_dump(name) for name in names | {"aten::exp", "aten::softmax.int"}}


def test_an_index_may_be_none_as_in_a_slice():
    x, values = torch.zeros(2, 3), torch.ones(2, 2, dtype=BF16)
    with opened("O1") as engine, engine.region():
        x[:, torch.tensor([0, 2])] = values
        out = torch.ops.aten.index_put(x, [None, torch.tensor([1])], values[:, :1])
    assert x.tolist() == [[1, 0, 1]] * 2
    assert out.tolist() == [[1, 1, 1]] * 2
    assert out.dtype is torch.float32


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_a_backward_pass_meets_the_kernels_only_if_a_checkpoint_may_repeat_them(reentrant):
    """Neither an evaluation nor a hook on gradients counts; a function without modules does."""
    x, weight, seen, entered = torch.rand(2, 4, requires_grad=True), torch.rand(4), [], []

    def function(x):
        out = (F.linear(x, x) + weight[:2]).softmax(-1)  # whose addition sums a gradient
        seen.append(out.dtype)
        return out * out  # saved, so that it is computed again up to here

    def look(frame, event, argument):
        if event == "call" and "train/cast/op" in frame.f_code.co_filename.replace("\\", "/"):
            entered.append(frame.f_code.co_name)

    with opened("O1") as engine:
        with engine.region(), torch.no_grad():
            function(x)
        seen.clear()
        with engine.region():
            out = function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)
            loss = out.float().square().sum()
        with engine.backward():
            sys.setprofile(look)
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
    assert set(seen) == {FP32}
    assert len(seen) == (1 if reentrant is None else 2)
    assert ("kernel" in entered) is (reentrant is not None)


def test_code_beside_an_open_engine_meets_no_kernel_of_ours():
    """Also in a thread that has used the table, and under a plain autocast."""
    x, w = torch.rand(2, 4, dtype=BF16), torch.ones(4)
    calls = {
        "softmax": lambda: x.softmax(-1),
        "sum": x.sum,
        "norm": lambda: F.layer_norm(x, (4,), w, w),
        "cat": lambda: torch.cat([x, w[None]]),
        "embedding": lambda: F.embedding(torch.tensor([1]), x),
        "pow": lambda: x.pow(2),
        "linear": lambda: F.linear(x, x),
    }
    entered = []

    def look(frame, event, argument):
        if event == "call":
            entered.append(frame.f_code.co_filename)

    with torch.autocast("cpu", BF16):
        plain = {name: call() for name, call in calls.items()}
    for table in ("O1", "O2"):
        with opened(table) as engine:
            with engine.region():
                x.softmax(-1)
            for inside in (nullcontext(), torch.autocast("cpu", BF16)):
                with inside:
                    sys.setprofile(look)
                    try:
                        found = {name: call() for name, call in calls.items()}
                    finally:
                        sys.setprofile(None)
            assert {name: out.dtype for name, out in found.items()} == {n: out.dtype for n, out in plain.items()}
    assert not [name for name in entered if "train/cast/op" in name.replace("\\", "/")]


def test_a_region_casts_by_the_table_and_ends():
    with opened() as engine:
        with engine.region():
            assert torch.exp(low(3)).dtype == FP32
            assert torch.mm(torch.rand(2, 2), torch.rand(2, 2)).dtype == BF16
        assert torch.exp(low(3)).dtype == BF16
        assert torch.mm(torch.rand(2, 2), torch.rand(2, 2)).dtype == FP32


@pytest.mark.parametrize("name", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_exponential_of_a_low_matrix_is_a_number(name, dtype):
    """torch's low kernel gives NaN, for any matrix."""
    with opened(name, low=dtype) as engine, engine.region():
        found = torch.linalg.matrix_exp(torch.eye(3, dtype=dtype))
    torch.testing.assert_close(found, torch.eye(3) * math.e)


def test_a_region_that_is_not_enabled_runs_ops_as_stored():
    with opened() as engine, engine.region():
        with engine.region(enabled=False):
            assert torch.exp(low(3)).dtype == BF16
            assert torch.mm(torch.rand(2, 2), torch.rand(2, 2)).dtype == FP32
            with engine.region():
                assert torch.exp(low(3)).dtype == FP32
        assert torch.exp(low(3)).dtype == FP32


@pytest.mark.parametrize("enabled", [True, False])
def test_enter_and_leave_do_what_region_does(enabled):
    with opened(low=FP16) as engine:
        before = autocast_state()
        with engine.region(enabled):
            expected = autocast_state()
        token = engine.read()
        engine.enter(token, enabled)
        assert autocast_state() == expected
        inner = engine.read()
        engine.enter(inner, not enabled)
        engine.leave(inner)
        assert autocast_state() == expected
        engine.leave(token)
        assert autocast_state() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_region_left_by_an_exception_is_left(error):
    before = autocast_state()
    with opened() as engine:
        with pytest.raises(error), engine.region():
            raise error
        assert autocast_state() == before


def test_a_region_inside_the_users_autocast_gives_it_back():
    with opened() as engine, torch.autocast("cpu", dtype=FP16):
        token = engine.read()
        engine.enter(token)
        assert torch.mm(torch.rand(2, 2), torch.rand(2, 2)).dtype == BF16
        engine.leave(token)
        assert torch.mm(torch.rand(2, 2), torch.rand(2, 2)).dtype == FP16
        assert torch.exp(low(3)).dtype == BF16


def test_the_users_autocast_off_inside_a_region_switches_casting_off():
    with opened() as engine, engine.region(), torch.autocast("cpu", enabled=False):
        assert torch.exp(low(3)).dtype == BF16


@pytest.mark.parametrize("group", [ALLOW, DENY, PROMOTE], ids=["allow", "deny", "promote"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_autocast_elsewhere_does_what_it_did(group):
    def plain():
        results = {}
        for name, sample in group.items():
            try:
                out, gradients = run(name, sample, Tensors(BF16), torch.autocast("cpu", dtype=BF16))
                results[name] = [(t.dtype, t.detach()) for t in (*out, *gradients) if t is not None]
            except RuntimeError as error:
                results[name] = str(error).splitlines()[0]
        return results

    before = plain()
    with opened("O1"), opened("O2"), opened(deny=("linear", "conv2d")):
        between = plain()
    assert before.keys() == between.keys()
    for name, expected in before.items():
        if isinstance(expected, str):
            assert between[name] == expected, name
            continue
        for (dtype, value), (dtype_now, value_now) in zip(expected, between[name], strict=True):
            assert dtype == dtype_now, name
            torch.testing.assert_close(value, value_now, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


def test_two_engines_with_different_tables_do_not_see_each_other():
    with opened("O1") as first, opened("O2") as second, opened("O1", deny=("gelu",)) as third:
        for engine, exp, gelu in ((first, FP32, BF16), (second, BF16, BF16), (third, FP32, FP32)):
            with engine.region():
                assert (torch.exp(low(3)).dtype, F.gelu(low(3)).dtype) == (exp, gelu)


def test_the_innermost_region_decides():
    with opened("O1") as first, opened("O2") as second:
        for outer, inner, dtype in ((first, second, BF16), (second, first, FP32)):
            before = autocast_state()
            with outer.region(), inner.region():
                assert torch.exp(low(3)).dtype == dtype
            token = outer.read()
            outer.enter(token)
            inner_token = inner.read()
            inner.enter(inner_token)
            assert torch.exp(low(3)).dtype == dtype
            inner.leave(inner_token)
            outer.leave(token)
            assert autocast_state() == before


def test_engines_with_equal_tables_share_and_the_last_close_ends_it():
    first, second = make_engine(), make_engine()
    first.open()
    second.open()
    first.close()
    with second.region():
        assert torch.exp(low(3)).dtype == FP32
    second.close()
    assert not torch.is_autocast_enabled("ipu")


def test_a_closed_engine_leaves_no_casts_in_kernels_that_others_need():
    with opened("O2"):
        engine = make_engine("O1")
        engine.open()
        marker = engine._marker
        engine.close()
        with torch.autocast("cpu", dtype=BF16), torch.autocast(marker):
            assert torch.exp(low(3)).dtype == BF16


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_casts_happen_where_no_gradients_are_recorded(mode):
    with opened() as engine, mode(), engine.region():
        assert torch.exp(low(3)).dtype == FP32
        assert F.layer_norm(low(3), (3,)).dtype == FP32
        assert F.linear(torch.rand(2, 2), torch.rand(2, 2)).dtype == BF16
        assert nn.LSTM(2, 2)(torch.rand(1, 2))[0].dtype == BF16


def test_engines_in_different_formats_share_a_table():
    with opened(low=BF16) as first, opened(low=FP16) as second:
        for engine, dtype in ((first, BF16), (second, FP16)):
            with engine.region():
                assert nn.GRU(3, 3)(torch.rand(2, 3))[0].dtype == dtype


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_after_the_last_close_the_process_is_as_before(order):
    before, fast_path = dispatcher(), torch.backends.mha.get_fastpath_enabled()
    tag = torch.compiler.config.cache_key_tag
    engines = [make_engine("O1"), make_engine("O2"), make_engine("O2", low=FP16, deny=("linear",))]
    for engine in engines:
        engine.open()
    assert dispatcher() != before
    assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.compiler.config.cache_key_tag != tag
    for i in order:
        engines[i].close()
    assert dispatcher() == before
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert torch.compiler.config.cache_key_tag == tag
    assert not REGISTRY._slots
    assert not REGISTRY._devices


def test_a_fast_path_that_the_user_switched_off_stays_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with opened():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_more_tables_than_markers_are_refused_and_nothing_is_left():
    names = ("gelu", "relu", "silu", "mish", "celu", "selu")
    engines = [make_engine(deny=(name,)) for name in names]
    for engine in engines[: len(MARKERS)]:
        engine.open()
    try:
        with pytest.raises(PlanError, match="different op tables are open"):
            engines[-1].open()
        again = make_engine(deny=names[:1])  # a table that is open needs no marker
        again.open()
        again.close()
    finally:
        for engine in engines:
            engine.close()
    assert not REGISTRY._slots


def test_where_no_table_is_free_a_session_keeps_its_own_and_autocast_runs_as_torchs(monkeypatch):
    models = [nn.Linear(4, 4) for _ in range(2)]
    sessions = [halfstep.initialize(model, None, "O1", low="bf16") for model in models]
    state = sessions[0].state_dict()
    engines = [make_engine(deny=(name,)) for name in ("gelu", "relu", "silu", "mish", "celu")[: len(MARKERS) - 1]]
    emulators = Emulators()
    monkeypatch.setattr("halfstep.train.cast.ops.needs_emulation", lambda *_: True)
    try:
        for engine in engines:
            engine.open()
        with pytest.raises(PlanError, match="different op tables are open"):
            sessions[0].load_state_dict({**state, "emulate": not state["emulate"]})
        assert sessions[0].state_dict()["emulate"] is state["emulate"]
        assert emulators.entered(autocast("cpu", dtype=torch.bfloat16)) is None
        low = models[0](torch.randn(2, 4))
        torch.testing.assert_close(low, low.bfloat16().float(), rtol=0, atol=0)  # it computes in bf16
    finally:
        emulators.close()
        for engine in engines:
            engine.close()
        for session in sessions:
            session.close()


def test_opening_and_closing_twice_is_once():
    before = dispatcher()
    engine = make_engine()
    engine.open()
    engine.open()
    engine.close()
    engine.close()
    assert dispatcher() == before


def test_a_closed_engine_has_no_regions():
    engine = make_engine()
    for use in (engine.read, engine.region().__enter__, engine.backward().__enter__):
        with pytest.raises(SessionError, match="closed"):
            use()


def test_a_region_belongs_to_its_thread():
    seen = {}

    def look(name):
        seen[name] = torch.exp(low(3)).dtype

    def enter():
        with engine.region():
            look("own region")

    with opened() as engine, engine.region():
        for run_in_thread in (lambda: look("another thread"), enter):
            thread = threading.Thread(target=run_in_thread)
            thread.start()
            thread.join()
        look("this thread")
    assert seen == {"another thread": BF16, "own region": FP32, "this thread": FP32}


def test_active_tells_whether_casts_happen():
    with opened("O1") as engine, opened("O2") as other:
        assert not engine.switch.is_on()
        with engine.region():
            assert engine.switch.is_on()
            assert not other.switch.is_on()
            with engine.region(enabled=False):
                assert not engine.switch.is_on()


def test_leaving_the_outermost_region_drops_the_casts_of_weights():
    weight = nn.Parameter(torch.ones(2, 2))
    with opened() as engine:
        for expected in (2, 4):
            token = engine.read()
            engine.enter(token)
            assert F.linear(torch.ones(1, 2), weight).tolist() == [[expected] * 2]
            engine.leave(token)
            with torch.no_grad():
                weight.mul_(2)


@pytest.mark.parametrize("table", ["O1", "O2"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_binary_cross_entropy_on_low_inputs_is_refused_with_the_op_to_use(table, dtype):
    p = torch.rand(3)
    with opened(table, low=dtype) as engine, engine.region():
        with pytest.raises(OpError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(p.to(dtype), torch.ones(3))
        assert F.binary_cross_entropy(p, torch.ones(3, dtype=dtype)).dtype == FP32
    assert F.binary_cross_entropy(p.to(dtype), torch.ones(3, dtype=dtype)).dtype == dtype


def test_float64_complex_and_integers_are_never_cast():
    with opened() as engine, engine.region():
        x = torch.rand(3, 3, dtype=FP64)
        assert torch.mm(x, x).dtype == FP64
        assert torch.softmax(x, -1).dtype == FP64
        assert torch.sum(torch.ones(3, dtype=torch.int32)).dtype == torch.int64
        c = torch.rand(3, 3, dtype=torch.complex64)
        assert torch.mm(c, c).dtype == torch.complex64
        assert torch.exp(c).dtype == torch.complex64


def test_a_dtype_that_the_caller_gives_wins():
    with opened() as engine, engine.region():
        assert torch.softmax(low(3), -1, dtype=FP64).dtype == FP64
        assert torch.sum(low(3), dtype=BF16).dtype == BF16
        assert torch.softmax(low(3), -1, BF16).dtype == BF16


def test_what_only_the_cpu_runs_full_stays_as_written():
    x = low(1, 2, 4, 4)
    with opened() as engine, engine.region():
        assert F.pad(x, (1, 1, 1, 1), "reflect").dtype == BF16
        assert F.pad(x, (1, 1, 1, 1), "replicate").dtype == BF16
        assert F.max_pool3d(x, 2).dtype == BF16
        assert torch.cat([x, x]).dtype == BF16
        assert torch.cat([x, x.float()]).dtype == FP32
        assert torch.stack([x, x]).dtype == BF16
        assert torch.__version__ < "2.12" or low(3, 3).trace().dtype == BF16


def test_a_tensor_on_another_device_is_left_alone():
    site = OpSite(torch.ops.aten.index_put.default, "cpu")
    here, there = low(3), torch.ones(3, dtype=BF16, device="meta")
    assert [t.dtype for t in site.cast([here, there], FP32)] == [FP32, BF16]
    assert site.dtypes([here.float(), there], {}) == {FP32}


@pytest.mark.parametrize("table", ["O1", "O2"])
def test_a_mixed_index_assignment_takes_the_format_written_into(table):
    with opened(table) as engine, engine.region():
        full, mask = torch.zeros(3), torch.tensor([True, False, True])
        full[mask] = low(2)
        full[torch.tensor([1])] = low(1)
        assert full.dtype == FP32


def test_vmap_and_functional_gradients_go_through_the_kernels():
    with opened() as engine, engine.region():
        assert torch.vmap(torch.exp)(low(2, 3)).dtype == FP32
        gradient = torch.func.grad(lambda x: torch.softmax(x, -1)[0])(low(3))
        assert gradient.dtype == BF16


def test_overriding_torchs_kernels_warns_nobody():
    code = "import tests.cast.engines as e\nwith e.opened('O2', deny=('linear',)) as engine: pass"
    run_strict = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(run_strict, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr


def test_a_session_that_is_collected_while_the_markers_are_read_disturbs_nobody():
    """A finalizer may give a marker back at any allocation, also between two markers."""

    class Releasing(str):
        __slots__ = ()

        def __ne__(self, other):
            two.close()
            return str(self) != other

        __hash__ = str.__hash__

    with opened("O1") as one:
        two, three = make_engine("O1", deny=("gelu",)), make_engine("O1", deny=("silu",))
        two.open()
        three.open()
        left = two.switch.marker, three.switch.marker
        assert REGISTRY.others(Releasing(one.switch.marker)) == left
        assert REGISTRY.others(one.switch.marker) == left[1:]
        three.close()


@pytest.mark.parametrize("marker", MARKERS)
def test_a_product_that_is_called_by_its_aten_name_is_low_under_every_marker(marker, monkeypatch):
    """Torch has autocast kernels for MTIA and MAIA, which switch the marker off for what they call."""
    monkeypatch.setattr(opregistry, "MARKERS", (marker,))
    x, w = torch.randn(1, 2, 3, 3), torch.randn(3, 2, 2, 2)
    for table in ("O1", "O2"):
        with opened(table) as engine, engine.region():
            out = torch.convolution(x, w, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
            assert torch.is_autocast_enabled(marker)
            assert out.dtype is F.conv2d(x, w).dtype is torch.bfloat16


def attended(x, factor=1.0):
    k = x.view(1, 6, 2, 8).transpose(1, 2)
    out = flex_attention(k.float(), k, k, score_mod=lambda score, b, h, i, j: score * factor + 0.1 * (i - j))
    return out.transpose(1, 2).flatten(2)[0]


TAKING_FUNCTIONS = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,)),
    "scan": lambda x: scan(lambda carry, t: (carry * 0.5 + t, carry + t), x[0] * 0, x)[1],
    "map": lambda x: over_rows(torch.sin, x),
    "flex_attention": attended,
    "flex_attention with scores beyond fp32": partial(attended, factor=1e45),
}


class Taking(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.name = nn.Linear(16, 16), name

    def forward(self, x):
        out = TAKING_FUNCTIONS[self.name](self.linear(x))
        self.dtype = out.dtype
        return out.float().square().mean()


@pytest.fixture
def flex_trains(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # which refuses it on a CPU alone
    monkeypatch.setattr(opkernels._Called, "flex_attention", False)
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("low", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(TAKING_FUNCTIONS)[:4])
@pytest.mark.filterwarnings("ignore")  # torch's, of its own tracing
def test_operations_that_take_functions_run_and_train_as_under_autocast(name, low, level, flex_trains):
    (model, twin), x = (Taking(name) for _ in range(2)), torch.randn(6, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.initialize(model, optimizer, level, low=low) as session:
        session.backward(model(x))
        session.unscale_()
        found = model.linear.weight.grad.float()
    with torch.autocast("cpu", halfstep.level(level, low).low.dtype):
        twin(x).backward()
    exact = twin.linear.weight.grad
    assert model.dtype is twin.dtype
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("low", ["bf16", "fp16"])
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_seen_as_the_operations_it_is_made_of(low, flex_trains):
    model, x = Taking("flex_attention"), torch.randn(6, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.initialize(model, optimizer, "O2", low=low, emulate=True) as session:
        probe = session.observe(every=1, absorbed=True, precision=True)
        session.backward(model(x))
        session.step()
        assert {seen.module for seen in probe.flush()} == {"linear", ""}
        assert halfstep.blame(session, lambda: model(x)) is None
        model.name = "flex_attention with scores beyond fp32"
        found = halfstep.blame(session, lambda: model(x))
        assert found.phase == "forward"
        assert found.where.endswith("in <lambda>")  # the score function


@pytest.mark.parametrize(("name", "looks"), [("flex_attention", 0), ("scan", 1)])
@pytest.mark.filterwarnings("ignore")
def test_overflows_are_looked_for_unasked_but_where_flex_attention_would_keep_all_scores(
    name, looks, flex_trains, monkeypatch
):
    module = sys.modules["halfstep.initialize"]
    begun, watch = [], module.watch_absorbed
    monkeypatch.setattr(module, "watch_absorbed", lambda *args: begun.append(1) or watch(*args))
    model, x = Taking(name), torch.randn(6, 16)
    with halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", low="fp16") as session:
        for _ in range(11):
            session.backward(model(x))
            session.step()
    assert len(begun) == looks
