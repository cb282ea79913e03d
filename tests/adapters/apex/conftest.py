"""Every test runs with the stand-in apex in place, once for each low format."""

import importlib
import inspect

import pytest
import torch

from halfstep.adapters.apex import install, uninstall


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Marks the second format as slow for tests that do not ask which one it is."""
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if given.get("low") == "bf16" and "low" not in inspect.signature(item.function).parameters:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, params=["fp16", "bf16"])
def low(request):
    install(low=request.param)
    yield {"fp16": torch.float16, "bf16": torch.bfloat16}[request.param]
    uninstall()


@pytest.fixture
def amp(low):
    return importlib.import_module("apex.amp")
