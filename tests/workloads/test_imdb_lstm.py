"""The LSTM of the slides and film reviews in the layouts that users have."""

import gzip

import pytest
import torch
from torch import nn

from halfstep.errors import DataError
from halfstep.lab.workloads.imdb_lstm import ImdbLSTM, encode, read_reviews, vocabulary

TRAIN = [("0", "dull and slow"), ("1", "a joy\tto see"), ("0", "slow")]
TEST = [("1", "joy")]
EXPECTED = ([(0.0, "dull and slow"), (1.0, "a joy\tto see"), (0.0, "slow")], [(1.0, "joy")])


def lines(reviews):
    return "".join(f"{label}\t{text}\n" for label, text in reviews).encode()


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "train.tsv").write_bytes(lines(TRAIN))
    (folder / "test.tsv").write_bytes(lines(TEST))
    return folder


def test_files_of_lines_are_read_plain_and_packed(plain, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "imdb_train.tsv.gz").write_bytes(gzip.compress(lines(TRAIN)))
    (packed / "imdb_test.tsv.gz").write_bytes(gzip.compress(lines(TEST)))
    assert read_reviews(plain) == read_reviews(packed) == EXPECTED


@pytest.mark.parametrize("inside", [".", "aclImdb", "imdb"])
def test_the_folder_of_the_original_is_read_where_it_lies(tmp_path, inside):
    for split, label, name, text in [
        ("train", "neg", "0_1.txt", "bad"), ("train", "pos", "0_9.txt", "good"),
        ("test", "neg", "0_2.txt", "worse"), ("test", "pos", "0_8.txt", "better"),
    ]:  # fmt: skip
        file = tmp_path / inside / split / label / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert read_reviews(tmp_path) == ([(0.0, "bad"), (1.0, "good")], [(0.0, "worse"), (1.0, "better")])


def test_an_original_folder_without_files_is_an_error(tmp_path):
    (tmp_path / "train" / "pos").mkdir(parents=True)
    with pytest.raises(DataError, match=r"neg holds no \.txt files"):
        read_reviews(tmp_path)


@pytest.mark.parametrize("line", [b"2\ttext", b"1 text", b"text", b"\ttext"])
def test_a_bad_line_is_named_by_its_number(plain, line):
    (plain / "train.tsv").write_bytes(b"1\tfine\n\n" + line)
    with pytest.raises(DataError, match=r"line 3 of .*train\.tsv must be 0 or 1, a tab, the text"):
        read_reviews(plain)


@pytest.mark.parametrize(("name", "content"), [("train.tsv", b""), ("test.tsv", b"\n \n")])
def test_a_file_without_reviews_is_named(plain, name, content):
    (plain / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} holds no reviews; pass the folder"):
        read_reviews(plain)


def test_a_line_that_is_not_utf8_is_named_by_file_and_number(plain):
    (plain / "test.tsv").write_bytes(b"1\tfine\n0\tcaf\xe9\n")
    with pytest.raises(DataError, match=r"test\.tsv must be UTF-8 text, but byte 0xe9 in line 2 is not"):
        read_reviews(plain)


@pytest.mark.parametrize("place", [None, "nowhere", "empty"])
def test_missing_data_is_an_error_that_says_how_to_get_it(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"aclImdb_v1\.tar\.gz"):
        read_reviews(place and tmp_path / place)


def test_the_vocabulary_ranks_by_count_and_then_by_the_alphabet():
    assert vocabulary([["c", "b", "a"], ["c"]], 2) == {"c": 2, "a": 3}


def test_words_outside_the_vocabulary_are_unknown_and_the_end_of_a_long_review_stays():
    assert encode([["x", "a", "b", "y"]], {"a": 2, "b": 3}, 3).tolist() == [[2, 3, 1]]


def test_the_vocabulary_comes_from_the_training_reviews(plain):
    job = ImdbLSTM(data=plain, batch=3, length=4)
    assert job.build(0).embedding.num_embeddings == 2 + 7  # dull and slow a joy to see
    ((x, y),) = job.validation()
    assert x.tolist() == [[0, 0, 0, 6]]  # slow, twice, is 2; then by the alphabet a 3, and 4, dull 5, joy 6
    assert y.tolist() == [1.0]


def test_it_is_the_model_of_the_slides(plain):
    job = ImdbLSTM(data=plain)
    model = job.build(0)
    assert [type(m) for m in model.children()] == [nn.Embedding, nn.LSTM, nn.Linear]
    probabilities = model(torch.tensor([[0, 2, 3], [0, 0, 4]]))
    assert probabilities.shape == (2,)
    assert bool(((probabilities > 0) & (probabilities < 1)).all())
    assert isinstance(job.optimizer(model, fused=False), torch.optim.Adam)


def test_the_loss_is_binary_cross_entropy_of_probabilities():
    loss = ImdbLSTM().loss(torch.tensor([0.25, 0.5]), torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx((torch.log(torch.tensor(4.0)) + torch.log(torch.tensor(2.0))).item() / 2)


def test_accuracy_is_the_right_side_of_one_half():
    assert ImdbLSTM().correct(torch.tensor([0.6, 0.6, 0.4, 0.5]), torch.tensor([1.0, 0.0, 0.0, 0.0])).item() == 0.75


def test_the_forget_gate_starts_open(plain):
    bias = ImdbLSTM(data=plain, hidden=64).build(0).rnn.bias_ih_l0
    assert bias[64:128].mean().item() == pytest.approx(1.0, abs=0.05)
    assert bias[:64].mean().item() == pytest.approx(0.0, abs=0.05)


@pytest.mark.slow
def test_it_learns_which_word_is_good(plain):
    reviews = [("1", "so good it is"), ("0", "so bad it is")] * 8
    (plain / "train.tsv").write_bytes(lines(reviews))
    (plain / "test.tsv").write_bytes(lines(reviews[:2]))
    job = ImdbLSTM(data=plain, batch=16, length=4, hidden=8, embedding=8, lr=5e-2)
    model = job.build(0)
    optimizer = job.optimizer(model, fused=True)
    for _, (inputs, targets) in zip(range(40), job.batches(0), strict=False):
        optimizer.zero_grad()
        job.loss(model(inputs), targets).backward()
        optimizer.step()
    assert job.evaluate(model)["accuracy"] == 1.0


def test_the_real_reviews_are_read(data_dir):
    train, test = read_reviews(data_dir)
    for reviews in (train, test):
        assert sum(label for label, _ in reviews) == len(reviews) / 2
