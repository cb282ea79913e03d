"""The small GPT: its text, its windows, its model."""

import gzip
import math

import pytest
import torch

from halfstep.errors import DataError, WorkloadError
from halfstep.lab.workloads.char_lm import GPT, CharLM, read_text

TINY = {"d": 16, "layers": 1, "heads": 2, "length": 16, "batch": 4}


def test_the_text_in_the_package_is_tiny_shakespeare():
    text = read_text(None)
    assert len(text) == 1_115_394
    assert len(set(text)) == 65
    assert text.startswith(b"First Citizen:\nBefore we proceed any further, hear me speak.")


def test_the_default_has_the_parameters_of_four_blocks_of_256():
    block = 2 * 2 * 256 + (256 * 768 + 768) + (256 * 256 + 256) + (256 * 1024 + 1024) + (1024 * 256 + 256)
    count = sum(p.numel() for p in CharLM().build(0).parameters())
    assert count == 4 * block + 65 * 256 + 128 * 256 + 2 * 256 + 256 * 65


def test_targets_are_the_next_characters():
    inputs, targets = next(CharLM(**TINY).batches(0))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_windows_decode_to_the_text(tmp_path):
    letters = "abcdefghij" * 20
    (tmp_path / "text.txt").write_text(letters, encoding="utf-8")
    inputs, targets = next(CharLM(data=tmp_path, **TINY).batches(0))
    assert torch.equal(targets, (inputs + 1) % 10)


@pytest.mark.parametrize("what", ["weights", "batches"])
def test_a_seed_repeats_and_another_differs(what):
    def draw(seed):
        job = CharLM(**TINY)
        return job.build(seed).head.weight if what == "weights" else next(job.batches(seed))[0]

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_training_windows_end_before_the_validation_text(tmp_path):
    # nine tenths are "a", the rest "b": a window of the wrong part would hold the other letter
    (tmp_path / "text.txt").write_bytes(b"a" * 900 + b"b" * 100)
    job = CharLM(data=tmp_path, **TINY, eval_windows=8)
    batches = job.batches(0)
    assert all(bool((next(batches)[1] == 0).all()) for _ in range(50))
    held_out = list(job.validation())
    assert sum(len(x) for x, _ in held_out) == 8
    assert all(bool((x == 1).all()) and bool((y == 1).all()) for x, y in held_out)


def test_a_prediction_depends_on_the_past_alone():
    model = GPT(10, d=16, layers=2, heads=2, length=8)
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5] = 9
    before, after = model(ids), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_the_loss_starts_near_that_of_guessing():
    job = CharLM(**TINY, eval_windows=8)
    assert job.evaluate(job.build(0))["loss"] == pytest.approx(math.log(65), abs=0.05)


@pytest.mark.slow
def test_it_learns():
    job = CharLM(d=32, layers=1, heads=2, length=32, batch=16, lr=1e-2, eval_windows=32)
    model = job.build(0)
    optimizer = job.optimizer(model, fused=True)
    for _, (inputs, targets) in zip(range(80), job.batches(0), strict=False):
        optimizer.zero_grad()
        job.loss(model(inputs), targets).backward()
        optimizer.step()
    assert job.evaluate(model)["loss"] < 2.8  # character frequencies alone give 3.3


@pytest.mark.parametrize(("step", "factor"), [(0, 0.2), (4, 1.0), (5, 1.0), (100, 0.1)])
def test_the_learning_rate_warms_up_and_falls_to_a_tenth(step, factor):
    assert CharLM().lr_factor(step, 100) == pytest.approx(factor)


def test_weight_decay_is_on_matrices_alone():
    job = CharLM(**TINY)
    decayed, others = job.optimizer(job.build(0), fused=False).param_groups
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}


def test_text_is_read_plain_packed_and_from_a_folder(tmp_path):
    plain, packed = tmp_path / "plain.txt", tmp_path / "packed" / "text.txt.gz"
    packed.parent.mkdir()
    plain.write_bytes(b"some text")
    packed.write_bytes(gzip.compress(b"some text"))
    assert read_text(plain) == read_text(packed) == read_text(packed.parent) == b"some text"


@pytest.mark.parametrize("names", [[], ["a.txt", "b.txt"]])
def test_a_folder_without_one_text_is_an_error_that_names_what_it_has(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=", ".join(names) or "none"):
        read_text(tmp_path)


def test_a_missing_text_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"no file .*nowhere\.txt; pass a text file, or no data"):
        read_text(tmp_path / "nowhere.txt")


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_an_empty_text_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    with pytest.raises(DataError, match=rf"{name} is empty; pass a text"):
        CharLM(data=tmp_path).build(0)


@pytest.mark.parametrize("content", [b"some text", gzip.compress(b"some text" * 9)[:-10]], ids=["plain", "cut"])
def test_a_gz_that_is_no_whole_gzip_is_named(tmp_path, content):
    (tmp_path / "text.txt.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"text\.txt\.gz is not a complete gzip file"):
        read_text(tmp_path)


@pytest.mark.parametrize(("count", "enough"), [(170, True), (160, False)])
def test_a_text_shorter_than_a_validation_window_is_an_error(tmp_path, count, enough):
    (tmp_path / "text.txt").write_bytes(b"ab" * (count // 2))
    job = CharLM(data=tmp_path, **TINY)
    if enough:
        assert next(job.batches(0))[0].shape == (4, 16)
    else:
        with pytest.raises(DataError, match="160 characters, too few for windows of 16"):
            next(job.batches(0))


def test_heads_divide_the_width():
    with pytest.raises(WorkloadError, match="d=16 is not divisible by heads=3"):
        CharLM(d=16, heads=3)
