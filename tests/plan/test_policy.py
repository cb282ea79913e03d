import dataclasses

import pytest

from halfstep.edits import FULL, Policy
from halfstep.errors import PlanError


@pytest.mark.parametrize("field", ["param", "compute", "output"])
def test_an_unknown_width_is_named_with_its_field(field):
    with pytest.raises(PlanError, match=f"policy {field} is 'ful'; expected one of .*; did you mean 'full'"):
        dataclasses.replace(FULL, **{field: "ful"})


def test_low_weights_under_full_computation_are_refused_with_the_reason():
    with pytest.raises(PlanError, match=r"low-precision weights with fp32 inputs"):
        Policy("low", "full", "input")
