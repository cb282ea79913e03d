"""Loops of a device whose package is missing or broken: one notice, and the next implementation."""

import importlib
import types

import pytest
import torch

from halfstep.train.kernels import devices

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_memory():
    devices.triton_kernels.cache_clear()
    yield
    devices.triton_kernels.cache_clear()


def replace_import(monkeypatch, found):
    def import_module(name):
        assert name == "halfstep.train.kernels.triton"
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(importlib, "import_module", import_module)


def failing(grads, scratch):
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ModuleNotFoundError("No module named 'triton'"), "No module named 'triton'"),
        (types.SimpleNamespace(read=failing), "RuntimeError: Failed to find C compiler"),
    ],
)
def test_what_does_not_run_is_said_once_and_left_out(monkeypatch, caplog, found, said):
    replace_import(monkeypatch, found)
    assert devices.triton_kernels(CPU) is None
    assert devices.triton_kernels(CPU) is None
    assert len(caplog.records) == 1
    assert said in caplog.text


def test_what_runs_is_used(monkeypatch, caplog):
    kernels = types.SimpleNamespace(read=lambda grads, scratch: None)
    replace_import(monkeypatch, kernels)
    assert devices.triton_kernels(CPU) is kernels
    assert caplog.records == []


def test_nothing_is_imported_for_tensors_on_a_cpu(monkeypatch):
    replace_import(monkeypatch, AssertionError("imported"))
    weight = torch.zeros(3)
    assert devices.triton_on(CPU) is None
    assert not devices.triton_can_read([weight])
    assert not devices.triton_can_read([])
