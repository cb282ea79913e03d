"""Rows of one step: as many as it takes, each subject once, under the scale that its elements carry."""

import torch

from halfstep.train.probe.rows import StepRows, Subject, measure


def read(rows):
    return rows.pending(7).read()


def test_there_are_as_many_rows_as_subjects():
    rows = StepRows(None)
    tensors = [torch.full((3,), float(n)) for n in range(300)]
    for t in tensors[:150]:
        rows.add([t], [Subject(f"module{int(t[0])}", "weight", "w")])
    rows.add(tensors[150:], [Subject(f"module{int(t[0])}", "weight", "w") for t in tensors[150:]])
    found = read(rows)
    assert [o.module for o in found] == [f"module{n}" for n in range(300)]
    assert [o.stats for o in found] == [measure(t) for t in tensors]
    assert {o.step for o in found} == {7}


def test_tensors_of_one_subject_and_format_are_counted_together():
    rows, subject = StepRows(None), Subject("module", "activation", "")
    parts = [torch.ones(3), torch.ones(4) * 2, torch.ones(5).half()]
    rows.add(parts, [subject] * 3)
    found = {o.format: o.stats for o in read(rows)}
    assert found == {"fp32": measure(torch.cat(parts[:2])), "fp16": measure(parts[2])}


def test_a_sampled_tensor_and_a_whole_one_become_one_sampled_observation():
    rows, subject = StepRows(64), Subject("module", "activation", "")
    rows.add([torch.ones(1000), torch.ones(10)], [subject] * 2)
    (found,) = read(rows)
    assert (found.stats.count, found.sampled) == (74, True)


def test_scales_are_those_of_the_time_and_equal_ones_are_one():
    rows, scale = StepRows(None), torch.tensor(8.0)
    for value in (8.0, 8.0, 4.0, 8.0):
        if float(scale) != value:
            scale.fill_(value)
        rows.add([torch.ones(2)], [Subject("module", "weight_grad", "w", rows.add_scale(scale))])
    rows.add([torch.ones(5)], [Subject("module", "weight", "w")])
    assert {(o.kind, o.scale): o.stats.count for o in read(rows)} == {
        ("weight_grad", 8.0): 6,
        ("weight_grad", 4.0): 2,
        ("weight", 1.0): 5,
    }


def test_a_step_without_anything_has_no_rows():
    pending = StepRows(None).pending(1)
    assert len(pending) == 0
    assert pending.numbers.arrived()
    assert pending.read() == []
