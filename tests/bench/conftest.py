"""Workers of benchmarks are forks here: a process of its own takes seconds to start."""

import subprocess

import pytest

from tests import forks


@pytest.fixture
def forked(monkeypatch):
    if forks.HAS_FORKS:
        monkeypatch.setattr(subprocess, "Popen", forks.Forked)
