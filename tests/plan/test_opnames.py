import pytest

from halfstep.edits import OpChanges
from halfstep.errors import PlanError
from halfstep.plan.optable import check_op_changes


@pytest.mark.parametrize("where", ["allow", "deny", "infer", "promote"])
def test_an_unknown_op_is_refused_in_every_list(where):
    with pytest.raises(PlanError, match=r"sofmax"):
        check_op_changes(OpChanges(**{where: ("sofmax",)}))


def test_one_op_under_two_names_in_two_lists_is_refused():
    with pytest.raises(PlanError, match=r"'softmax' in deny and 'torch.softmax' in allow are both 'softmax.int'"):
        check_op_changes(OpChanges(allow=("torch.softmax",), deny=("softmax",)))


def test_one_op_under_two_names_in_one_list_is_allowed():
    check_op_changes(OpChanges(deny=("torch.softmax", "softmax")))
