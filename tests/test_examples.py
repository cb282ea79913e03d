"""The examples run at small size: as they are, and where one is told twice, both tellings train alike."""

import gzip
import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from halfstep.adapters.apex import install, uninstall
from halfstep.adapters.script.run import run as run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
OWN = {
    "halfstep_linear_regression": ["--steps", "5"],
    "halfstep_images": ["--steps", "3", "--data", "DATA"],
    "halfstep_sentiment": ["--steps", "3", "--data", "DATA", "--out", "DATA/own.pt"],
    "halfstep_dcgan": ["--steps", "2", "--data", "DATA", "--width", "4"],
    "halfstep_char_gpt": ["--steps", "3", "--width", "16", "--text", "DATA/text", "--out", "DATA/gpt.pt"],
}
TORCH_AMP = {
    "torch_amp_images": ["--steps", "3", "--data", "DATA"],
    "torch_amp_sentiment": ["--steps", "3", "--data", "DATA", "--out", "DATA/amp.pt"],
}
APEX = {
    "apex_linear_regression": ["--steps", "5"],
    "apex_dcgan": ["--steps", "2", "--data", "DATA", "--width", "4"],
}
PLAIN = {"char_gpt": ["--steps", "3", "--width", "16", "--text", "DATA/text", "--out", "DATA/plain.pt"]}

DDP = ["--data", "DATA", "--low", "bf16", "--batch", "64", "--width", "4", "--out", "DATA/ddp.pt"]
FSDP = ["--steps", "2", "--width", "16", "--out", "DATA/fsdp"]
LLAMA = ["--steps", "2", "--width", "96", "--layers", "1", "--out", "DATA/llama"]
SEVERAL = {  # in this order: the second of two goes on from the first one's checkpoint
    "ddp_cifar begun": ("ddp_cifar", [*DDP, "--epochs", "1"]),
    "ddp_cifar gone on": ("ddp_cifar", [*DDP, "--epochs", "3"]),
    "fsdp_char_lm begun": ("fsdp_char_lm", FSDP),
    "fsdp_char_lm gone on": ("fsdp_char_lm", FSDP),
    "tp_mlp": ("tp_mlp", ["--steps", "26"]),
    "fsdp_llama begun": ("fsdp_llama", [*LLAMA, "--moments", "bf16"]),
    "fsdp_llama gone on": ("fsdp_llama", [*LLAMA, "--level", "torch"]),
}


