"""What is taken where the user named no format, or did not say whether to emulate it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.formats import BF16, FP16
from halfstep.machine import (
    AMX_FP16,
    AVX2,
    AVX512_BF16,
    OTHER,
    PROCESSORS,
    DeviceFacts,
    emulation_notice,
    needs_emulation,
)
from halfstep.plan.io import choose_low

CPUS = [pytest.param(DeviceFacts("cpu", processor=row), id=row.name) for row in PROCESSORS]


def cuda(major, minor):
    return DeviceFacts("cuda", capability=(major, minor))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [(cuda(8, 0), BF16), (cuda(9, 0), BF16), (cuda(7, 5), FP16), (cuda(7, 0), FP16), (DeviceFacts("mps"), BF16)],
)
def test_a_format_with_units_is_taken_and_named(facts, expected):
    fmt, notice = choose_low(facts)
    assert fmt is expected
    assert notice.startswith(f"low is not set; using {expected}, which this device computes in hardware (")
    assert "O0" not in notice


@pytest.mark.parametrize("facts", [cuda(6, 1), DeviceFacts("xpu", processor=AMX_FP16)])
def test_elsewhere_bf16_is_taken_and_the_notice_says_that_o0_is_faster(facts):
    fmt, notice = choose_low(facts)
    assert fmt is BF16
    assert notice.endswith("O0 would be faster")


@pytest.mark.parametrize("facts", CPUS)
def test_a_cpu_takes_bf16_and_the_notice_says_whether_it_is_emulated(facts):
    fmt, notice = choose_low(facts)
    assert fmt is BF16
    assert facts.processor.name in notice
    assert "\n" not in notice
    assert ("computed in fp32 and rounded, as a GPU's tensor cores do" in notice) is not (
        facts.processor in (AMX_FP16, AVX512_BF16)
    )


@pytest.mark.parametrize("facts", CPUS)
def test_a_format_is_emulated_on_every_cpu_but_bf16_where_it_was_measured_to_be_fast(facts):
    assert needs_emulation(FP16, facts)
    assert needs_emulation(BF16, facts) is (facts.processor not in (AMX_FP16, AVX512_BF16))


@pytest.mark.parametrize("fmt", [BF16, FP16])
@pytest.mark.parametrize(("gain", "emulated"), [(2.0, False), (1.99, True), (0.02, True), (0.0, True), (None, True)])
def test_products_are_emulated_unless_native_ones_are_twice_as_fast(fmt, gain, emulated):
    measured = replace(AMX_FP16, **{fmt.name: gain})
    assert needs_emulation(fmt, DeviceFacts("cpu", processor=measured)) is emulated


def test_what_is_emulated_says_what_the_processor_lacks():
    avx2 = DeviceFacts("cpu", processor=AVX2)
    assert emulation_notice(BF16, avx2) == (
        "this processor has no bf16 units: products are computed in fp32 and rounded, as a GPU's tensor cores do "
        "(x86 AVX2)"
    )
    assert "has no fp16 units" in emulation_notice(FP16, avx2)
    assert emulation_notice(FP16, DeviceFacts("cpu", processor=AMX_FP16)).startswith(
        "torch makes little of this processor's fp16 units: products"
    )


@pytest.mark.parametrize("facts", [cuda(6, 1), cuda(7, 5), DeviceFacts("mps")])
def test_no_other_device_emulates(facts):
    assert not needs_emulation(FP16, facts)
    assert not needs_emulation(BF16, facts)


class Starts(list):
    def __call__(self, record): ...

    def record(self, record):
        self.append(record)


def opened(sinks=(), **options):
    model = nn.Conv2d(3, 3, 3)
    halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), sinks=sinks, **options).close()


def test_where_no_format_is_named_one_line_says_which_is_taken_and_whether_it_is_emulated(
    each_processor, caplog, said_before
):
    said_before.undo()
    caplog.set_level("INFO", "halfstep")
    starts = Starts()
    opened([starts], plan="O1")
    assert caplog.messages == [choose_low(DeviceFacts("cpu", processor=each_processor))[1]]
    assert [start.emulated for start in starts] == [each_processor not in (AMX_FP16, AVX512_BF16)]


@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
def test_that_a_named_format_is_emulated_is_said_once(low, each_processor, caplog, said_before):
    said_before.undo()
    facts = DeviceFacts("cpu", processor=each_processor)
    starts = Starts()
    for plan in ("O1", "O2", halfstep.level("O2", low)):
        opened([starts], plan=plan, low=low)
    emulated = needs_emulation(low, facts)
    assert [start.emulated for start in starts] == 3 * [emulated]
    assert caplog.messages == [emulation_notice(low, facts)] * emulated


def test_o0_says_nothing_of_emulation(each_processor, caplog, said_before):
    said_before.undo()
    opened(plan="O0")
    opened(plan="O0", low="bf16")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("row", "low", "emulate", "said"),
    [
        (AVX2, "bf16", False, "emulate=False: native bf16 products take about 42 times as long as emulated ones"),
        (AVX2, "fp16", False, "emulate=False: native fp16 products take about 37 times as long as emulated ones"),
        (AVX512_BF16, "bf16", True, "emulate=True: native bf16 products are about 2 times as fast as emulated ones"),
        (AVX512_BF16, "bf16", False, None),
        (AVX2, "bf16", True, None),
        (OTHER, "bf16", False, None),
        (OTHER, "bf16", True, None),
    ],
)
def test_what_the_wish_to_emulate_costs_is_said_once(row, low, emulate, said, on_processor, caplog, said_before):
    said_before.undo()
    on_processor(row)
    starts = Starts()
    for _ in range(2):
        opened([starts], plan="O1", low=low, emulate=emulate)
    assert [start.emulated for start in starts] == 2 * [emulate]
    assert [message.partition(" on this processor")[0] for message in caplog.messages] == (
        [] if said is None else [said]
    )
