"""Triton's kernels against the eager reference: in Triton's interpreter on a CPU, and on a CUDA device.

The interpreter runs in a process of its own, as Triton asks for it when it is imported.
"""

import importlib.util
import itertools
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from halfstep.train.kernels.batch import Batch, Scratch
from halfstep.train.optim.implementations import update
from tests import forks
from tests.kernels import triton_cases as cases
from tests.kernels.triton_cases import KEPT, MATRIX, OPTIONS, STORAGES
from tests.scale.reads import global_norm

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# Every option, and under each of the three kernels every storage.
KERNELS = {"adam": ("adam",), "sgd": ("sgd", "lion"), "whole": ("lamb", "novograd")}
NAMES = {kernel: [o for o in OPTIONS if cases.row_of(OPTIONS[o]).triton in laws] for kernel, laws in KERNELS.items()}
PLAIN = [storage for storage in STORAGES if storage not in KEPT]
SOME = [case for names in NAMES.values() for case in zip(itertools.cycle(names), PLAIN, strict=False)]
SOME += [("adam", "split-8bit"), ("sgd-nesterov", "low-rounded-8bit"), ("lion-decay-maximize", "copy-fp16")]
STEPS, FEW = 50, 3  # of each seven the first and the fourth are skipped


def started(begin, method):
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
        pool.submit(os._exit, 0)  # torch takes seconds to take itself apart


@pytest.fixture(scope="module")
def interpreted():
    yield from started(cases.interpret, "spawn")  # Triton has yet to be imported there


@pytest.fixture(scope="module")
def compiler():
    yield from started(cases.compile_only, forks.METHOD)


def test_the_cases_of_every_run_have_every_option_and_storage():
    assert {options for options, _ in SOME} == set(OPTIONS)
    assert {storage for _, storage in SOME} >= set(PLAIN)


@pytest.mark.parametrize(("options", "storage"), SOME)
def test_the_update_is_the_references_bit_for_bit(interpreted, options, storage):
    assert interpreted(cases.compare, options, storage, FEW) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("options", "storage"), MATRIX)
def test_the_update_is_the_references_bit_for_bit_everywhere(interpreted, options, storage):
    assert interpreted(cases.compare, options, storage, STEPS) == 0


@pytest.mark.gpu
@pytest.mark.silicon  # the interpreter has the same rows
@pytest.mark.parametrize(("options", "storage"), MATRIX)
def test_the_update_on_cuda_is_the_references(options, storage):
    assert 0 <= cases.compare(options, storage, STEPS, "cuda") <= 1


@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
@pytest.mark.slow_but("O2-bf16")
def test_a_session_under_the_kernels_is_one_under_the_reference_bit_for_bit(interpreted, name, low):
    assert interpreted(cases.sessions_differ, name, low) == []


SKIPS = [
    ("adam", "split-8bit"),
    ("sgd-momentum", "low-rounded-8bit"),
    ("adamw-amsgrad-maximize", "split"),
    ("sgd-nesterov", "copy-fp16"),
    ("adam", "full"),
    ("sgd", "low-bf16"),
    ("lamb", "split"),
    ("novograd", "low-rounded"),
]


@pytest.mark.parametrize(("options", "storage"), SKIPS)
def test_a_skip_changes_no_bit(interpreted, options, storage):
    assert interpreted(cases.skip_changes_nothing, options, storage)


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "storage"), SKIPS)
def test_a_skip_on_cuda_changes_no_bit(options, storage):
    assert cases.skip_changes_nothing(options, storage, "cuda")


NAN_STORAGES = ["split-full-gradients", "copy-bf16", "low-bf16"]


@pytest.mark.parametrize("storage", NAN_STORAGES)
def test_a_nan_is_stored_as_a_nan_with_the_bits_of_the_reference(interpreted, storage):
    assert interpreted(cases.nans_stored_alike, storage)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", NAN_STORAGES)
def test_a_nan_on_cuda_is_stored_as_a_nan_with_the_bits_of_the_reference(storage):
    assert cases.nans_stored_alike(storage, "cuda")


CASTS = [("fp8", "output"), ("fp8", "grad_input"), ("fp8-row", "output"), ("fp8-mx", "output")]


@pytest.mark.parametrize(("name", "product"), CASTS)
def test_casts_to_8_bits_are_those_of_the_law_and_so_are_their_transposes(interpreted, name, product):
    assert interpreted(cases.casts_differ, name, product) == []


@pytest.mark.gpu
@pytest.mark.silicon  # the interpreter has the same rows, and warns of casts of NaN to integers
@pytest.mark.parametrize(("name", "product"), CASTS)
def test_casts_to_8_bits_on_cuda_are_those_of_the_law(name, product):
    assert cases.casts_differ(name, product, "cuda") == []


LARGEST = torch.finfo(torch.float32).max
READS = {
    "mixed": [torch.randn(5000), torch.randn(7, 9).bfloat16(), torch.randn(3).half(), torch.randn(41)],
    "empty": [torch.zeros(0), torch.full((3, 0), 1.0).bfloat16(), torch.zeros(0)],
    "zeros": [torch.zeros(4097), torch.zeros(1)],
    "squares overflow": [torch.full((3,), 1e30), torch.tensor([LARGEST / 2, -LARGEST / 2]), torch.tensor([1.0])],
    "squares underflow": [torch.full((4100,), 1e-30), torch.tensor([1e-45, 3e-39])],
    "largest of fp16": [torch.full((4096,), 65504.0, dtype=torch.float16), torch.ones(2)],
    "not dense": [torch.randn(2, 3, 4, 4).transpose(1, 3), torch.tensor(2.0).expand(5, 3), torch.randn(6, 8)[:, ::2]],
}
BAD = {
    "infinity": ([torch.ones(5000), torch.tensor([1.0, float("inf")]), torch.ones(9)], [False, True, False]),
    "minus infinity": ([torch.tensor([-float("inf")] * 2).half(), torch.ones(3)], [True, False]),
    "nan": ([torch.ones(3), torch.full((4097,), float("nan")).bfloat16()], [False, True]),
    "last of a block": ([torch.cat([torch.ones(4095), torch.tensor([float("nan")])]), torch.ones(2)], [True, False]),
    "first of the next": ([torch.cat([torch.ones(4096), torch.tensor([float("inf")])]), torch.ones(2)], [True, False]),
}


