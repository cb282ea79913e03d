"""Loads the simulated CUDA device in each Python that starts with this folder on PYTHONPATH, as gpu.sh's do."""

import sys

if not {"-c", "hatch_build.py", "zipfile"} & {*sys.orig_argv}:  # which need no torch
    from tests.cudasim import build

    build.load()
