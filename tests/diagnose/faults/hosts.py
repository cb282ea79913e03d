"""Small networks with a place for a fault: a convolutional one, an LSTM, transformers by hand and of torch's parts."""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16
BATCH = 8
STEPS = 6
WORDS = 32
CLASSES = 4


class Cnn(nn.Module):
    def __init__(self, plant):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.plant = plant
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.plant(self.norm(self.conv1(x)))
        return self.head(torch.relu(self.conv2(x)).mean((2, 3)))


def embedding(features):
    """Returns what turns words into vectors; nothing where the inputs are `features` already."""
    return nn.Identity() if features else nn.Embedding(WORDS, WIDTH)


class Lstm(nn.Module):
    def __init__(self, plant, features=False):
        super().__init__()
        self.embed = embedding(features)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.plant = plant
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words):
        x, _ = self.lstm(self.embed(words))
        return self.head(self.plant(x).mean(1))


class Attention(nn.Module):
    """Attention as one writes it by hand; `mask` says what is added where a query may not look, `empty` masks a row."""

    def __init__(self, mask=-math.inf, style="fill", empty=False, gain=1.0):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mask, self.style, self.empty, self.gain = mask, style, empty, gain

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q * self.gain) @ (k.transpose(-1, -2) / self.gain) / math.sqrt(WIDTH)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        if self.empty:
            hidden[0] = True
        if self.style == "fill":
            scores = scores.masked_fill(hidden, self.mask)
        elif self.style == "where":
            scores = torch.where(hidden, self.mask, scores)
        else:
            scores = scores + hidden.to(scores.dtype) * self.mask
        return self.out(torch.softmax(scores, -1) @ v)


class Block(nn.Module):
    def __init__(self, plant, attention=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention() if attention is None else attention
        self.plant = plant
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.plant(x))


class Transformer(nn.Module):
    def __init__(self, plant, attention=None, reentrant=None, features=False):
        super().__init__()
        self.embed = embedding(features)
        self.blocks = nn.ModuleList([Block(nn.Identity()), Block(plant, attention)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.reentrant = reentrant

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


class Led(nn.Module):
    """A network behind a plant."""

    def __init__(self, plant, net):
        super().__init__()
        self.plant, self.net = plant, net

    def forward(self, x):
        return self.net(self.plant(x))


class Stacked(nn.Module):
    """Blocks that hand on large values, and a norm at the end."""

    def __init__(self, first, second):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([first, nn.Identity(), second])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention; `hidden` keys of the first sample are masked by True, or by the number `added`."""

    def __init__(self, plant, hidden=0, weights=True, features=False, added=None):
        super().__init__()
        self.embed = embedding(features)
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.plant = plant
        self.head = nn.Linear(WIDTH, CLASSES)
        self.hidden, self.weights, self.added = hidden, weights, added

    def forward(self, words):
        x = self.embed(words)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[0, : self.hidden] = True
        if self.added is not None:
            mask = mask.float() * self.added
        y, _ = self.attn(x, x, x, key_padding_mask=mask, need_weights=self.weights)
        return self.head(self.plant(x + y).mean(1))


class Encoder(nn.Module):
    """torch's own encoder layer, whose parts are torch's too."""

    def __init__(self, plant):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.plant = plant
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words):
        return self.head(self.plant(self.layer(self.embed(words))).mean(1))


def images():
    return torch.randn(BATCH, 3, 6, 6)


def rows():
    return torch.randn(BATCH, WIDTH)


def words():
    return torch.randint(WORDS, (BATCH, STEPS))


def sequences():
    return torch.randn(BATCH, STEPS, WIDTH)


def targets():
    return torch.randint(CLASSES, (BATCH,))


PLANT_AT = {
    Cnn: "plant", Lstm: "plant", Transformer: "blocks.1.plant", TorchAttention: "plant", Encoder: "plant",
}  # fmt: skip


class Behind(nn.Module):
    """A linear layer, and a function behind it."""

    def __init__(self, function, width=8):
        super().__init__()
        self.fc = nn.Linear(8, width)
        self.function = function

    def forward(self, x):
        return self.function(self.fc(x))
