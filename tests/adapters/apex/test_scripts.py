"""Whole scripts in apex form, in five styles of public ones, rewritten; each runs unchanged under the stand-in.

Without apex (`--fp32`) each is plain torch, which is what the numbers are compared with.
"""

from pathlib import Path

import pytest
import torch

from tests.adapters.scripts_in_process import plainly

SCRIPTS = Path(__file__).parent / "scripts"
LEVELS = {  # that a style takes
    "imagenet": ("O0", "O1", "O2", "O3"),
    "dcgan": ("O0", "O1", "O2"),
    "bert": ("O0", "O1", "O2"),
    "seq2seq": ("O0", "O1", "O2"),
    "resume": ("O0", "O1", "O2"),
}
CASES = [(style, level) for style, levels in LEVELS.items() for level in levels]


def ran(style, folder, *arguments, out="out.pt"):
    """Returns what a script saved, which ran as `python` runs it."""
    return plainly(SCRIPTS / f"{style}.py", folder / out, *arguments)


def test_every_script_is_run():
    assert {path.stem for path in SCRIPTS.glob("*.py")} - {"conftest"} == set(LEVELS)


@pytest.mark.parametrize(("style", "level"), CASES)
@pytest.mark.slow_but("fp16-imagenet-O0", "fp16-dcgan-O1", "fp16-resume-O2")
def test_a_script_trains_as_its_fp32_twin(style, level, tmp_path):
    found = ran(style, tmp_path, "--opt-level", level)
    plain = ran(style, tmp_path, "--fp32", out="plain.pt")
    losses, expected = torch.tensor(found["losses"]), torch.tensor(plain["losses"])
    assert losses[-1] < losses[0]
    low = [name for name, value in found["weights"].items() if value.is_floating_point() and value.dtype.itemsize < 4]
    assert [name for name in low if level != "O3" or "running" not in name] == []  # whose batch norms are low
    if level == "O0" and style != "bert":  # whose sums of gradients are scaled on the way
        assert torch.equal(losses, expected)
        assert all(torch.equal(found["weights"][name], value) for name, value in plain["weights"].items())
    else:  # what the low format's roundings add up to in so few steps
        torch.testing.assert_close(losses, expected, rtol=0.1, atol=0.02)
        assert level == "O0" or not torch.equal(losses, expected)


@pytest.mark.slow_but("fp16-O2")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_resumed_script_is_bit_identical_to_one_that_was_not_stopped(level, tmp_path):
    whole = ran("resume", tmp_path, "--opt-level", level, out="whole.pt")
    ran("resume", tmp_path, "--opt-level", level, "--epochs", "2")
    resumed = ran("resume", tmp_path, "--opt-level", level)
    assert resumed["losses"] == whole["losses"]
    assert resumed["amp"] == whole["amp"]
    assert all(torch.equal(resumed["weights"][name], value) for name, value in whole["weights"].items())


@pytest.mark.parametrize("arguments", [("--loss-scale", "128.0"), ("--keep-batchnorm-fp32", "False"), ("-b", "8")])
def test_the_arguments_of_the_imagenet_script_reach_amp(arguments, tmp_path, amp, low):
    found = ran("imagenet", tmp_path, "--opt-level", "O2", "--epochs", "1", *arguments)
    options = amp._amp_state.opt_properties
    assert options.loss_scale == (128.0 if "--loss-scale" in arguments else "dynamic")
    assert options.keep_batchnorm_fp32 is ("False" not in arguments)
    assert found["losses"][0] > 0
