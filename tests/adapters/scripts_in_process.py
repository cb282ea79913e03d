"""Runs scripts in this process, plainly and under `halfstep run`, and compares what they wrote."""

import runpy
import sys

import torch

from halfstep.adapters.script.run import run


def plainly(path, out, *arguments):
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), str(out), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    return torch.load(out)


def converted(path, out, level="O1", low="bf16", **settings):
    """Returns what a script wrote, and how it ran."""
    ran = []
    run(str(path), [str(out)], plan=level, low=low, ended=ran.append, **settings)
    return torch.load(out), ran[0]


def flat(value, name=""):
    """Yields everything in a checkpoint with its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}")
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from flat(each, f"{name}[{place}]")
    else:
        yield name, value


def differing(one, other):
    """Returns where two checkpoints are not the same in every bit."""
    one, other = dict(flat(one)), dict(flat(other))
    assert one.keys() == other.keys()

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return a == b or (a != a and b != b)  # NaN is a loss of a scale that was too high

    return [name for name in one if not same(one[name], other[name])]


def writes(tmp_path, text, name="script.py"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path
