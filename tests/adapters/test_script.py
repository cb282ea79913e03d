"""`halfstep run`: scripts with no mixed precision in them, as people write them, trained under a plan."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from halfstep.adapters.script.run import run
from halfstep.errors import SetupError

SCRIPTS = Path(__file__).parent / "scripts"
STYLES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "conftest")
LEVELS = [("O1", "bf16"), ("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")]


def plainly(path, out):
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), str(out)]
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
        return a == b

    return [name for name in one if not same(one[name], other[name])]


def writes(tmp_path, text, name="script.py"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def by_hand(style, *changes):
    """Returns the text of a script, converted as its author would."""
    text = "import halfstep\n" + (SCRIPTS / f"{style}.py").read_text(encoding="utf-8")
    for old, new in (*changes, ("loss.backward()", "session.backward(loss)\n    session.unscale_()")):
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("style", STYLES)
def test_at_o0_a_script_is_bit_identical_to_python(style, tmp_path):
    found, ran = converted(SCRIPTS / f"{style}.py", tmp_path / "ours.pt", "O0")
    assert differing(found, plainly(SCRIPTS / f"{style}.py", tmp_path / "python.pt")) == []
    assert ran.trained.level == "O0"
    assert ran.trained.steps > 0 or style == "by_hand"


@pytest.mark.parametrize(("level", "low"), LEVELS)
@pytest.mark.parametrize("style", STYLES)
def test_a_script_trains_close_to_fp32_and_writes_fp32(style, level, low, tmp_path):
    path = SCRIPTS / f"{style}.py"
    if style == "by_hand" and level != "O1":
        with pytest.raises(SetupError, match="trains Sequential without an optimizer"):
            converted(path, tmp_path / "ours.pt", level, low)
        return
    found, ran = converted(path, tmp_path / "ours.pt", level, low)
    plain = plainly(path, tmp_path / "python.pt")
    assert (ran.trained.level, ran.trained.low, ran.brings) == (level, low, None)
    assert ran.trained.steps > 0
    assert differing(found["losses"], plain["losses"]) != []  # something ran low
    for name, value in flat(plain):
        if not name.startswith(".optimizer"):
            assert dict(flat(found))[name] == pytest.approx(value, rel=0.1, abs=0.1), name
    assert all(value.dtype != torch.bfloat16 for _, value in flat(found) if isinstance(value, torch.Tensor))
    assert all(value.dtype != torch.float16 for _, value in flat(found) if isinstance(value, torch.Tensor))


OPENED = 'session = halfstep.initialize(model, optimizer, "{level}", low="{low}")\n'
CONVERSIONS = {
    "clipping": [
        ("losses = []\nhidden", OPENED + "losses = []\nhidden"),
        ("    optimizer.step()", "    session.step()"),
    ],
    "accumulation": [
        ("losses = []\n", OPENED + "losses = []\n"),
        ("        optimizer.step()", "        session.step()"),
    ],
    "schedulers": [("losses = []\n", OPENED + "losses = []\n"), ("    optimizer.step()", "    session.step()")],
    "by_hand": [],
}


@pytest.mark.parametrize(("level", "low"), LEVELS)
@pytest.mark.parametrize("style", [style for style in CONVERSIONS if style != "by_hand"])
def test_a_script_equals_its_hand_converted_form_bit_for_bit(style, level, low, tmp_path):
    changes = [(old, new.format(level=level, low=low)) for old, new in CONVERSIONS[style]]
    hand = plainly(writes(tmp_path, by_hand(style, *changes)), tmp_path / "hand.pt")
    found, _ = converted(SCRIPTS / f"{style}.py", tmp_path / "ours.pt", level, low)
    assert differing(found, hand) == []
    assert differing(found, plainly(SCRIPTS / f"{style}.py", tmp_path / "python.pt")) != []
