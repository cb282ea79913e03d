import pytest
import torch

from halfstep.formats import BF16, E4M3, E5M2, FP16, FP32, TF32
from halfstep.plan.hardware import (
    DeviceFacts,
    choose_low,
    computes_fast,
    cpu_flags,
    default_emulate,
    default_low,
    needs_emulation,
    read_facts,
    units,
)


def cpu(*flags):
    return DeviceFacts("cpu", flags=frozenset(flags))


def cuda(major, minor):
    return DeviceFacts("cuda", capability=(major, minor))


MPS = DeviceFacts("mps")


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16", "bf16", "sve_bf16"])
def test_each_instruction_set_for_bf16_counts(flag):
    assert units(BF16, cpu(flag)) is not None
    assert units(FP16, cpu(flag)) is None


@pytest.mark.parametrize("flag", ["avx512_fp16", "amx_fp16", "fp16_arith"])
def test_each_instruction_set_for_fp16_counts(flag):
    assert units(FP16, cpu(flag)) is not None
    assert units(BF16, cpu(flag)) is None


@pytest.mark.parametrize("flag", ["avx2", "avx512_f", "amx_tile", "amx_int8", "f16c"])
def test_other_instruction_sets_do_not(flag):
    assert units(BF16, cpu(flag)) is None
    assert units(FP16, cpu(flag)) is None


def test_the_units_are_named():
    assert units(BF16, cpu("avx512_bf16", "avx2")) == "AVX512-BF16"
    assert units(BF16, cuda(9, 0)) == "sm90"


@pytest.mark.parametrize(
    ("fmt", "last_without", "first_with"),
    [
        (FP16, (6, 2), (7, 0)),
        (BF16, (7, 5), (8, 0)),
        (TF32, (7, 5), (8, 0)),
        (E4M3, (8, 6), (8, 9)),
        (E5M2, (8, 6), (8, 9)),
    ],
)
def test_a_gpu_has_units_from_its_first_capability_on(fmt, last_without, first_with):
    assert units(fmt, cuda(*last_without)) is None
    assert units(fmt, cuda(*first_with)) is not None
    assert units(fmt, cuda(10, 0)) is not None


@pytest.mark.parametrize("facts", [cpu(), cuda(5, 2), MPS, DeviceFacts("xpu")])
def test_fp32_is_computed_everywhere(facts):
    assert units(FP32, facts) is not None


def test_apple_silicon_has_both_16_bit_formats_and_no_8_bit_ones():
    assert [units(fmt, MPS) is not None for fmt in (BF16, FP16, E4M3, TF32)] == [True, True, False, False]


def test_nothing_is_claimed_of_an_unknown_device():
    assert units(BF16, DeviceFacts("xpu")) is None


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (cpu("avx512_bf16"), BF16),
        (cpu("amx_bf16", "amx_fp16", "avx512_fp16"), BF16),
        (cpu("bf16", "fp16_arith"), BF16),
        (cuda(8, 0), BF16),
        (cuda(9, 0), BF16),
        (cuda(7, 5), FP16),
        (cuda(7, 0), FP16),
        (MPS, BF16),
    ],
)
def test_a_format_with_units_is_taken_and_named(facts, expected):
    fmt, notice = choose_low(facts)
    assert fmt is expected
    assert notice.startswith(f"low is not given; taking {expected}, which this device computes in hardware (")
    assert "O0" not in notice


@pytest.mark.parametrize("facts", [cpu(), cpu("avx2", "avx512_f"), cpu("fp16_arith"), cuda(6, 1), DeviceFacts("xpu")])
def test_elsewhere_bf16_is_taken_and_the_notice_says_that_o0_is_faster(facts):
    fmt, notice = choose_low(facts)
    assert fmt is BF16
    assert notice.endswith("O0 would be faster")


def test_the_notice_names_the_device():
    assert "cuda sm61" in choose_low(cuda(6, 1))[1]
    assert "(cpu)" in choose_low(cpu())[1]


@pytest.mark.parametrize(
    ("fmt", "facts", "expected"),
    [
        (FP16, cpu(), True),
        (FP16, cpu("avx512_bf16"), True),
        (FP16, cpu("avx512_fp16"), False),
        (FP16, cpu("fp16_arith"), False),
        (BF16, cpu(), False),
        (FP16, cuda(6, 1), False),
        (FP16, MPS, False),
    ],
)
def test_fp16_is_emulated_on_a_cpu_without_units(fmt, facts, expected):
    assert needs_emulation(fmt, facts) is expected


def test_sizes_and_absent_sets_are_no_flags():
    found = cpu_flags(
        {"avx2": True, "amx_bf16": False, "l1d_cache_size": 1, "architecture": "x86_64", "cpu_name": "AMD"}
    )
    assert found == {"avx2"}


def test_torch_still_names_the_flags_of_this_architecture():
    known = torch.cpu.get_capabilities()
    names = {"x86_64": ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"), "aarch64": ("bf16", "fp16_arith")}
    if known["architecture"] not in names:
        pytest.skip(f"no flags are known for {known['architecture']}")
    assert all(isinstance(known[name], bool) for name in names[known["architecture"]])


def test_the_facts_of_this_cpu_are_read():
    facts = read_facts(torch.device("cpu"))
    assert facts.kind == "cpu"
    assert facts.capability is None
    assert facts.flags == cpu_flags(torch.cpu.get_capabilities())


def test_another_kind_of_device_is_read_by_name_alone():
    assert read_facts(torch.device("meta")) == DeviceFacts("meta")


def test_the_questions_about_a_device_are_answered_from_its_facts():
    device, facts = torch.device("cpu"), read_facts(torch.device("cpu"))
    assert default_low(device) == choose_low(facts)
    for fmt in (FP32, BF16, FP16):
        assert computes_fast(fmt, device) is (units(fmt, facts) is not None)
        assert default_emulate(fmt, device) is needs_emulation(fmt, facts)


@pytest.mark.gpu
def test_the_capability_of_a_gpu_is_read():
    facts = read_facts(torch.device("cuda"))
    assert facts == DeviceFacts("cuda", capability=torch.cuda.get_device_capability())
