"""One thread, as many small parallel regions wait for each other on a busy machine; some tests ask for two."""

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    """Every test of this folder."""
