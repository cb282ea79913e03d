"""Fixtures of the tests of casts."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Runs a test on one thread: for tensors this small, a second one only spins on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
