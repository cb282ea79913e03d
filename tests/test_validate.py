import numpy
import pytest

from halfstep.errors import PlanError
from halfstep.validate import as_tuple, check_device_type, count, file_path, instance, near_miss, one_of, real, text


@pytest.mark.parametrize("value", ["splt", "SPLIT", "spli"])
def test_near_miss_finds_the_word_in_any_case(value):
    assert near_miss(value, ("copy", "split")) == "; did you mean 'split'?"


@pytest.mark.parametrize("value", ["xyz", "", 3, None])
def test_near_miss_is_silent_where_nothing_is_near(value):
    assert near_miss(value, ("copy", "split")) == ""


def test_one_of_names_value_and_choices():
    with pytest.raises(PlanError, match=r"^master is 'splt'; expected one of 'copy', 'split'; did you mean 'split'\?"):
        one_of("master", "splt", ("copy", "split"))


@pytest.mark.parametrize("value", [None, 1, ["copy"], ("copy",)])
def test_one_of_refuses_what_is_no_string(value):
    with pytest.raises(PlanError, match=r"expected one of 'copy'"):
        one_of("master", value, ("copy",))


@pytest.mark.parametrize("value", ["", "  ", "a\nb", "a\x00", "\ud800"])
def test_text_refuses_what_would_not_survive_a_file(value):
    with pytest.raises(PlanError, match=r"expected non-empty printable text"):
        text("name", value)


def test_text_refuses_other_types_by_name():
    with pytest.raises(PlanError, match=r"name is 3 of type int; expected a string"):
        text("name", 3)


def test_text_takes_empty_where_allowed():
    assert text("pattern", "", empty=True) == ""


@pytest.mark.parametrize("value", [1, 1.0, numpy.float32(1), numpy.int64(1)])
def test_real_takes_every_real_number(value):
    found = real("init", value, low=1.0, high=2.0)
    assert found == 1.0
    assert type(found) is float


@pytest.mark.parametrize("value", [0.999, 2.001, float("nan"), float("inf"), -1])
def test_real_refuses_what_is_outside(value):
    with pytest.raises(PlanError, match=r"expected a number from 1 to 2"):
        real("init", value, low=1.0, high=2.0)


@pytest.mark.parametrize("value", [True, "1", None, 1j])
def test_real_refuses_what_is_no_number(value):
    with pytest.raises(PlanError, match=f"of type {type(value).__name__}; expected a number"):
        real("init", value, low=1.0, high=2.0)


@pytest.mark.parametrize("value", [1, 2**31 - 1, numpy.int64(7)])
def test_count_takes_what_fits_a_counter(value):
    assert count("interval", value) == value


@pytest.mark.parametrize("value", [0, 2**31, -1, 1.0, True, "1", None])
def test_count_refuses_the_rest(value):
    with pytest.raises(PlanError, match=r"interval is .*; expected a whole number from 1 to 2147483647"):
        count("interval", value)


def test_as_tuple_takes_any_iterable():
    assert as_tuple("rules", iter([1, 2]), of="Rules") == (1, 2)


@pytest.mark.parametrize("value", ["softmax", 3, None])
def test_as_tuple_refuses_strings_and_single_things(value):
    with pytest.raises(PlanError, match=r"expected a tuple of Rules"):
        as_tuple("rules", value, of="Rules")


def test_instance_shows_a_long_value_on_one_line():
    with pytest.raises(PlanError, match=r"^plan is 'x+… of type str; expected a int, such as 3"):
        instance("plan", "x" * 1000, int, "3")


@pytest.mark.parametrize("value", [3, None, b"plan.toml"])
def test_file_path_refuses_what_is_no_path(value):
    with pytest.raises(PlanError, match=rf"plan file is {value!r} of type {type(value).__name__}; expected a path"):
        file_path("plan file", value)


@pytest.mark.parametrize("value", ["gpu", "", 3, 65536.0, None])
def test_check_device_type_refuses_what_torch_does_not_know(value):
    with pytest.raises(PlanError, match=rf"device is {value!r}; expected .* 'cuda' or 'cpu'"):
        check_device_type("device", value)


@pytest.mark.parametrize("value", ["cpu", "cuda", "cuda:1"])
def test_check_device_type_takes_the_names_of_devices(value):
    check_device_type("device", value)
