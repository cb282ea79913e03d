import dataclasses

import pytest

from halfstep.edits import Scaling
from halfstep.errors import PlanError


def test_the_defaults_are_those_of_the_design():
    scaling = Scaling("dynamic")
    assert (scaling.init, scaling.growth, scaling.backoff, scaling.growth_interval) == (65536.0, 2.0, 0.5, 2000)
    assert (scaling.min, scaling.max, scaling.hysteresis) == (1.0, 16777216.0, 1)


def test_an_unknown_kind_is_named_with_the_nearest():
    with pytest.raises(PlanError, match=r"scale kind is 'dynamc'; .*; did you mean 'dynamic'"):
        Scaling("dynamc")


def test_whole_numbers_are_taken_as_floats():
    assert Scaling("static", init=128) == Scaling("static", init=128.0)
    assert type(Scaling("static", init=128).init) is float


@pytest.mark.parametrize("value", [2.0**-126, 2.0**126])
def test_a_static_scale_may_be_any_normal_number_with_a_normal_inverse(value):
    assert Scaling("static", init=value).init == value


@pytest.mark.parametrize("value", [2.0**-127, 2.0**127, 0, -1.0, float("nan"), float("inf"), True, "128", None])
def test_a_scale_outside_is_refused(value):
    with pytest.raises(PlanError, match=r"scale init is .*; give a number from"):
        Scaling("static", init=value)


def test_a_dynamic_scale_may_start_at_either_end():
    assert Scaling("dynamic", init=8, min=8, max=16).init == 8
    assert Scaling("dynamic", init=16, min=8, max=16).init == 16


@pytest.mark.parametrize("init", [7.99, 16.01])
def test_a_dynamic_scale_must_start_within_its_range(init):
    with pytest.raises(PlanError, match=r"init .* is outside \[min, max\] = \[8, 16\]"):
        Scaling("dynamic", init=init, min=8, max=16)


def test_an_empty_range_is_refused():
    with pytest.raises(PlanError, match=r"min 16 is above max 8"):
        Scaling("dynamic", init=8, min=16, max=8)


def test_a_range_of_one_value_is_allowed():
    assert Scaling("dynamic", init=8, min=8, max=8).max == 8


@pytest.mark.parametrize(("field", "value"), [("growth", 1.0), ("growth", 0.5), ("backoff", 1.0), ("backoff", 2.0)])
def test_a_schedule_that_does_not_move_or_moves_the_wrong_way_is_refused(field, value):
    with pytest.raises(PlanError, match=f"scale {field} is"):
        Scaling("dynamic", **{field: value})


@pytest.mark.parametrize("backoff", [0.0, -0.5])
def test_backoff_must_be_positive(backoff):
    with pytest.raises(PlanError, match=r"scale backoff is"):
        Scaling("dynamic", backoff=backoff)


@pytest.mark.parametrize("field", ["growth_interval", "hysteresis"])
@pytest.mark.parametrize("value", [0, 2.5, True, "2"])
def test_counts_are_whole_and_positive(field, value):
    with pytest.raises(PlanError, match=f"scale {field} is .*; give a whole number"):
        Scaling("dynamic", **{field: value})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("none", "init", 1.0),
        ("none", "hysteresis", 2),
        ("static", "growth", 4.0),
        ("static", "backoff", 0.25),
        ("static", "growth_interval", 100),
        ("static", "min", 0.5),
        ("static", "max", 2.0),
        ("static", "hysteresis", 2),
    ],
)
def test_what_a_kind_does_not_use_is_refused(kind, field, value):
    with pytest.raises(PlanError, match=f"scale {field} is {value}, but a scale of kind '{kind}' does not use it"):
        Scaling(kind, **{field: value})


def test_a_static_scale_outside_the_range_of_dynamic_ones_is_allowed():
    assert Scaling("static", init=2.0**-4).init == 0.0625


def test_replace_validates_again():
    with pytest.raises(PlanError, match=r"outside"):
        dataclasses.replace(Scaling("dynamic"), max=1024.0)
