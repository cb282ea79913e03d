"""The planted faults of blame, met by the guardian: it names the same, or the loss scale comes down and cures them."""

import pytest

from halfstep import NumericsError
from halfstep.explain.diagnose.counter import WINDOW
from tests.diagnose.test_blame_suite import FAULTS, opened

PLANTED = [fault for fault in FAULTS if fault.expect is not None and not fault.stale and not fault.compiled]


@pytest.mark.slow_but("NaN in the input of a checkpoint")
@pytest.mark.filterwarnings(r"ignore:var\(\)")  # of one row, which a fault is about
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_the_guardian_names_what_blame_does(fault):
    session, optimizer, closure = opened(fault)

    def step():
        optimizer.zero_grad()
        session.backward(closure())
        return session.step()

    records, failure = [], None
    try:
        while len(records) < 5 * WINDOW:
            records.append(step())
    except NumericsError as error:
        failure = error
    session.close()
    if failure is None:
        assert (fault.kind, session.plan.scale.kind) == ("scale too high", "dynamic")
        assert not any(bool(record.skipped) for record in records[-3:])
        return
    verdict, text = failure.verdict, str(failure)
    assert (verdict.module, verdict.operator, verdict.phase, verdict.kind) == fault.expect, text
    too_high = verdict.kind == "scale too high"
    assert ("a lower loss scale would not help" in text) != too_high
    assert ("the loss scale is too high" in text) == too_high
