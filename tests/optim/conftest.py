"""One thread, as many small parallel regions wait for each other on a busy machine; some tests ask for two."""

import pytest


@pytest.fixture(autouse=True)
def each_on_one_thread(one_thread):
    """Has every test of the folder run on one thread."""