def expected_norm(tensors):
    """In float64, whose squares neither overflow nor underflow here."""
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors))


def check_read(run, name):
    norm, found, flags, same = run(cases.read, READS[name])
    assert norm == pytest.approx(expected_norm(READS[name]), rel=1e-6)
    assert same
    assert not found
    assert not any(flags)
    assert norm == pytest.approx(float(global_norm(READS[name])[0]), rel=1e-5)


@pytest.mark.parametrize("name", READS)
def test_the_read_pass_gives_the_norm(interpreted, name):
    check_read(interpreted, name)


@pytest.mark.parametrize("name", BAD)
def test_the_read_pass_names_what_is_not_finite(interpreted, name):
    tensors, bad = BAD[name]
    norm, found, flags, same = interpreted(cases.read, tensors)
    assert found
    assert flags == bad
    assert not math.isfinite(norm)
    assert same


def test_norm_skip_and_factor_of_a_step_have_the_bits_of_torch_operations(interpreted):
    for tensors in (READS["mixed"], READS["empty"], BAD["infinity"][0], BAD["nan"][0]):
        assert interpreted(cases.judged_differ, tensors) == []


def on_cuda(function, *args):
    return function(*args, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", READS)
def test_the_read_pass_on_cuda_gives_the_norm(name):
    check_read(on_cuda, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD)
def test_the_read_pass_on_cuda_names_what_is_not_finite(name):
    tensors, bad = BAD[name]
    assert on_cuda(cases.read, tensors)[1:3] == (True, bad)


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", [READS["mixed"], BAD["infinity"][0], BAD["nan"][0]])
def test_norm_skip_and_factor_on_cuda_have_the_bits_of_torch_operations(tensors):
    assert on_cuda(cases.judged_differ, tensors) == []


ADAM, SGD = OPTIONS["adamw"], OPTIONS["sgd-nesterov"]


@pytest.mark.slow
def test_what_a_scheduler_changes_compiles_nothing(compiler):
    adams = [
        {**ADAM, "lr": lr, "weight_decay": decay, "betas": (beta, 1 - (1 - beta) / 10), "eps": eps}
        for lr, decay, beta, eps in [
            (1e-3, 0.0, 0.9, 1e-8),
            (0, 0.1, 0.0, 1e-7),
            (1, 1, 0.5, 1.0),
            (3e-4, 2e-2, 0.95, 0),
        ]
    ]
    sgds = [
        {**SGD, "lr": lr, "momentum": m, "weight_decay": w} for lr, m, w in [(0.1, 0.9, 0), (0, 0.5, 1e-4), (1, 1, 1)]
    ]
    variants = compiler(cases.compiled, [*adams, *sgds])
    assert {name: len(ptx) for name, ptx in variants.items()} == {
        "_corrections_kernel": 1,
        "_adam_kernel": 1,
        "_sgd_kernel": 1,
        "_read_kernel": 1,
        "_judge_kernel": 1,
    }


@pytest.mark.slow
def test_what_changes_the_structure_compiles_anew(compiler):
    variants = compiler(cases.compiled, [ADAM, {**ADAM, "amsgrad": True}, {**ADAM, "maximize": True}])
    assert len(variants["_adam_kernel"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_every_option_compiles_with_every_operation_rounded(compiler, storage):
    for options in [OPTIONS[name] for name, each in MATRIX if each == storage]:
        variants = compiler(cases.compiled, [options], storage)
        assert {"_sgd_kernel", "_adam_kernel", "_whole_kernel"} & variants.keys()
        assert not any(
            text in ptx for found in variants.values() for ptx in found for text in ("fma.", ".ftz", ".approx")
        )


@pytest.mark.parametrize("options", ["sgd-momentum", "lion", "adamw"])
def test_the_end_of_a_tensor_whose_indices_do_not_fit_in_32_bits_is_updated_and_read(interpreted, options):
    assert interpreted(cases.far_ends_differ, options) == []


BEYOND_INT32 = 2**31 + 5000


@pytest.mark.gpu
def test_a_tensor_of_more_elements_than_an_int32_counts_is_updated_and_read_to_its_end():
    from halfstep.train.kernels import triton as kernels

    if torch.cuda.get_device_properties(0).total_memory < 20 * 2**30:
        pytest.skip("needs 20 GB of GPU memory")
    weight = torch.ones(BEYOND_INT32, dtype=torch.bfloat16, device="cuda")
    grad = torch.zeros_like(weight)
    grad[-1] = grad[2**31] = grad[2**31 - 1] = 1.0
    table = {"triton": cases.implementation()}
    good = torch.tensor(False, device="cuda")
    options = {**OPTIONS["sgd"], "lr": 0.5}
    update(cases.row_of(options), Batch("low", [weight], [], [grad]), options, None, good, Scratch(), table)
    assert [float(weight[i]) for i in (-1, 2**31, 2**31 - 1, 0, -2)] == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert float(kernels.read([grad])[0]) == pytest.approx(math.sqrt(3))
    grad[-1] = float("inf")
    assert kernels.read([grad])[2].tolist() == [True]
