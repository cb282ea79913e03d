"""The op table against torch's own lists, the names it is asked by, and what it does at each level."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfstep.edits import OpChange, OpChanges
from halfstep.errors import PlanError
from halfstep.formats import BF16, FP16
from halfstep.plan.levels import level
from halfstep.plan.optable import (
    AS_WRITTEN,
    BY_CALL,
    NORMS,
    REFUSED,
    ROWS,
    device_note,
    effective,
    find,
    stock_action,
)

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
# registered for CUDA beside the lists of the header, in ATen/native/cudnn and autocast_mode.cpp
CUDA_BESIDES = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "binary_cross_entropy"}
BY_OP = {row.op: row for row in ROWS}


def header_list(name):
    """Returns the overloads of one of the header's macros, such as AT_FORALL_PROMOTE."""
    text = HEADER.read_text()
    body = re.search(rf"#define {name}\(_\)(.*?)\n\n", text, re.DOTALL).group(1)
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
    return {f"{op}.{overload}" if overload else op for op, overload in entries if "imname" not in overload}


def overloads(category):
    return {overload for row in ROWS if row.category == category for overload in row.overloads}


def registered(device_key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(device_key)
    names = [name for name in names if not re.search("imname|names_", name)]  # of named tensors, which older torch has
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


@pytest.mark.parametrize(
    ("macro", "category", "at_least"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", "allow", 30),
        ("AT_FORALL_FP32", "deny", 58),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", "deny", 11),
        ("AT_FORALL_PROMOTE", "promote", 11),
    ],
)
def test_the_lists_for_cuda_in_torchs_header_are_rows_of_their_category(macro, category, at_least):
    listed = header_list(macro)
    assert len(listed) >= at_least
    assert listed - overloads(category) == set()


def test_each_call_of_what_torch_lists_for_cuda_is_cast_as_torch_does_except_of_einsum():
    """Whose equation decides: an outer product sums nothing, and torch's autocast for CPU leaves it alone too."""
    actions = effective(level("O1", BF16))
    stock = {o: stock_action(o, "cuda") for row in ROWS for o in row.overloads}
    differ = {o for o, action in stock.items() if action not in (None, actions[o])}
    assert differ == {"einsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"}  # of the norms torch's row fails
    assert stock_action("einsum", "cpu") is None


def test_every_kernel_that_torch_has_for_cuda_is_a_row_or_refused():
    rows = overloads("allow") | overloads("deny") | overloads("promote")
    assert registered("AutocastCUDA") - rows - CUDA_BESIDES == set()


def test_every_kernel_that_torch_has_for_the_cpu_is_a_row_or_runs_as_written_on_purpose():
    rows = overloads("allow") | overloads("deny") | overloads("promote")
    assert registered("AutocastCPU") - rows - set(AS_WRITTEN) == set(REFUSED)


def test_a_row_of_torchs_has_a_kernel_of_torchs_and_a_row_of_halfsteps_has_none():
    either = registered("AutocastCPU") | registered("AutocastCUDA") | CUDA_BESIDES
    either |= {"rms_norm"}  # torch 2.11 does not cast it
    for row in ROWS:
        assert any(overload in either for overload in row.overloads) == (row.source == "torch"), row


def test_no_overload_stands_in_two_rows_and_each_exists_in_this_torch():
    every = [overload for row in ROWS for overload in row.overloads]
    assert len(every) == len(set(every))
    assert not set(every) & set(AS_WRITTEN)
    assert [o for o in every if not torch._C._dispatch_has_kernel(f"aten::{o}")] == []


def test_stock_actions_are_those_of_the_device():
    assert stock_action("linear", "cpu") == "low"
    assert stock_action("softmax.int", "cpu") is None
    assert stock_action("softmax.int", "cuda") == "full"
    assert stock_action("grid_sampler", "cpu") == "full"
    assert stock_action("grid_sampler", "cuda") == "promote"
    assert stock_action("cat", "cpu") == "promote"
    assert stock_action("cat", "cuda") is None
    assert stock_action("avg_pool3d", "cpu") == "full"
    assert stock_action("no_such_op", "cpu") is None
    assert stock_action("binary_cross_entropy", "cpu") == "full"
    assert stock_action("binary_cross_entropy", "cuda") == "refuse"


def test_the_note_of_a_row_says_who_carries_it_out():
    assert device_note(BY_OP["linear"], "cpu") == "torch"
    assert device_note(BY_OP["softmax"], "cpu") == "halfstep"
    assert device_note(BY_OP["softmax"], "cuda") == "torch"
    assert device_note(BY_OP["conv1d"], "cuda") == "torch, halfstep"
    assert device_note(BY_OP["einsum"], "cuda") == "halfstep"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softmax", {"softmax.int"}),
        ("pow", {"pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"}),
        ("sum", {"sum", "sum.dim_IntList"}),
        ("conv2d", {"conv2d", "conv2d.padding"}),
        ("cross_entropy", {"cross_entropy_loss"}),
        ("grid_sample", {"grid_sampler"}),
        ("torch.linalg.inv", {"linalg_inv"}),
        ("linalg.inv", {"linalg_inv"}),
        ("fft.rfft", {"fft_rfft"}),
        ("F.gelu", {"gelu"}),
        ("torch.nn.functional.layer_norm", {"layer_norm"}),
        ("torch.Tensor.add", {"add.Tensor", "add.Scalar"}),
        ("svd", {"svd"}),
        ("lstm", {"lstm.input", "lstm.data"}),
    ],
)
def test_a_public_name_finds_its_overloads(name, expected):
    assert set(find(name)) == expected


