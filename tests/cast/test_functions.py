"""Op changes of Python functions: inside the session's regions only, and put back at the end."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from halfstep.edits import OpChanges
from halfstep.errors import PlanError
from halfstep.train.cast.functions import patch_functions
from tests.cast.engines import opened

FP32, BF16 = torch.float32, torch.bfloat16


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Twice:
    @staticmethod
    def of(x):
        return x.mm(x)


@pytest.fixture
def my_ops():
    module = types.ModuleType("my_ops_of_test_functions")
    module.seen = []

    def pair(a, b, *, bias=None):
        module.seen.append((a.dtype, b["b"].dtype, None if bias is None else bias.dtype))
        return torch.mm(a, b["b"])

    module.pair = pair
    module.Scale, module.Twice = Scale, Twice
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def patched(engine, **changes):
    return patch_functions(
        OpChanges(**{k: tuple(f"my_ops_of_test_functions:{f}" for f in v) for k, v in changes.items()}), engine
    )


@pytest.mark.parametrize(
    ("change", "given", "seen", "out"),
    [
        ("allow", (FP32, BF16), (BF16, BF16), BF16),
        ("deny", (FP32, BF16), (FP32, FP32), FP32),
        ("promote", (FP32, BF16), (FP32, FP32), FP32),
        ("promote", (BF16, BF16), (BF16, BF16), BF16),
        ("infer", (FP32, FP32), (FP32, FP32), FP32),
    ],
)
def test_a_change_casts_arguments_and_nothing_inside(my_ops, change, given, seen, out):
    a, b = torch.rand(2, 2).to(given[0]), torch.rand(2, 2).to(given[1])
    with opened(**{change: ("my_ops_of_test_functions:pair",)}) as engine:
        undo = patched(engine, **{change: ("pair",)})
        with engine.region():
            result = my_ops.pair(a, {"b": b}, bias=a)
        undo()
    assert my_ops.seen == [(*seen, seen[0])]
    assert result.dtype == out  # mm would be low in the region


def test_outside_a_region_the_function_is_as_written(my_ops):
    with opened(deny=("my_ops_of_test_functions:pair",)) as engine:
        undo = patched(engine, deny=("pair",))
        a = torch.rand(2, 2).to(BF16)
        assert my_ops.pair(a, {"b": a}).dtype == BF16
        with torch.autocast("cpu", dtype=BF16):
            assert my_ops.pair(a.float(), {"b": a.float()}).dtype == BF16
        with engine.region(), engine.region(enabled=False):
            assert my_ops.pair(a, {"b": a}).dtype == BF16
        undo()


def test_sessions_do_not_see_each_others_functions_and_undo_in_any_order(my_ops):
    original = my_ops.pair
    a = torch.rand(2, 2)
    with opened(deny=("my_ops_of_test_functions:pair",)) as first, opened() as second:
        undo_first = patched(first, deny=("pair",))
        undo_second = patched(second, allow=("pair",))
        for engine, dtype in ((first, FP32), (second, BF16)):
            with engine.region():
                assert my_ops.pair(a, {"b": a}).dtype == dtype
        undo_first()
        with second.region():
            assert my_ops.pair(a, {"b": a}).dtype == BF16
        undo_second()
        undo_second()
    assert my_ops.pair is original


def test_a_function_that_somebody_wrapped_meanwhile_keeps_their_wrapper(my_ops):
    with opened(deny=("my_ops_of_test_functions:pair",)) as engine:
        undo = patched(engine, deny=("pair",))
        ours = my_ops.pair
        my_ops.pair = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
        undo()
        assert my_ops.pair is theirs
        a = torch.rand(2, 2).to(BF16)
        with engine.region():
            assert my_ops.pair(a, {"b": a}).dtype == BF16


def test_a_method_of_a_class_can_be_named(my_ops):
    with opened(allow=("my_ops_of_test_functions:Scale.apply",)) as engine:
        undo = patched(engine, allow=("Scale.apply",))
        x = torch.ones(2, requires_grad=True)
        with engine.region():
            y = my_ops.Scale.apply(x)
        y.sum().backward()
        undo()
    assert y.dtype == BF16
    assert x.grad.tolist() == [2, 2]
    assert "apply" not in vars(Scale)
    assert Scale.apply(torch.ones(1)).dtype == FP32


def test_a_static_method_is_called_by_its_class_and_by_an_object(my_ops):
    with opened(allow=("my_ops_of_test_functions:Twice.of",)) as engine:
        undo = patched(engine, allow=("Twice.of",))
        with engine.region():
            assert Twice.of(torch.eye(2)).dtype == Twice().of(torch.eye(2)).dtype == BF16
        undo()
    assert Twice().of(torch.eye(2)).dtype == FP32


def test_functions_of_torch_can_be_named():
    name, original = "torch.nn.functional:normalize", F.normalize
    changes = OpChanges(allow=(name,))
    with opened(allow=(name,)) as engine:
        undo = patch_functions(changes, engine)
        with engine.region():
            assert F.normalize(torch.rand(2, 3)).dtype == BF16
        undo()
    assert F.normalize is original


def test_a_compiled_region_sees_the_change():
    name = "torch.nn.functional:normalize"
    with opened(allow=(name,)) as engine:
        undo = patch_functions(OpChanges(allow=(name,)), engine)

        def inside(x):
            with engine.region():
                return F.normalize(x)

        compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
        assert compiled(torch.rand(2, 3)).dtype == BF16
        assert torch.compile(F.normalize, backend="aot_eager", fullgraph=True)(torch.rand(2, 3)).dtype == FP32
        undo()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_here:f", "cannot be imported"),
        ("torch.nn.functional:no_such_function", "has no function 'no_such_function'"),
        ("torch:pi", "has no function 'pi'"),
        ("torch:nn.no.such", "has no function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_any_is_replaced(name, says):
    original = F.normalize
    with opened() as engine, pytest.raises(PlanError, match=says):
        patch_functions(OpChanges(allow=("torch.nn.functional:normalize",), deny=(name,)), engine)
    assert F.normalize is original


def test_names_bound_by_other_modules_follow_too(my_ops):
    other, unrelated = types.ModuleType("other_of_test_functions"), types.ModuleType("unrelated_of_test_functions")
    other.double = my_ops.pair
    unrelated.pair = lambda a, b: a
    written = unrelated.pair
    sys.modules.update({module.__name__: module for module in (other, unrelated)})
    function = my_ops.pair
    try:
        with opened("O1") as engine:
            undo, again = patched(engine, deny=["pair"]), patched(engine, deny=["pair"])
            assert unrelated.pair is written
            with engine.region():
                other.double(torch.ones(1, 1).bfloat16(), {"b": torch.ones(1, 1).bfloat16()})
            undo()
            with engine.region():
                other.double(torch.ones(1, 1).bfloat16(), {"b": torch.ones(1, 1).bfloat16()})
            again()
        assert my_ops.seen == [(FP32, FP32, None)] * 2
        assert other.double is my_ops.pair is function
    finally:
        del sys.modules[other.__name__], sys.modules[unrelated.__name__]
