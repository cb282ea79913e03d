"""Stages of a pipeline, with a session in each process: they step, skip, scale and clip together."""

from __future__ import annotations

import pytest

import halfstep
from tests import replicas, stages

SETTINGS = ("O1 fp16", "O2 fp16", "O1 bf16", "O2 bf16 split")


def pooled(folder, slow):
    return {
        **{setting: (stages.scheduled, (setting,)) for setting in SETTINGS},
        "given": (stages.given_by_hand, ()),
        "unknown": (stages.unknown_by_hand, ()),
        "refused": (stages.refused, ()),
    }


def assert_as_alone(found, setting):
    """An overflow in one stage is skipped by all, and norms, clips and scales are those of the whole model."""
    weights, norms, scales = stages.alone(setting)
    if setting.startswith("O1"):  # at O2 gradients of the two small batches are rounded apart
        assert [each[0] for each in found] == weights
    for _, own, own_scales, skipped, said in found:
        assert own[:1] + own[2:] == pytest.approx(norms[:1] + norms[2:], rel=1e-6 if setting.startswith("O1") else 0.01)
        assert own_scales == {str(loss_id): scale for loss_id, scale in scales.items()}
        assert skipped == 1
        assert [spoiled for spoiled, _ in said] == [[], [0], [], []]
    assert [said[1][1] for *_, said in found] == [["a.weight", "a.bias"], []]


@pytest.mark.parametrize("setting", SETTINGS)
def test_stages_of_a_schedule_train_as_the_whole_model_does_alone(found, setting):
    assert_as_alone([each[setting] for each in found], setting)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["FSDP2", "DDP"])
def test_stages_that_are_sharded_or_replicated_train_as_the_whole_model_does_alone(tmp_path, wrap):
    found = replicas.run(tmp_path, 4, {"sharded": (stages.replicated, ("O1 fp16", wrap))})
    _, norms, scales = stages.alone("O1 fp16")
    for at, each in enumerate(found):
        _, own, own_scales, skipped, said = each["sharded"]
        assert own[:1] + own[2:] == pytest.approx(norms[:1] + norms[2:], rel=0.01)
        assert list(own_scales.values()) == list(scales.values())
        assert skipped == 1
        assert said[1][0] == [0, 2]
        assert each["sharded"] == found[at % 2]["sharded"]


def test_a_pipeline_by_hand_is_told_its_group(found):
    assert [each["given"] for each in found] == [[halfstep.level("O1", "fp16").scale.init / 2, True]] * 2


def test_a_stage_in_fp16_that_knows_of_no_other_is_refused(found):
    one, other = (each["unknown"] for each in found)
    assert "scaling() was entered without losses in one of 2 processes" in one
    assert "Pass process_group=" in one
    assert other is None


def test_groups_that_cannot_be_are_refused(found):
    for rank, each in enumerate(found):
        outside, number, unused, lacking = each["refused"]
        assert "expected a torch.distributed.ProcessGroup with this process in it" in outside
        assert f"process_group is {rank}" in number
        assert "process_group has no effect at O0" in unused
        assert f"process_group lacks the processes [{1 - rank}]" in lacking
