"""Functions that scripts put on a list of their own, and code without casts."""

import contextlib
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.adapters.apex import sessions
from tests.adapters.apex.cases import small, vectors

FULL = torch.float32


@pytest.fixture
def mine():
    """A module of a script's own, with a function and a class."""
    module = types.ModuleType("mine_for_apex")
    exec(
        "def double(x, y=None):\n    seen.append(x.dtype)\n    return x * 2 if y is None else x * y\n"
        "class Ops:\n    @staticmethod\n    def double(x):\n        seen.append(x.dtype)\n        return x * 2\n"
        "seen = []\n",
        vars(module),
    )
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


class Calling(nn.Module):
    """Calls a function on the output of a linear layer, which is low at O1, and on its input, which is fp32."""

    def __init__(self, call):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x), x)


@pytest.mark.parametrize(("register", "given", "expected"), [("half", 1, "low"), ("float", 0, FULL)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_registered_functions_run_in_their_format_at_o1_alone(amp, low, mine, register, given, expected, level):
    getattr(amp, f"register_{register}_function")(mine, "double")
    getattr(amp, f"register_{register}_function")(mine.Ops, "double")
    model = Calling(lambda *xs: (mine.double(xs[given]), mine.Ops.double(xs[given]))[0])
    model = amp.initialize(model, opt_level=level, verbosity=0)
    model(vectors()[0])
    mine.double(torch.ones(1))
    inside = (low if expected == "low" else expected) if level == "O1" else low
    assert mine.seen == [inside, inside, FULL]


def test_promoted_functions_get_the_widest_format(amp, low, mine):
    amp.register_promote_function(mine, "double")
    model = Calling(lambda h, x: (mine.double(h, h), mine.double(h, x)))
    amp.initialize(model, verbosity=0)(vectors()[0])
    assert mine.seen == [low, FULL]


@pytest.mark.parametrize(("register", "expected"), [("float", FULL), ("half", "low"), ("promote", FULL)])
def test_a_call_inside_a_function_of_a_list_is_not_cast_further(amp, low, mine, register, expected):
    """Products are low elsewhere in the model, and softmax is fp32; in apex they stayed so inside."""
    exec(
        "import torch\ndef inner(x):\n    y = x @ torch.ones(8, 8, dtype=x.dtype)\n"
        "    seen.append((y.dtype, y.softmax(1).dtype))\n    return x",
        vars(mine),
    )
    getattr(amp, f"register_{register}_function")(mine, "inner")
    amp.initialize(Calling(lambda h, x: mine.inner(x)), verbosity=0)(vectors()[0])
    dtype = low if expected == "low" else expected
    assert mine.seen == [(dtype, dtype)]


def test_torch_functions_can_be_moved_between_lists(amp, low):
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(F, "gelu")
    amp.register_float_function(torch.Tensor, "tanh")
    seen = []

    def call(h, x):
        seen.extend([torch.sigmoid(h).dtype, F.gelu(x).dtype, h.tanh().dtype])
        return h

    amp.initialize(Calling(call), verbosity=0)(vectors()[0])
    assert seen == [FULL, low, FULL]


def test_what_cannot_be_registered_is_refused(amp):
    with pytest.raises(ValueError, match="No function named nothing"):
        amp.register_half_function(torch, "nothing")

    class Local:
        def run(self):
            """Is of a class that no import finds."""

    for holder in (Local, Local(), {"run": 1}):
        with pytest.raises(ValueError, match=r"No function|decorate"):
            amp.register_half_function(holder, "run")


def test_what_is_no_function_is_refused(amp):
    for name in (None, 3, "nn"):
        with pytest.raises(ValueError, match="No function named"):
            amp.register_half_function(torch, name)
    with pytest.raises(TypeError, match="expect a function, got 'relu'"):
        amp.half_function("relu")


def test_registering_too_late_is_told(amp, mine):
    amp.initialize(small(), verbosity=0)
    with pytest.warns(UserWarning, match="register functions before"):
        amp.register_half_function(mine, "double")


@pytest.mark.parametrize("late", [False, True])
def test_decorated_functions_run_in_their_format_inside_a_model(amp, low, late):
    def model_of(decorator, pick):
        seen = []

        def run(x):
            seen.append(x.dtype)
            return x

        holder = {} if late else {"run": decorator(run)}
        model = Calling(lambda h, x: holder["run"](pick(h, x)))
        model = amp.initialize(model, verbosity=0)
        holder.setdefault("run", decorator(run))
        model(vectors()[0])
        holder["run"](torch.ones(1))
        return seen

    assert model_of(amp.half_function, lambda h, x: x) == [low, FULL]
    assert model_of(amp.float_function, lambda h, x: h) == [FULL, FULL]


def test_a_decorated_promote_function(amp, low):
    @amp.promote_function
    def pair(a, b):
        """Documented."""
        return a.dtype, b.dtype

    assert pair.__doc__ == "Documented."
    amp.initialize(small(), verbosity=0)
    wide, narrow = torch.ones(1), torch.ones(1, dtype=low)
    with sessions()[0].autocast():
        assert pair(wide, narrow) == (FULL, FULL)
        assert pair(narrow, narrow) == (low, low)
    assert pair(wide, narrow) == (FULL, low)


def dtype_of(model):
    return model[0](vectors()[0]).dtype


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_models_run_as_written_where_casts_are_disabled(amp, low, level):
    seen = []
    model = Calling(lambda h, x: seen.append(h.dtype) or h)
    model = amp.initialize(model, opt_level=level, verbosity=0)
    x = vectors()[0]
    with amp.disable_casts():
        model(x)
    model(x)
    plain = FULL if level in ("O0", "O1") else low
    assert seen == [plain, FULL if level == "O0" else low]


def test_disable_casts_nests_and_survives_an_error(amp, low):
    seen = []

    def call(h, x):
        with amp.disable_casts():
            with amp.disable_casts():
                seen.append(F.linear(x, torch.ones(2, 8)).dtype)
            seen.append(F.linear(x, torch.ones(2, 8)).dtype)
        seen.append(F.linear(x, torch.ones(2, 8)).dtype)
        return h

    model = amp.initialize(Calling(call), verbosity=0)
    with contextlib.suppress(KeyError), amp.disable_casts():
        raise KeyError
    model(vectors()[0])
    assert seen == [FULL, FULL, low]


def test_modules_inside_disable_casts_inside_a_model_stay_as_written(amp, low):
    seen = []
    inner = nn.Linear(8, 8)

    def call(h, x):
        with amp.disable_casts():
            seen.append(inner(x).dtype)
        seen.append(inner(x).dtype)
        return h

    model = Calling(call)
    model.inner = inner
    amp.initialize(model, verbosity=0)(vectors()[0])
    assert seen == [FULL, low]


def test_disable_casts_before_anything_does_nothing(amp):
    with amp.disable_casts():
        assert small()(vectors()[0]).dtype is FULL
