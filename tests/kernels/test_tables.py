"""Tables of numbers that launches read: kept from step to step, and for good where a CUDA graph reads them."""

from array import array

import pytest
import torch

from halfstep.train.kernels.batch import _MOST_KEPT, Scratch
from halfstep.train.kernels.devices import Launches, Tables, addresses, block_ends, filled

CPU = torch.device("cpu")


def row(*numbers):
    return array("q", numbers)


def of(*numbers):
    return bytes(row(*numbers))


@pytest.fixture
def scratch():
    return Scratch()


def capturing(scratch):
    tables = Tables(CPU, scratch)
    tables._captured = True  # as under torch.cuda.graph, which a CPU does not have
    return tables


def test_rows_come_one_after_the_other(scratch):
    table = Tables(CPU, scratch).numbers(of(1, 2, 3, 2**62))
    assert table.tolist() == [1, 2, 3, 2**62]
    assert table.dtype is torch.int64


def test_equal_numbers_are_one_table_and_others_another(scratch):
    first = Tables(CPU, scratch).numbers(of(1, 2))
    assert Tables(CPU, scratch).numbers(of(1, 2)) is first
    assert Tables(CPU, scratch).numbers(of(1, 3)).tolist() == [1, 3]


def test_each_block_has_its_tensor_and_empty_tensors_have_none(scratch):
    ends = block_ends([0, 9, 0, 4, 5, 0], 4)
    assert list(ends) == [0, 3, 3, 4, 6, 6]
    owners = Tables(CPU, scratch).owners(ends)
    assert owners.tolist() == [1, 1, 1, 3, 4, 4]
    assert owners.dtype is torch.int32


def test_a_table_of_numbers_is_no_table_of_owners(scratch):
    ends = row(1, 3)
    assert Tables(CPU, scratch).numbers(bytes(ends)).tolist() == [1, 3]
    assert Tables(CPU, scratch).owners(ends).tolist() == [0, 1, 1]


def test_what_a_capture_makes_is_not_kept_for_others(scratch):
    made = capturing(scratch).numbers(of(5))
    assert made.tolist() == [5]
    assert Tables(CPU, scratch).numbers(of(5)) is not made


def test_what_a_capture_reads_stays_for_good(scratch):
    held = Tables(CPU, scratch).numbers(of(5))
    assert capturing(scratch).numbers(of(5)) is held
    for number in range(2 * _MOST_KEPT):
        Tables(CPU, scratch).numbers(of(100 + number))
    assert len(scratch._kept) == _MOST_KEPT
    assert Tables(CPU, scratch).numbers(of(5)) is not held  # forgotten for others
    assert any(tensor is held for tensor in scratch._in_graphs)


def test_what_is_asked_for_in_every_step_is_not_forgotten(scratch):
    held = Tables(CPU, scratch).numbers(of(5))
    for number in range(2 * _MOST_KEPT):
        Tables(CPU, scratch).numbers(of(100 + number))
        assert Tables(CPU, scratch).numbers(of(5)) is held


def test_numbers_come_without_a_copy_from_the_host_as_they_are():
    numbers = [0, 1, -1, 2**62, -(2**63), 2**63 - 1]
    assert filled(numbers, CPU).tolist() == numbers


def test_launches_have_gradients_of_one_kind_and_alignment_and_are_made_once_where_all_is_aligned():
    flat = torch.zeros(64)
    weights = [flat[:8], flat[9:12], flat[16:20], flat[24:28]]
    grads = [torch.zeros(8), torch.zeros(3), torch.zeros(4).half(), torch.zeros(4)]
    rows = [[t.numel() for t in grads], addresses(weights)]
    launches = Launches(grads, 4, rows, [addresses(weights), []])
    found = launches.of(addresses(grads))
    kinds = [(launch.places, launch.kind, launch.aligned) for launch in found]
    assert kinds == [([0, 3], "fp32", True), ([1], "fp32", False), ([2], "fp16", True)]
    assert found[0].table == of(0, 2, 8, 4, weights[0].data_ptr(), weights[3].data_ptr())
    assert list(found[0].ends) == [2, 3]
    assert list(found[0].pick([10, 11, 12, 13])) == [10, 13]
    assert list(found[0].pick([])) == [0, 0]
    assert launches.of(addresses(grads)) is not found
    aligned = Launches(grads, 4, rows)
    assert aligned.of(addresses(grads)) is aligned.of([0, 16, 32, 48])
    moved = aligned.of([0, 16, 32, 52])
    assert [launch.places for launch in moved] == [[0, 1], [2], [3]]
