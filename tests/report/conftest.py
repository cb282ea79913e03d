"""What tests of pages share: one browser."""

import pytest

from docs.browser import Browser


@pytest.fixture(scope="session")
def browser():
    with Browser() as opened:
        yield opened
