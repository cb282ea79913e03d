"""Six common models, small, written the ordinary way: no line in them knows of low precision.

Each brings a small task that it learns in some twenty steps. They have what large ones have where fp32 enters a low
network: rotary buffers, a mask of floats, states made by torch.zeros, arange().float(), norms of their own.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
VOCABULARY, LENGTH, WIDTH, HEADS = 16, 12, 32, 2


class RotaryAttention(nn.Module):
    """Causal attention that rotates queries and keys by buffers of cosines and sines, as LLaMA does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        frequencies = 1.0 / 10000 ** (torch.arange(0, WIDTH // HEADS, 2).float() / (WIDTH // HEADS))
        angles = torch.outer(torch.arange(LENGTH).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class MaskedAttention(nn.Module):
    """Causal attention written out, with a buffer of zeros and -inf that is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS) + self.mask[:length, :length]
        y = torch.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class GPTBlock(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(attention()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        y = self.norm_2(self.conv_2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.pool(self.stem(images)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class LSTMClassifier(nn.Module):
    """Two LSTM layers whose first states are made by torch.zeros in forward, in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.zeros(2, tokens.shape[0], WIDTH, device=tokens.device)
        c = torch.zeros(2, tokens.shape[0], WIDTH, device=tokens.device)
        out, _ = self.lstm(self.tokens(tokens), (h, c))
        return self.head(out.mean(dim=1))


class RMSNorm(nn.Module):
    """T5's norm as users write it: the mean square in fp32, then a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class T5Block(nn.Module):
    """Attention with learned relative positions and without a scale, then a gated GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.positions = nn.Embedding(2 * LENGTH, HEADS)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def bias(self, length: int) -> Tensor:
        steps = torch.arange(length, device=self.positions.weight.device)
        return self.positions(steps[:, None] - steps[None, :] + LENGTH).permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm_1(x)
        q, k, v = (f(y).view(batch, length, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias(length)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm_2(x)
        return x + self.down(0.5 * self.gate(y) * (1 + torch.tanh(self.up(y))))


class T5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(T5Block() for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Denoiser(nn.Module):
    """A residual convolution block of a diffusion model: GroupNorm, SiLU, and the time as sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.enter, self.leave = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
        self.conv_1, self.conv_2 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm_1, self.norm_2 = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)

    def embed(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(8, device=t.device).float() / 8)
        angles = t[:, None].float() * frequencies[None, :]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.enter(x)
        y = self.conv_1(F.silu(self.norm_1(x)))
        y = y + self.time(self.embed(t))[:, :, None, None]
        y = self.conv_2(F.silu(self.norm_2(y)))
        return self.leave(x + y)


@dataclass(frozen=True)
class Task:
    """A model, batches that it can learn from, and how it is trained."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(count)]


def count_up(generator: torch.Generator) -> Batch:
    """Sequences in which each token is three more than the one before."""
    start = torch.randint(VOCABULARY, (16, 1), generator=generator)
    tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def bright_quarter(generator: torch.Generator) -> Batch:
    """Noisy images with one brighter quarter each, which is the class."""
    labels = torch.randint(4, (16,), generator=generator)
    images = torch.randn(16, 3, 12, 12, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6] += 2 + label
    return images, labels


def mostly_high(generator: torch.Generator) -> Batch:
    """Sequences of tokens drawn from the lower or the upper half, which is the class."""
    labels = torch.randint(2, (16,), generator=generator)
    tokens = torch.randint(VOCABULARY // 2, (16, LENGTH), generator=generator)
    return tokens + VOCABULARY // 2 * labels[:, None], labels


def noisy_stripes(generator: torch.Generator) -> Batch:
    """Striped images under noise that grows with the time; the noise is what the model is to tell."""
    t = torch.randint(1, 100, (8,), generator=generator)
    stripes = torch.ones(8, 1, 8, 8) * torch.tensor([1.0, -1.0]).repeat(4)
    noise = torch.randn(8, 1, 8, 8, generator=generator)
    return stripes + noise * t[:, None, None, None] / 50, t, noise


def classify(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def tell_noise(model: nn.Module, batch: Batch) -> Tensor:
    noisy, t, noise = batch
    return F.mse_loss(model(noisy, t), noise)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=5e-2, momentum=0.9)


TASKS = {
    task.name: task
    for task in (
        Task("GPT with rotary buffers", lambda: GPT(RotaryAttention), count_up, classify, adamw),
        Task("GPT with a mask buffer", lambda: GPT(MaskedAttention), count_up, classify, adamw),
        Task("ResNet", ResNet, bright_quarter, classify, momentum),
        Task("LSTM", LSTMClassifier, mostly_high, classify, adamw),
        Task("T5", T5Encoder, count_up, classify, adamw),
        Task("diffusion", Denoiser, noisy_stripes, tell_noise, adamw),
    )
}
