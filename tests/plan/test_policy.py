import dataclasses

import pytest

from halfstep.edits import FULL, LOW, Policy
from halfstep.errors import PlanError


def test_full_keeps_everything_fp32_and_hands_on_the_format_of_its_input():
    assert (FULL.param, FULL.compute, FULL.output) == ("full", "full", "input")


def test_low_is_low_throughout():
    assert (LOW.param, LOW.compute, LOW.output) == ("low", "low", "low")


@pytest.mark.parametrize("field", ["param", "compute", "output"])
def test_an_unknown_width_is_named_with_its_field(field):
    with pytest.raises(PlanError, match=f"policy {field} is 'ful'; expected one of .*; did you mean 'full'"):
        dataclasses.replace(FULL, **{field: "ful"})


@pytest.mark.parametrize("field", ["param", "compute"])
def test_only_the_output_can_follow_the_input(field):
    with pytest.raises(PlanError, match=f"policy {field} is 'input'"):
        dataclasses.replace(FULL, **{field: "input"})


def test_low_weights_under_full_computation_are_refused_with_the_reason():
    with pytest.raises(PlanError, match=r"low-precision weights with fp32 inputs"):
        Policy("low", "full", "input")


def test_full_weights_under_low_computation_are_allowed():
    assert Policy("full", "low", "low").compute == "low"


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.param = "low"
