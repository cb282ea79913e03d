"""Builds the simulated CUDA device, once for each torch; as a pytest plugin (`-p`), loads it before torch is."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"
OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")


def lacking() -> str | None:
    """Returns what this machine lacks for a simulated device, or None."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed"
    if list(Path(found.origin).parent.glob("lib/libtorch_cuda*")):
        return "this torch is built for CUDA, and the simulated device needs a CPU build"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    return None


def built() -> Path:
    """Returns the library, compiled (half a minute) where there is none of these sources and this torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version('torch')} {torch} {OPTIONS}".encode()).hexdigest()[:16]
    made = HERE / "build" / f"device-{key}.so"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        places = [
            f"-I{torch}/include",
            f"-I{torch}/include/torch/csrc/api/include",
            f"-L{torch}/lib",
            f"-Wl,-rpath,{torch}/lib",
        ]
        half = made.with_suffix(".part")
        print("compiling the simulated CUDA device", file=sys.stderr, flush=True)
        subprocess.run(["g++", *OPTIONS, *places, str(SOURCE), "-ltorch_cpu", "-lc10", "-o", str(half)], check=True)
        half.replace(made)
    return made


def load() -> None:
    """Makes torch, which must not have been imported yet, find two simulated CUDA devices."""
    assert "torch" not in sys.modules, "the simulated device must be loaded before torch"
    ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    from tests.cudasim import device

    device.install()


def pytest_load_initial_conftests() -> None:
    """Loads the device before any test is imported."""
    load()


def pytest_configure(config: Any) -> None:
    """Lets pass what the CPU's kernels warn of where the device runs them into results without a shape."""
    config.addinivalue_line("filterwarnings", "ignore:An output with one or more elements was resized")


if __name__ == "__main__":  # exit code 1, with a sentence, where there can be no simulated device
    if (what := lacking()) is not None:
        sys.exit(f"no simulated CUDA device here: {what}")
    built()