def test_torch_norm_finds_what_it_calls_in_this_torch():
    assert {"norm.Scalar", "norm.ScalarOpt_dim", "linalg_vector_norm"} <= set(find("norm"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("softmx", "did you mean 'softmax'"),
        ("qqqqqqq", "use the name of a torch function"),
        ("normalize", '"torch.nn.functional:normalize"'),
        ("interpolate", '"torch.nn.functional:interpolate"'),
        ("add_", "writes into its first argument, whose format cannot change; name and call 'add'"),
        ("uniform_", "writes into its first argument"),
        ("reshape", "returns a view"),
        ("zeros", "takes no tensor"),
        ("size", "returns no tensor"),
        ("", "not a torch op"),
    ],
)
def test_a_name_that_cannot_be_cast_is_refused_with_the_reason(name, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        find(name)


def test_every_row_is_found_by_its_name_or_writes_in_place():
    for row in ROWS:
        if not row.op.endswith("_") and row.op != "view_as_complex":  # which gives a view
            assert set(row.overloads) <= set(find(row.op)), row


@pytest.mark.parametrize("low", [BF16, FP16])
def test_o1_acts_by_category(low):
    actions = effective(level("O1", low))
    expected = {"allow": "low", "deny": "full", "promote": "promote", "infer": "pass"}
    for row in ROWS:
        action = BY_CALL.get(row.op, expected[row.category])
        assert {actions[overload] for overload in row.overloads} == {action}
    assert {actions[overload] for overload in AS_WRITTEN} == {"pass", "carry"}
    assert actions["binary_cross_entropy"] == "refuse"


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_low_weights_keep_allow_and_promote_rows_and_full_losses_and_leave_the_rest_as_stored(name):
    actions = effective(level(name, BF16))
    assert actions["linear"] == "low"
    assert actions["index_add"] == "promote"
    assert actions["exp"] == "pass"
    assert {actions[overload] for row in ROWS if row.why == "loss" for overload in row.overloads} == {"full"}
    promoted = level(name, BF16).edit(OpChange("promote", "cross_entropy"))  # the way back
    assert effective(promoted)["cross_entropy_loss"] == "promote"
    assert actions["linalg_inv"] == "full"  # no low kernel
    assert {actions[overload] for overload in NORMS} == {"norm"}
    assert actions["binary_cross_entropy"] == "refuse"


@pytest.mark.parametrize("name", ["O1", "O2"])
def test_a_users_changes_act_fully_at_every_level(name):
    changes = OpChanges(
        allow=("layer_norm",), deny=("gelu", "linear", "softmax"), infer=("exp", "bmm"), promote=("torch.cat",)
    )
    actions = effective(replace(level(name, BF16), op_changes=changes))
    assert actions["layer_norm"] == "low"
    assert actions["gelu"] == actions["linear"] == actions["softmax.int"] == "full"
    assert actions["exp"] == actions["bmm"] == "infer"
    assert actions["cat"] == "promote"


def test_a_changed_function_belongs_to_the_table_under_its_own_name():
    changes = OpChanges(deny=("my_ops:swish",))
    actions = effective(replace(level("O1", BF16), op_changes=changes))
    assert actions["my_ops:swish"] == "full"


def test_a_refused_op_may_be_denied_and_nothing_else():
    plan = level("O1", BF16)
    denied = replace(plan, op_changes=OpChanges(deny=("binary_cross_entropy",)))
    assert effective(denied)["binary_cross_entropy"] == "logits"
    for category in ("allow", "infer", "promote"):
        with pytest.raises(PlanError, match="use binary_cross_entropy_with_logits, or deny it"):
            effective(replace(plan, op_changes=OpChanges(**{category: ("binary_cross_entropy",)})))
