"""Gradients under DistributedDataParallel with low weights are summed in fp32, over processes and backward passes."""

import pytest

from tests import wide


def pooled(folder, slow):
    return {name: case for name, case in wide.CASES.items() if slow or name != "compiled"}


@pytest.mark.parametrize("how", ["once", "each time"])
@pytest.mark.parametrize("way", [*wide.WAYS, *wide.STATIC])
def test_small_gradients_reach_a_large_sum(way, how, found):
    if (way, how) == ("static", "once"):
        pytest.skip("torch's static_graph wants its first pass reduced")
    large, small = (384.0, 768.0), (1.5, 3.0)  # 256 and 512, to which bf16 adds no 1 and no 2; half of it is low's 2
    if way != "own hook":
        large = (264.0 + 528.0) / 2, (528.0 + 1056.0) / 2
    assert [each[f"{way}, {how}"] for each in found] == [[[[x] for x in large], [[x] for x in small]]] * 2


def test_six_hundred_gradients_of_one_sum_to_six_hundred(found):
    assert [each["600"][0] for each in found] == [[[(600.0 + 1200.0) / 2], [1800.0]]] * 2


def test_gradients_of_weights_that_the_reduced_pass_does_not_use(found):
    assert [each["unused late"] for each in found] == [[[3.0], [3.0]]] * 2
    assert [each["unused after"] for each in found] == [[[3.0], [3.0]]] * 2


def test_passes_that_are_reduced_and_passes_that_are_not_take_turns(found):
    assert [each["by turns"] for each in found] == [[[4 * 1.5], [4 * 3.0]]] * 2


def test_passes_that_nobody_reduces_add_up_in_each_process(found):
    assert [each["never"] for each in found] == [[[257.0], [2.0]], [[513.0], [2.0]]]


def test_a_sum_beyond_fp16_has_a_mean_within(found):
    assert [each["large"] for each in found] == [[[14000.0], [2.0]]] * 2  # times the loss scale of 4


@pytest.mark.parametrize(("name", "last"), [("join", 1.5), ("join by present", 3.0)])
def test_a_process_without_data_counts_as_join_says(name, last, found):
    together = [[2.0], [2.0]]
    assert [each[name] for each in found] == [[together], [together, [[last], [last]]]]


def test_a_pass_that_raises_leaves_what_was_held(found):
    assert [each["broken"] for each in found] == [[[[257.0], [257.0]], [[258.0], [258.0]]]] * 2


def test_as_many_bytes_travel_as_an_all_reduce_sends(found):
    weights, norms = 2 * 10, 4 * 10  # bytes
    for each in found:
        assert sorted(each["wire"]) == [
            ["c10d::allgather_", weights // 2 + weights],
            ["c10d::allreduce_", norms],
            ["c10d::alltoall_base_", 2 * weights],
        ]


def test_copies_of_a_wrapper_reduce_as_torch_does(found):
    assert [each["copied"] for each in found] == [[[1.5], [1.5]]] * 2


@pytest.mark.slow
def test_compiled_wrappers(found):
    assert [each["compiled"] for each in found] == [[[3.0], [6.0]]] * 2
