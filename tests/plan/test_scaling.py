import pytest

from halfstep.edits import Scaling
from halfstep.errors import PlanError


def test_the_defaults_are_those_of_the_design():
    scaling = Scaling("dynamic")
    assert (scaling.init, scaling.growth, scaling.backoff, scaling.growth_interval) == (65536.0, 2.0, 0.5, 2000)
    assert (scaling.min, scaling.max, scaling.hysteresis) == (1.0, 16777216.0, 1)


def test_whole_numbers_are_taken_as_floats():
    assert Scaling("static", init=128) == Scaling("static", init=128.0)
    assert type(Scaling("static", init=128).init) is float


@pytest.mark.parametrize("value", [2.0**-126, 2.0**126])
def test_a_static_scale_may_be_any_normal_number_with_a_normal_inverse(value):
    assert Scaling("static", init=value).init == value


OUTSIDE = (2.0**-127, 2.0**127, 0, -1.0, float("nan"), float("inf"), True, "128", None)
STILL = (("growth", 1.0), ("growth", 0.5), ("backoff", 1.0), ("backoff", 2.0), ("backoff", 0.0), ("backoff", -0.5))
UNUSED = [
    ("none", "init", 1.0),
    ("none", "hysteresis", 2),
    ("static", "growth", 4.0),
    ("static", "backoff", 0.25),
    ("static", "growth_interval", 100),
    ("static", "min", 0.5),
    ("static", "max", 2.0),
    ("static", "hysteresis", 2),
]
REFUSED = [
    ("dynamc", {}, "scale kind is 'dynamc'; .*; did you mean 'dynamic'"),
    *(("static", {"init": value}, "scale init is .*; expected a number from") for value in OUTSIDE),
    *(
        ("dynamic", {"init": init, "min": 8, "max": 16}, r"init .* is outside \[min, max\] = \[8, 16\]")
        for init in (7.99, 16.01)
    ),
    ("dynamic", {"init": 8, "min": 16, "max": 8}, "min 16 is above max 8"),
    *(("dynamic", {field: value}, f"scale {field} is") for field, value in STILL),
    *(
        ("dynamic", {field: value}, f"scale {field} is .*; expected a whole number")
        for field in ("growth_interval", "hysteresis")
        for value in (0, 2.5, True, "2")
    ),
    *(
        (kind, {field: value}, f"scale {field} is {value}, but a scale of kind '{kind}' does not use it")
        for kind, field, value in UNUSED
    ),
]


@pytest.mark.parametrize(("kind", "fields", "said"), REFUSED)
def test_what_is_no_scale_is_refused_in_words(kind, fields, said):
    with pytest.raises(PlanError, match=said):
        Scaling(kind, **fields)
