"""Modules that compute something of the size of their input, each in a way that breaks."""

import torch
from torch import nn

from tests.contracts.cases import Same


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


class _GainBackward(Same):
    @staticmethod
    def backward(ctx, grad):
        return grad.sign() * 1e5 / 1e7


class CustomBackward(nn.Module):
    """A custom autograd function that overflows in its backward, whatever the scale."""

    def forward(self, x):
        return _GainBackward.apply(x)


class _DivideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        ctx.save_for_backward(x)
        ctx.eps = eps
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x / (x.abs() * 0 + ctx.eps), None


class CustomDivide(nn.Module):
    """A custom autograd function that divides by zero in its backward, in every format."""

    def __init__(self, eps=0.0):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return _DivideBackward.apply(x, self.eps)


class Steep(nn.Module):
    """Hands its input on, by way of values so small that their gradients are large."""

    def __init__(self, factor=1e4):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.tanh(x / self.factor) * self.factor


class _SteepBackward(Same):
    @staticmethod
    def backward(ctx, grad):
        return grad * 1e4 / 1e4


class CustomSteep(nn.Module):
    """A custom autograd function whose backward has large values on the way."""

    def forward(self, x):
        return _SteepBackward.apply(x)


class Masked(nn.Module):
    """A softmax in which the last entry of each row is masked, and with `empty` all entries of the first sample.

    `style` says how: "fill", "where", "add" (the mask's constant times 0 or 1), "guarded" (by torch.where before the
    softmax, and what it gives for an empty row is thrown away).
    """

    def __init__(self, mask=-torch.inf, style="fill", empty=False):
        super().__init__()
        self.mask, self.style, self.empty = mask, style, empty

    def hidden(self, x):
        hidden = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
        hidden[..., -1] = True
        if self.empty:
            hidden[0] = True
        return hidden

    def forward(self, x):
        return x + self.softmax(x, self.hidden(x))

    def softmax(self, x, hidden):
        if self.style == "add":
            return torch.softmax(x + hidden.to(x.dtype) * self.mask, -1)
        if self.style == "where":
            return torch.softmax(torch.where(hidden, self.mask, x), -1)
        if self.style == "fill":
            return torch.softmax(x.masked_fill(hidden, self.mask), -1)
        nothing = hidden.all(-1, keepdim=True)
        shares = torch.softmax(torch.where(nothing, 0.0, x.masked_fill(hidden, self.mask)), -1)
        return torch.where(nothing, 0.0, shares)


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hidden, mask):
        shares = torch.softmax(x.masked_fill(hidden, mask) if mask == -torch.inf else x + hidden.to(x.dtype) * mask, -1)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx, grad):
        (shares,) = ctx.saved_tensors
        return shares * (grad - (grad * shares).sum(-1, keepdim=True)), None, None


class CustomMasked(Masked):
    """The same as a custom autograd function."""

    def softmax(self, x, hidden):
        return _MaskedSoftmax.apply(x, hidden, self.mask)


class _EpsForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps):
        size = x.abs().amax(-1, keepdim=True) + eps
        ctx.save_for_backward(size)
        return x / size

    @staticmethod
    def backward(ctx, grad):
        (size,) = ctx.saved_tensors
        return grad / size, None


class CustomEps(Eps):
    """Divides zeros by zeros and an eps in a custom autograd function."""

    def forward(self, x):
        kept = torch.ones_like(x)
        kept[0] = 0
        return _EpsForward.apply(x * kept, self.eps)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum().reshape(1)


class CustomScaled(nn.Module):
    """A custom autograd function with a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return _Scaled.apply(x, self.weight)


class UnitRows(nn.Module):
    """A parametrization: divides each row of a weight by its length and an eps."""

    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, weight):
        return weight / (weight.norm(dim=-1, keepdim=True) + self.eps)
