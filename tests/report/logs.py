"""Logs for the tests of the report: made by the real writer from records with known numbers."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from halfstep.explain.report.log import RunLog
from halfstep.formats import FP16
from halfstep.plan.io import to_dict
from halfstep.plan.levels import level
from halfstep.records import COUNTS, DOUBLES, Observation, SessionStart, StepRecord, TensorStats

START = SessionStart(to_dict(level("O2", FP16)), "cpu", emulated=True)


def step(number, *, skipped=False, scale=1.0, norm=None, loss=None, bad=None):
    norm, loss = (None if v is None else torch.tensor(float(v)) for v in (norm, loss))
    bad = None if bad is None else torch.tensor(bad)
    return StepRecord(number, torch.tensor(skipped), torch.tensor(float(scale)), norm, loss=loss, bad_loss=bad)


def stats(powers, *, zeros=0, infinities=0):
    """Statistics of the values 2^p, `count` of each, for {p: count}."""
    exponents = [0] * 256
    for power, count in powers.items():
        exponents[power + 127] = count
    return counted(
        exponents,
        count=sum(exponents) + zeros + infinities,
        zeros=zeros,
        infinities=infinities,
        total=math.fsum(2.0**p * n for p, n in powers.items()),
        squares=math.fsum(4.0**p * n for p, n in powers.items()),
        amax=max((2.0**p for p in powers), default=0.0),
    )


def counted(exponents, **given):
    """Statistics with this histogram, and 0 for each that is not given."""
    zeros = {**dict.fromkeys(COUNTS, 0), **dict.fromkeys(DOUBLES, 0.0)}
    return TensorStats(**{**zeros, "count": sum(exponents), "exponents": tuple(exponents), **given})


def seen(number, module, powers, *, kind="weight_grad", scale=1.0, fmt="fp32", zeros=0, infinities=0, sampled=False):
    found = stats(powers, zeros=zeros, infinities=infinities)
    return Observation(number, module, kind, "weight", fmt, float(scale), found, sampled)


def write(path: Path, records: Iterable[object]) -> Path:
    with RunLog(path) as log:
        for record in records:
            log(record) if isinstance(record, StepRecord) else log.record(record)
    return path
