"""The global norm against float64, and the exactness of the test for non-finite elements."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.train.scale import norm
from halfstep.train.scale.norm import _one_pass, read_with_torch
from tests.scale.reads import global_norm
from tests.scale.sync import NoSync, no_cuda_sync

LONG = 2**16 + 1  # longer than one piece of the sum


def reference(grads):
    squares = [grad.to_dense().to(torch.complex128).abs().square().sum() for grad in grads]
    return math.sqrt(float(torch.stack(squares).sum()))


def found(*grads):
    return bool(global_norm(grads)[1])


@pytest.fixture(scope="class", params=list(norm.READERS), autouse=True)
def first_reader(request):
    """Has each test run with every reader that comes after those before it: compiled loops, then torch operations."""
    names = list(norm.READERS)
    kept = names[names.index(request.param) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "READERS", {name: norm.READERS[name] for name in kept})
        yield


class TestNorm:
    def test_three_four_five_over_two_tensors(self):
        norm, _ = global_norm([torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])])
        assert (norm.item(), norm.dtype, norm.shape) == (5.0, torch.float32, ())

    def test_mixed_dtypes(self):
        grads = [
            torch.tensor([1.0]),
            torch.tensor([2.0], dtype=torch.bfloat16),
            torch.tensor([4.0], dtype=torch.float16),
            torch.tensor([10.0], dtype=torch.float64),
            torch.tensor([3.0 + 6.0j]),
        ]
        assert global_norm(grads)[0].item() == pytest.approx(math.sqrt(1 + 4 + 16 + 100 + 45), rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_long_tensors_are_summed_accurately(self, dtype):
        grads = [torch.randn(3 * LONG).to(dtype), torch.randn(7, 5).to(dtype)]
        assert global_norm(grads)[0].item() == pytest.approx(reference(grads), rel=1e-5)

    def test_a_very_long_tensor_is_as_accurate_where_a_plain_norm_is_not(self):
        grad = torch.full((2**24,), 1.1)
        wanted = pytest.approx(4096 * 1.1, rel=1e-4)
        assert torch.linalg.vector_norm(grad).item() != wanted
        assert global_norm([grad])[0].item() == wanted

    def test_a_low_norm_is_not_rounded_to_the_low_format(self):
        # 256 ones and one more: sqrt(257) lies between two bf16 numbers 0.125 apart.
        assert global_norm([torch.ones(257, dtype=torch.bfloat16)])[0].item() == pytest.approx(math.sqrt(257), rel=1e-5)

    def test_fp16_norm_beyond_the_fp16_maximum(self):
        norm, overflowed = global_norm([torch.full((4,), 60000.0, dtype=torch.float16)])
        assert norm.item() == pytest.approx(119968.0, rel=1e-3)
        assert not overflowed

    def test_duplicate_indices_of_a_sparse_gradient_are_summed_first(self):
        grad = torch.sparse_coo_tensor([[1, 1, 0]], torch.tensor([[1.0], [2.0], [4.0]]), (3, 1), check_invariants=True)
        assert global_norm([grad])[0].item() == 5

    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t.t(),
            lambda t: t[::2],
            lambda t: t[:, ::3],
            lambda t: t.view(100, 8, 15, 10).to(memory_format=torch.channels_last),
        ],
    )
    def test_non_contiguous_gradients(self, view):
        grad = view(torch.randn(300, 400))
        assert global_norm([grad])[0].item() == pytest.approx(reference([grad]), rel=1e-5)

    def test_empty_tensors_and_no_tensors_are_zero(self):
        assert global_norm([torch.empty(0), torch.tensor([2.0])])[0].item() == 2
        assert [t.item() for t in global_norm([torch.empty(0, 3)])] == [0.0, False]
        assert [t.item() for t in global_norm([])] == [0.0, False]

    def test_squares_that_underflow_do_not_make_the_norm_zero(self):
        assert global_norm([torch.tensor([1e-30, 0.0, 1e-31])])[0].item() == pytest.approx(1.005e-30, rel=6e-3, abs=0)

    def test_one_element_whose_square_overflows_has_its_own_norm(self):
        assert global_norm([torch.tensor([-1e30])])[0].item() == pytest.approx(1e30)

    @pytest.mark.parametrize("unit", [1e-44, 1e-38, 1e-25, 1e-19, 1.0, 1e18, 1e30, 1e37])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_torch_operations_give_the_norm_at_every_magnitude(self, dtype, unit):
        grads = [torch.tensor([3.0, 0.0, -4.0, 12.0], dtype=torch.float64).mul(unit).to(dtype), torch.zeros(5)]
        norm, bad, _ = read_with_torch(grads)
        assert norm.item() == pytest.approx(reference(grads), rel=1e-6, abs=2e-45)
        assert not bad

    def test_the_float64_sum_of_squares_is_exact_there(self):
        norms, finite = _one_pass([torch.tensor([3e30, 4e30]), torch.tensor([12e30])], torch.float32)
        assert norms.tolist() == pytest.approx([5e30, 12e30])
        assert finite.tolist() == [True, True]

    def test_a_graph_is_not_built(self):
        assert not global_norm([torch.ones(2, requires_grad=True)])[0].requires_grad


class TestFound:
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("place", [0, LONG - 2, LONG - 1, 2 * LONG - 1])
    def test_one_bad_element_is_found_wherever_it_is(self, bad, dtype, place):
        grad = torch.zeros(2 * LONG, dtype=dtype)
        assert not found(grad)
        grad[place] = bad
        assert found(torch.ones(3, dtype=dtype), grad)
        assert found(grad.view(2, -1).t())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_the_largest_finite_numbers_do_not_count(self, dtype):
        largest = torch.finfo(dtype).max
        assert not found(torch.full((2 * LONG,), largest, dtype=dtype))
        assert not found(torch.full((3,), -largest, dtype=dtype))

    def test_fp32_squares_that_overflow_do_not_count_but_would_in_a_plain_norm(self):
        grads = [torch.full((1000,), 1e25)]
        assert torch.linalg.vector_norm(grads[0]).isinf()
        assert not found(*grads)

    def test_complex_parts_count(self):
        assert found(torch.tensor([complex(0.0, math.inf)]))
        assert not found(torch.tensor([1j]))

    def test_sparse_values_count(self):
        indices = [[0, 2]]
        assert found(torch.sparse_coo_tensor(indices, torch.tensor([1.0, math.nan]), (4,), check_invariants=True))
        assert not found(torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (4,), check_invariants=True))

    def test_finite_fp16_duplicates_whose_sum_exceeds_fp16_do_not_count(self):
        values = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
        assert not found(torch.sparse_coo_tensor([[1, 1]], values, (4,), check_invariants=True))

    @pytest.mark.slow_but("native")
    @settings(max_examples=100)
    @given(st.lists(st.floats(width=32), min_size=1, max_size=6))
    def test_equals_a_loop_in_python(self, numbers):
        assert found(torch.tensor(numbers)) == (not all(math.isfinite(number) for number in numbers))


def test_nothing_syncs():
    with NoSync():
        global_norm([torch.randn(LONG), torch.randn(3, dtype=torch.bfloat16), torch.tensor([1j])])


@pytest.mark.gpu
class TestCuda:
    def test_equals_the_cpu(self):
        grads = [torch.randn(5, 7), torch.randn(LONG).bfloat16(), torch.randn(LONG).half(), torch.randn(4).double()]
        norm, bad = global_norm([grad.cuda() for grad in grads])
        assert norm.is_cuda
        assert norm.item() == pytest.approx(reference(grads), rel=1e-5)
        assert not bad

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_found_is_exact(self, dtype):
        grad = torch.full((LONG,), torch.finfo(dtype).max, dtype=dtype, device="cuda")
        assert not found(grad)
        grad[LONG - 1] = math.nan
        assert found(grad)

    def test_squares_beyond_fp32_give_the_exact_norm(self):
        assert global_norm([torch.tensor([3e30, 4e30], device="cuda")])[0].item() == pytest.approx(5e30)

    def test_two_devices(self):
        norm, bad = global_norm([torch.tensor([3.0], device="cuda"), torch.tensor([4.0])])
        assert (norm.item(), bad.item(), norm.is_cuda) == (5.0, False, True)

    def test_nothing_waits(self):
        grads = [torch.randn(LONG, device="cuda"), torch.randn(3, device="cuda").bfloat16()]
        with no_cuda_sync():
            global_norm(grads)
