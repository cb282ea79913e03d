"""What is taken where the user named no format, or did not say whether to emulate it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import halfstep
from halfstep.formats import BF16, FP16
from halfstep.machine import AMX_FP16, PROCESSORS, DeviceFacts
from halfstep.plan.choose import choose_low, choose_plan, needs_emulation

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
def test_a_cpu_takes_bf16_and_the_notice_says_whether_it_gains_anything(facts):
    fmt, notice = choose_low(facts)
    assert fmt is BF16
    assert facts.processor.name in notice
    assert notice.endswith("O0 would be faster") is not facts.processor.bf16


def test_the_notice_names_the_device():
    assert "cuda sm61" in choose_low(cuda(6, 1))[1]


@pytest.mark.parametrize("facts", CPUS)
def test_fp16_is_emulated_on_every_cpu_and_bf16_on_none(facts):
    assert needs_emulation(FP16, facts)
    assert not needs_emulation(BF16, facts)


def test_a_measurement_would_end_it():
    measured = DeviceFacts("cpu", processor=replace(AMX_FP16, fp16=True))
    assert not needs_emulation(FP16, measured)


@pytest.mark.parametrize("facts", [cuda(6, 1), cuda(7, 5), DeviceFacts("mps")])
def test_no_other_device_emulates(facts):
    assert not needs_emulation(FP16, facts)


@pytest.mark.parametrize("facts", CPUS)
def test_o0_needs_no_format_and_says_nothing(facts):
    assert choose_plan("O0", None, facts)[1] is None
    assert choose_plan("O1", None, facts)[1] == choose_low(facts)[1]
    assert choose_plan("O1", "bf16", facts)[1] is None


def test_a_session_emulates_fp16_on_every_cpu_and_says_of_bf16_what_it_gains(each_processor, caplog):
    model = nn.Conv2d(3, 3, 3)
    session = halfstep.initialize(model, None, "O1")
    assert session.plan.low is BF16
    assert caplog.messages == [choose_low(DeviceFacts("cpu", processor=each_processor))[1]]
    session.close()
    starts = []

    class Kept:
        def __call__(self, record): ...

        def record(self, record):
            starts.append(record)

    halfstep.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="fp16", sinks=[Kept()]).close()
    halfstep.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), "O1", low="fp16", emulate=False, sinks=[Kept()]
    ).close()
    assert [start.emulated for start in starts] == [True, False]
