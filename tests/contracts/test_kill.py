"""Killed with SIGKILL at random steps and restarted from the last checkpoint: bit-identical to an uninterrupted run."""

import random
import sys

import pytest
import torch

from tests import forks
from tests.contracts.cases import bits, differing
from tests.contracts.killable import run


def start_process(*arguments):
    program = "from tests.contracts.killable import main; main()"
    return forks.Forked([sys.executable, "-c", program, *arguments, torch.get_num_threads()], text=True)


def kill_and_resume(name, low, folder, steps, moments, kills):
    """Kills the run `kills` times at random steps, then lets it end here."""
    chance = random.Random(f"{name}{low}{kills}")
    for _ in range(kills):
        with start_process(name, low, folder, steps, moments) as process:
            for _ in range(chance.randint(1, 8)):
                assert int(process.stdout.readline()) < steps
                print(file=process.stdin, flush=True)
            process.kill()
        assert process.returncode == -9, "the run ended before it could be killed"
    run(name, low, folder, steps, moments)


def compare(name, low, tmp_path, kills, moments="full"):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    steps = 20 + 10 * kills  # a process makes at most 9 before it is killed
    run(name, low, tmp_path / "whole", steps, moments)
    kill_and_resume(name, low, tmp_path / "killed", steps, moments, kills)
    whole, resumed = (torch.load(tmp_path / which / "end.pt") for which in ("whole", "killed"))
    assert torch.equal(bits(whole["curve"]), bits(resumed["curve"]))
    assert len(whole["curve"]) == steps
    assert differing(whole["end"], resumed["end"]) == []


@pytest.mark.parametrize(("name", "low"), [pytest.param("O1", "fp16", marks=pytest.mark.slow), ("O2", "bf16")])
def test_killed_once_the_run_ends_as_if_it_had_not_been(name, low, tmp_path):
    compare(name, low, tmp_path, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "low", "moments"), [("O2", "bf16", "8bit"), ("O3", "bf16", "bf16")])
def test_killed_three_times_codes_of_moments_resume(name, low, moments, tmp_path):
    compare(name, low, tmp_path, kills=3, moments=moments)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "low"), [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")])
def test_killed_twenty_times_the_run_ends_as_if_it_had_not_been(name, low, tmp_path):
    compare(name, low, tmp_path, kills=20)