def in_processes(rank, name, arguments):
    """Runs an example in the processes that are there already; returns what this one prints."""
    printed = io.StringIO()
    with (
        patch.object(torch.distributed, "init_process_group"),
        patch.object(torch.distributed, "destroy_process_group"),
        patch.object(sys, "argv", [f"{name}.py", *arguments]),
        patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def pooled(folder, slow):
    data = folder / "examples"
    data.mkdir()
    write_data(data)
    return {
        key: (in_processes, (name, [argument.replace("DATA", str(data)) for argument in arguments]))
        for key, (name, arguments) in SEVERAL.items()
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def write_data(folder):
    """Writes files in the formats of Fashion-MNIST, IMDB and CIFAR-10, and a text."""
    numbers = np.random.default_rng(0)
    pixels = numbers.integers(0, 256, 200 * 28 * 28, dtype=np.uint8)
    files = {
        "train-images-idx3-ubyte.gz": bytes(16) + pixels.tobytes(),
        "train-labels-idx1-ubyte.gz": bytes(8) + numbers.integers(0, 10, 200, dtype=np.uint8).tobytes(),
        "imdb_train.tsv.gz": "\n".join(f"{i % 2}\ta {'good' if i % 2 else 'bad'} film" for i in range(64)).encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(gzip.compress(content))
    pixels, classes = numbers.integers(0, 256, (128, 32, 32, 3), dtype=np.uint8), np.arange(128, dtype=np.uint8) % 10
    np.savez(folder / "cifar10.npz", x_train=pixels, y_train=classes, x_test=pixels, y_test=classes)
    (folder / "text").write_text("to be or not to be, that is the question. " * 20)


def run(name, arguments, data, monkeypatch, capsys, *more):
    """Runs an example as `python FILE ARGUMENTS` would; returns the last loss that it prints."""
    given = [argument.replace("DATA", str(data)) for argument in arguments]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given, *more])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return float(re.findall(r"(?:loss|Loss_G) ([\d.]+)", capsys.readouterr().out)[-1])


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.slow_but("halfstep_linear_regression-O2", "halfstep_char_gpt-O2")
def test_the_two_lines_train_at_every_level(name, level, data, monkeypatch, capsys):
    assert 0 < run(name, OWN[name], data, monkeypatch, capsys, "--level", level) < 10


def torch_has_an_lstm_in_bf16():
    """Not with ONEDNN_MAX_CPU_ISA below what the processor has: torch then asks oneDNN for what it will not make."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(8, 8)(torch.zeros(2, 1, 8))
    except RuntimeError:
        return False
    return True


@pytest.mark.slow_but("torch_amp_sentiment")
@pytest.mark.parametrize("name", TORCH_AMP)
def test_a_torch_amp_loop_and_the_two_lines_train_alike(name, data, monkeypatch, capsys):
    if name == "torch_amp_sentiment" and not torch_has_an_lstm_in_bf16():
        pytest.skip("torch's own autocast fails in an LSTM on this CPU")
    theirs = run(name, TORCH_AMP[name], data, monkeypatch, capsys)
    own = name.replace("torch_amp", "halfstep")
    assert run(own, OWN[own], data, monkeypatch, capsys, "--level", "O1") == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", APEX)
def test_an_apex_loop_runs_on_the_stand_in_and_the_two_lines_train_alike(name, level, data, monkeypatch, capsys):
    install(low="bf16")
    try:
        theirs = run(name, APEX[name], data, monkeypatch, capsys, "--opt-level", level)
    finally:
        uninstall()
    own = name.replace("apex", "halfstep")
    assert run(own, OWN[own], data, monkeypatch, capsys, "--level", level) == pytest.approx(theirs, rel=0.02)


@pytest.mark.slow_but("torch_amp_sentiment", "apex_linear_regression")
@pytest.mark.parametrize(
    ("name", "brings", "level"),
    [
        ("char_gpt", None, "O2"),
        ("torch_amp_images", "torch.amp's autocast", None),
        ("torch_amp_sentiment", "torch.amp's autocast", None),
        ("apex_linear_regression", "apex.amp", "O1"),
        ("apex_dcgan", "apex.amp", "O1"),
    ],
)
def test_a_loop_runs_under_halfstep_run(name, brings, level, data, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = {**PLAIN, **TORCH_AMP, **APEX}[name]
    ran = []
    given = [argument.replace("DATA", str(data)) for argument in arguments]
    run_script(str(EXAMPLES / f"{name}.py"), given, plan="O2", low="bf16", ended=ran.append)
    assert ran[0].brings == brings
    assert (ran[0].trained and ran[0].trained.level) == level


def test_a_loop_without_mixed_precision_and_the_two_lines_at_o0_are_the_same(data, monkeypatch, capsys):
    theirs = run("char_gpt", PLAIN["char_gpt"], data, monkeypatch, capsys)
    ours = run("halfstep_char_gpt", OWN["halfstep_char_gpt"], data, monkeypatch, capsys, "--level", "O0")
    assert ours == theirs
    plain, own = (torch.load(data / name)["model"] for name in ("plain.pt", "gpt.pt"))
    assert all(torch.equal(value, own[key]) for key, value in plain.items())


def test_data_that_is_not_there_is_said_in_words(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="is not there; get the data from https:"):
        run("torch_amp_images", ["--data", str(tmp_path)], tmp_path, monkeypatch, capsys)


def assert_trains_and_goes_on(printed):
    """`printed` has what process 0 printed in each run of `SEVERAL`."""
    losses = {key: [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)] for key, text in printed.items()}
    assert re.findall(r"epoch (\d+)", printed["ddp_cifar begun"] + printed["ddp_cifar gone on"]) == ["1", "2", "3"]
    assert re.findall(r"step (\d+)", printed["fsdp_char_lm begun"]) == ["0", "2"]
    assert re.findall(r"step (\d+)", printed["fsdp_char_lm gone on"]) == ["4"]
    assert re.findall(r"step (\d+)", printed["fsdp_llama begun"]) == ["0", "2"]
    low, full = (re.search(r"optimizer ([\d.]+)", printed[f"fsdp_llama {when}"]) for when in ("begun", "gone on"))
    assert float(low[1]) < 5 < float(full[1]) == 8
    assert all(0 < loss < 5 for each in losses.values() for loss in each)
    first, later, _ = losses["tp_mlp"]
    assert later < first


def test_the_examples_of_several_processes_train_and_go_on(found):
    assert_trains_and_goes_on(found[0])
    assert set(found[1].values()) == {""}


@pytest.mark.slow
def test_the_examples_of_several_processes_run_under_torchrun(data):
    printed = {}
    for key, (name, arguments) in SEVERAL.items():
        given = [argument.replace("DATA", str(data)) for argument in arguments]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ran = subprocess.run(
            [*torchrun, str(EXAMPLES / f"{name}.py"), *given],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert ran.returncode == 0, ran.stderr
        printed[key] = ran.stdout
    assert_trains_and_goes_on(printed)
