"""Modules that compute something of the size of their input, each in a way that breaks."""

from __future__ import annotations

import torch
from torch import nn


class Gain(nn.Module):
    """Multiplies by more than the format holds, and divides again."""

    def forward(self, x):
        return x * 1e7 / 1e7


class Squares(nn.Module):
    """The share of each square in their mean, where the squares are too large."""

    def forward(self, x):
        squares = (x * 1e4).pow(2)
        return squares / squares.mean(-1, keepdim=True)


class Total(nn.Module):
    """Multiplies by the logarithm of a sum that is too large."""

    def forward(self, x):
        return x * torch.log((x.abs() * 1e4).sum(-1, keepdim=True)) / 10


class Eps(nn.Module):
    """Divides zeros by zeros and an eps."""

    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        kept = torch.ones_like(x)
        kept[0] = 0
        z = x * kept
        return z / (z.abs().amax(-1, keepdim=True) + self.eps)


class LogOfZero(nn.Module):
    """The logarithm of one minus a probability that rounds to one."""

    def forward(self, x):
        return torch.log(1 - torch.sigmoid(12 * torch.tanh(8 * x))) / 10


class WhereTrap(nn.Module):
    """Divides by zero where the result is not taken: its gradient is NaN all the same."""

    def __init__(self, fixed=False):
        super().__init__()
        self.fixed = fixed

    def forward(self, x):
        kept = torch.ones_like(x)
        kept[0] = 0
        z = x * kept
        safe = torch.where(z == 0, torch.ones_like(z), z) if self.fixed else z
        return torch.where(z == 0, torch.zeros_like(z), z * z / safe)


class SqrtOfZero(nn.Module):
    """A square root at zero, where its gradient is infinite."""

    def __init__(self, eps=0.0):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        kept = torch.ones_like(x)
        kept[0] = 0
        z = x * kept
        return torch.sqrt(z * z + self.eps)


class InPlace(nn.Module):
    """Overflows in an operation that writes into its argument."""

    def forward(self, x):
        return x.clone().mul_(1e7).div_(1e7)


class Rows(nn.Module):
    """Fills its result row by row; the last one overflows."""

    def forward(self, x):
        out = torch.empty_like(x)
        for i, row in enumerate(x):
            out[i] = row * 1e7 / 1e7 if i == len(x) - 1 else row * 2
        return out


class Stream(nn.Module):
    """Adds so much to a stream of values that only a normalisation behind it makes them small again."""

    def forward(self, x):
        return x * 3e4 + x * 3e4


class _GainForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul(1e7).div(1e7)

    @staticmethod
    def backward(ctx, grad):
        return grad


class CustomForward(nn.Module):
    """A custom autograd function that overflows in its forward."""

    def forward(self, x):
        return _GainForward.apply(x)


class _GainBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.sign() * 1e5 / 1e7


class CustomBackward(nn.Module):
    """A custom autograd function that overflows in its backward, whatever the scale."""

    def forward(self, x):
        return _GainBackward.apply(x)


class _DivideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x / (x.abs() * 0)


class CustomDivide(nn.Module):
    """A custom autograd function that divides by zero in its backward, in every format."""

    def forward(self, x):
        return _DivideBackward.apply(x)
