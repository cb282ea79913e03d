"""Facts of the machine and the commit."""

import shutil
import subprocess

import pytest
import torch

from halfstep.plan.machine import read_machine, source_commit
from halfstep.version import __version__

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed here")


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_it_names_the_processor_and_the_versions():
    machine = read_machine(torch.device("cpu"))
    assert machine.device == "cpu"
    assert machine.processor
    assert machine.cores >= 1
    assert "fp32" in machine.fast
    assert machine.halfstep == __version__


@needs_git
def test_the_commit_says_whether_files_differ_from_it(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one", encoding="utf-8")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    clean = source_commit(tmp_path)
    assert clean is not None
    assert len(clean) == 12
    (tmp_path / "file").write_text("two", encoding="utf-8")
    assert source_commit(tmp_path) == f"{clean}-dirty"


def test_without_git_there_is_no_commit(tmp_path):
    assert source_commit(tmp_path) is None
    assert source_commit(tmp_path / "nowhere") is None
