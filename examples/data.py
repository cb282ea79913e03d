"""Data of the examples, as their publishers give it: Fashion-MNIST (IDX), CIFAR-10, IMDB reviews (label, tab, text)."""

import gzip
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import halfstep
from halfstep.errors import DataError
from halfstep.lab.workloads.cifar_resnet import normalize, read_images

FASHION = "https://github.com/zalandoresearch/fashion-mnist"
IMDB = "https://ai.stanford.edu/~amaas/data/sentiment (a line per review in a gzip file: 1 or 0, a tab, the text)"


def fashion_mnist(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the training images (60000, 1, 28, 28), from -1 to 1, and their classes."""
    images, labels = folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz"
    pixels = np.frombuffer(_read(images, FASHION), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    classes = np.frombuffer(_read(labels, FASHION), np.uint8, offset=8)
    return torch.from_numpy(pixels / np.float32(127.5) - 1), torch.from_numpy(classes.astype(np.int64))


def cifar10(folder: Path) -> tuple[torch.Tensor, ...]:
    """Returns the training images (N, 3, 32, 32), normalized, and their classes; then those of the test set."""
    try:
        images = read_images(folder)
    except DataError as error:
        sys.exit(str(error))
    return normalize(images.x_train), images.y_train, normalize(images.x_test), images.y_test


def imdb(folder: Path, *, words: int = 5000, length: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns reviews as numbers of their last `length` words (reviews, length), 0 for a rare one, and verdicts."""
    lines = _read(folder / "imdb_train.tsv.gz", IMDB).decode().splitlines()
    verdicts, texts = zip(*(line.split("\t", 1) for line in lines), strict=True)
    tokens = [re.findall(r"[a-z']+", text.lower()) for text in texts]
    common = Counter(word for review in tokens for word in review).most_common(words - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, 1)}
    rows = [[numbers.get(word, 0) for word in review[-length:]] for review in tokens]
    padded = [[0] * (length - len(row)) + row for row in rows]
    return torch.tensor(padded), torch.tensor([float(verdict) for verdict in verdicts])


def shakespeare() -> tuple[torch.Tensor, int]:
    """Returns the plays that halfstep brings as numbers of their characters, and how many characters there are."""
    (shipped,) = (Path(halfstep.__file__).parent / "lab" / "workloads" / "data").glob("*shakespeare*")
    text = gzip.decompress(shipped.read_bytes()).decode()
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def _read(file: Path, source: str) -> bytes:
    if not file.exists():
        sys.exit(f"{file} is not there; get the data from {source} and give its folder with --data")
    return gzip.decompress(file.read_bytes())
