"""Workloads by name and from a file, and their settings as text."""

import pytest

from halfstep.errors import DataError, WorkloadError
from halfstep.lab.workloads.char_lm import CharLM
from halfstep.lab.workloads.load import Regression, load_workload, parse_settings

OWN = """
from halfstep.lab.workloads.load import Regression

def small(batch="8", data=None):
    return Regression(batch=int(batch), data=data)

def bare():
    return Regression(batch=5)

def wrong():
    return 3

def boom():
    raise RuntimeError("no model today")

number = 4
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_workload_comes_by_name_with_its_settings(tmp_path):
    job = load_workload("char_lm", {"d": "64", "lr": "3e-4", "max_norm": "none"}, data=tmp_path)
    assert job == CharLM(d=64, lr=3e-4, max_norm=None, data=tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("char_ml", {}, r"unknown workload 'char_ml'; did you mean 'char_lm'\? choose one of char_lm, cifar_resnet"),
        (
            "regression",
            {"depth": "3"},
            "regression has no setting depth; it has batch, lr, max_norm, d_in, d_out, layers",
        ),
        ("regression", {"data": "x"}, "regression has no setting data; it has"),
        ("regression", {"btch": "3"}, r"no setting btch; it has batch, .*layers; did you mean 'batch'"),
        ("regression", {"batch": "1.5"}, "regression: batch is '1.5'; set it to a value of type int"),
        ("regression", {"lr": "fast"}, "lr is 'fast'; set it to a value of type float"),
        ("regression", {"lr": "none"}, "lr is 'none'; set it to a value of type float"),
        ("regression", {"max_norm": "x"}, "max_norm is 'x'; set it to a value of type float or none"),
        ("regression", {"batch": "-1"}, "regression: batch is -1; set it above 0"),
        ("nowhere.py:f", {}, r"no Python file 'nowhere\.py'; pass path\.py:function"),
    ],
)
def test_what_does_not_exist_is_an_error_that_says_what_does(name, settings, message):
    with pytest.raises(WorkloadError, match=message):
        load_workload(name, settings)


def test_a_users_function_gets_its_settings_and_data(own, tmp_path):
    job = load_workload(f"{own}:small", {"batch": "3"}, data=tmp_path)
    assert (type(job), job.batch, job.data) == (Regression, 3, tmp_path)
    assert load_workload(f"{own}:bare").batch == 5


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("missing", {}, "has no function 'missing'"),
        ("number", {}, "has no function 'number'"),
        ("wrong", {}, "returned int; it must return a halfstep.lab.workloads.Workload"),
        ("boom", {}, r"own\.py:boom raised RuntimeError: no model today"),
        ("small", {"batch": "x"}, r"own\.py:small raised ValueError: invalid literal"),
        ("small", {"width": "3"}, "has no setting width; it has batch"),
    ],
)
def test_a_users_function_that_does_not_fit_is_an_error(own, function, settings, message):
    with pytest.raises(WorkloadError, match=message):
        load_workload(f"{own}:{function}", settings)


def test_data_that_a_users_function_cannot_take_is_an_error(own, tmp_path):
    with pytest.raises(WorkloadError, match="takes no data; add a parameter `data` to the function"):
        load_workload(f"{own}:bare", data=tmp_path)


def test_data_for_a_users_function_has_to_exist(own, tmp_path):
    with pytest.raises(DataError, match=r"own\.py:small: .*nowhere does not exist"):
        load_workload(f"{own}:small", data=tmp_path / "nowhere")


def test_data_for_a_workload_that_reads_none_is_an_error_that_names_those_that_do(tmp_path):
    with pytest.raises(
        WorkloadError, match=r"regression reads no data.* choose a workload that does: char_lm, cifar_resnet, imdb_lstm"
    ):
        load_workload("regression", data=tmp_path)


def test_an_error_in_a_users_file_says_which(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name", encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"broken\.py raised ModuleNotFoundError on import"):
        load_workload(f"{tmp_path / 'broken.py'}:f")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["d"], "'d' is not key=value"),
        (["=3"], "'=3' is not key=value"),
        (["d=1", "d=2"], "'d' is set twice, to '1' and '2'"),
    ],
)
def test_settings_are_key_and_value_once_each(pairs, message):
    with pytest.raises(WorkloadError, match=message):
        parse_settings(pairs)


def test_a_value_may_hold_an_equals_sign():
    assert parse_settings(["a=b=c"]) == {"a": "b=c"}
