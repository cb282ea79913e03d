"""Every test runs with the stand-in apex in place, once for each low format."""

import importlib

import pytest
import torch

from halfstep.adapters.apex import install, uninstall


@pytest.fixture(autouse=True, params=["fp16", "bf16"])
def low(request):
    install(low=request.param)
    yield {"fp16": torch.float16, "bf16": torch.bfloat16}[request.param]
    uninstall()


@pytest.fixture
def amp(low):
    return importlib.import_module("apex.amp")
