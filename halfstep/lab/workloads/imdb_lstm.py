"""Predicts the sentiment of film reviews with an LSTM, a sigmoid and `nn.BCELoss` (data: Maas et al., ACL 2011)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.errors import DataError
from halfstep.lab.workloads.workload import Batch, Workload, as_text, read_bytes, seeded, shuffled

PAD, UNKNOWN = 0, 1
LABELS = {"0": 0.0, "1": 1.0, "neg": 0.0, "pos": 1.0}
HOW_TO_GET = (
    "pass the folder aclImdb of https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz. Or pass a folder with "
    "two files whose names end in train.tsv and test.tsv (or train.tsv.gz and test.tsv.gz), with one review per line: "
    "0 or 1, a tab, the text"
)

Review = tuple[float, str]


class SentimentLSTM(nn.Module):
    """Embedding, LSTM, and a linear layer with a sigmoid on the last hidden state."""

    def __init__(self, vocabulary: int, *, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PAD)
        self.rnn = nn.LSTM(embedding, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)
        with torch.no_grad():  # an open forget gate and small embeddings: learns in one epoch what took five
            self.embedding.weight.mul_(0.1)
            for name, p in self.rnn.named_parameters():
                if name.startswith("bias_ih"):
                    p[hidden : 2 * hidden] += 1.0

    def forward(self, ids: Tensor) -> Tensor:
        _, (hidden, _) = self.rnn(self.embedding(ids))
        return torch.sigmoid(self.fc(hidden[-1])).squeeze(-1)


class Reviews(NamedTuple):
    """Word ids (N, length) int64 and labels (N,) fp32 for training and for test, and the number of different ids."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class ImdbLSTM(Workload):
    """Binary classification of film reviews, cut to their last `length` words, where the opinion usually is.

    `words` is the largest size of the vocabulary, which is taken from the training reviews. `eval_reviews` is the
    number of test reviews that `evaluate` uses.
    """

    name: ClassVar[str] = "imdb_lstm"
    batch: int = 64
    lr: float = 2e-3
    beta2: float = 0.999
    max_norm: float | None = 1.0
    length: int = 200
    words: int = 10000
    embedding: int = 100
    hidden: int = 64
    eval_reviews: int = 5000

    def build(self, seed: int) -> nn.Module:
        count = self._reviews.vocabulary
        return seeded(seed, lambda: SentimentLSTM(count, embedding=self.embedding, hidden=self.hidden))

    def optimizer(self, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr, betas=(0.9, self.beta2), fused=fused)

    def lr_factor(self, step: int, steps: int) -> float:
        return 0.05 + 0.475 * (1 + cos(pi * step / steps))

    def batches(self, seed: int) -> Iterator[Batch]:
        reviews = self._reviews
        for chosen in shuffled(len(reviews.x_train), self.batch, seed):
            yield reviews.x_train[chosen], reviews.y_train[chosen]

    def examples(self) -> int:
        return len(self._reviews.x_train)

    def validation(self) -> Iterable[Batch]:
        reviews, count = self._reviews, self.eval_reviews
        return zip(torch.split(reviews.x_test[:count], 250), torch.split(reviews.y_test[:count], 250), strict=True)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the binary cross entropy of the probabilities, in nats per review."""
        loss: Tensor = nn.BCELoss()(outputs, targets)
        return loss

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0.5) == (targets > 0.5)).float().mean()

    @cached_property
    def _reviews(self) -> Reviews:
        train, test = read_reviews(self.data)
        tokens = [tokenize(text) for _, text in train]
        ids = vocabulary(tokens, self.words)
        return Reviews(
            encode(tokens, ids, self.length),
            torch.tensor([label for label, _ in train]),
            encode((tokenize(text) for _, text in test), ids, self.length),
            torch.tensor([label for label, _ in test]),
            len(ids) + 2,
        )


def tokenize(text: str) -> list[str]:
    """Returns the lower-case words and punctuation marks (.,!?) of a review, without its line-break tags."""
    return re.findall(r"[a-z0-9']+|[.,!?]", text.lower().replace("<br />", " "))


def vocabulary(tokens: Iterable[list[str]], limit: int) -> dict[str, int]:
    """Returns ids, from 2 on, for the `limit` most frequent words; ties are ordered alphabetically."""
    counts = Counter(word for words in tokens for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:limit]
    return {word: i for i, word in enumerate(ranked, start=2)}


def encode(tokens: Iterable[list[str]], ids: dict[str, int], length: int) -> Tensor:
    """Returns the ids of the last `length` words of each review (N, length): 1 for unknown ones, padded left with 0.

    >>> encode([["a", "x"], ["x", "x", "a", "a"]], {"a": 2}, 3).tolist()
    [[0, 2, 1], [1, 2, 2]]
    """
    rows = ([ids.get(word, UNKNOWN) for word in words[-length:]] for words in tokens)
    return torch.tensor([[PAD] * (length - len(row)) + row for row in rows])


def read_reviews(path: Path | None) -> tuple[list[Review], list[Review]]:
    """Returns two lists of (label, text) pairs: the training reviews and the test reviews."""
    if path is None or not path.is_dir():
        raise DataError(f"imdb_lstm: {'no data given' if path is None else f'{path} is not a folder'}; {HOW_TO_GET}")
    for folder in (path, path / "aclImdb", path / "imdb"):
        if (folder / "train" / "pos").is_dir():
            return _read_folder(folder / "train"), _read_folder(folder / "test")
        train, test = _split_file(folder, "train"), _split_file(folder, "test")
        if train and test:
            return _read_lines(train), _read_lines(test)
    raise DataError(f"imdb_lstm: {path} holds no reviews in a known layout; {HOW_TO_GET}")


def _split_file(folder: Path, split: str) -> Path | None:
    names = re.compile(rf"(.*[_-])?{split}\.(tsv|txt)(\.gz)?")
    found = sorted(p for p in folder.iterdir() if names.fullmatch(p.name)) if folder.is_dir() else []
    return found[0] if found else None


def _read_lines(path: Path) -> list[Review]:
    text = as_text(read_bytes(path, "imdb_lstm"), path, "imdb_lstm")
    reviews = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        label, tab, review = line.partition("\t")
        if not tab or label not in LABELS:
            raise DataError(
                f"imdb_lstm: line {number} of {path} must be 0 or 1, a tab, the text; it begins {line[:20]!r}"
            )
        reviews.append((LABELS[label], review))
    if not reviews:
        raise DataError(f"imdb_lstm: {path} holds no reviews; {HOW_TO_GET}")
    return reviews


def _read_folder(folder: Path) -> list[Review]:
    reviews = []
    for label in ("neg", "pos"):
        files = sorted((folder / label).glob("*.txt"))
        if not files:
            raise DataError(f"imdb_lstm: {folder / label} holds no .txt files; {HOW_TO_GET}")
        reviews += [(LABELS[label], as_text(read_bytes(file, "imdb_lstm"), file, "imdb_lstm")) for file in files]
    return reviews
