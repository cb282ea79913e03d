"""The update rules of optimizers ("laws") in plain tensor operations, and for each a row that says what it needs.

A law is the reference: it runs on every device, and faster kernels are tested against it. Its order of operations is
part of the contract: a compiled loop can give the same bits if it does the same operations, each rounded once, and
fuses no multiplication with an addition (`-ffp-contract=off`). Coefficients are computed in double and rounded once to
the dtype of the update. Square roots are taken in double, because torch's fp32 square root on a CPU is off by one unit
in the last place for some values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.torch_internals import foreach_norm
from halfstep.train.kernels.batch import Batch, Code, Gradients, Options, as_real, in_layout_of
from halfstep.train.processes.shards import like, local, spread, whole

Number = float | Tensor
_NOISY = 0.9
Group = Mapping[str, Any]  # a param group as it is now; schedulers change it

# An optimizer's update: yields, parameter by parameter, the new weight and the new states, in the order of its row. It
# gets full weights and full, unscaled gradients (layout `full`), and changes none of them.
Law = Callable[[Batch, Group], Iterator[Sequence[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """How halfstep updates the parameters of a class of optimizers: a law, what it needs, and its faster kernels."""

    reads: tuple[str, ...]  # the options of a param group that the law reads; with others the optimizer's own step runs
    states: Callable[[Group], tuple[str, ...]]  # their names, in the order in which law and kernels take them
    law: Law
    scalars: tuple[str, ...] = ()  # the states that hold one number per weight (0-dim)
    start: float = 0.0  # what a new state holds; -0.0 is the zero to which a sum adds any value without a change
    counts: bool = False  # its state has a "step" for each parameter
    whole: bool = False  # it needs all elements of a weight at once, as for its norm: never with `native`
    sparse: bool = False  # it takes sparse gradients
    clips: bool = False  # it clips the gradients of all groups together, to the norm in the option "max_grad_norm"
    decoupled: Callable[[Group], bool] = lambda group: False  # whether weight decay is of the weight, not the gradient
    native: str | None = None  # the name of its struct in train/kernels/optimizers.h
    triton: str | None = None  # the name of its kernel in train/kernels/triton.py
    fused: str | None = None  # the name of torch's own kernel in train/optim/implementations.py
    numbers: Callable[[Group], tuple[float, ...]] = lambda group: ()  # of its own that `native` and `triton` take
    compiled: Callable[[Group], bool] = lambda group: True  # whether these three know what the options ask for
    codes: Callable[[Group], tuple[Code, ...]] = lambda group: ()  # of the states in 8 bits; other states stay fp32
    coarse: bool = True  # whether 8 bits are enough for them; else bf16
    gathers: bool = False  # it takes whole matrices, and gathers those of sharded weights

    def options(self, group: Group) -> Options:
        """Returns the numbers that compiled kernels take."""
        decoupled, numbers = self.decoupled(group), self.numbers(group)
        return Options(group["lr"], group["weight_decay"], group.get("maximize", False), decoupled, numbers)

    def factors(self, groups: Sequence[Group], grads: Sequence[Tensor], factor: Tensor | None) -> list[Tensor | None]:
        """Returns, for each param group, `factor` (0-dim fp32; None: 1) times what clips its gradients, if any does."""
        # An infinite or NaN norm gives 0 or NaN, so that a non-finite gradient is still non-finite after clipping.
        limits = [group["max_grad_norm"] if self.clips else None for group in groups]
        if not grads or not any(limits):
            return [factor] * len(limits)
        norm = _norm(grads, grads[0].device if factor is None else factor.device)
        # The numbers are tensors on the CPU, which a kernel takes as arguments: one launch each.
        limits = [limit and torch.tensor(float(limit), dtype=norm.dtype, device="cpu") / norm for limit in limits]
        own = torch.ones((), dtype=torch.float32, device="cpu") if factor is None else factor
        return [factor if limit is None else limit.minimum(own).to(torch.float32) for limit in limits]


def uncoded(row: Row, group: Group) -> tuple[str, ...]:
    """Returns the states of a param group that can only be kept in fp32."""
    return row.states(group)[len(row.codes(group)) :]


def write(law: Law, group: Group, batch: Batch, found: Tensor) -> None:
    """Updates full weights and states in place by `law`; changes nothing if `found` is true."""
    # `torch.where` chooses the old or the new values, because multiplying an update by zero would keep its NaNs.
    held = zip(batch.weights, *batch.states.values(), strict=True)
    for old, new in zip(held, law(batch, group), strict=True):
        for tensor, value in zip(old, new, strict=True):
            torch.where(found, tensor, value, out=tensor)


def adam(batch: Batch, group: Group) -> Iterator[list[Tensor]]:
    """Kingma & Ba 2015, algorithm 1; amsgrad is Reddi et al. 2018, decoupled weight decay Loshchilov & Hutter 2019."""
    (beta1, beta2), eps, lr = group["betas"], group["eps"], precise(group["lr"], batch)
    sizes, roots = bias_corrections(batch, group["betas"], corrected=group.get("bias_correction", True), lr=lr)
    rows = zip(decayed(batch, group, decoupled=group["decoupled_weight_decay"]), sizes, roots, strict=True)
    for (w, g, (mean, square, *peaks)), size, correction in rows:
        m = mean * beta1 + g * (1 - beta1)
        v = square * beta2 + (g * (1 - beta2)) * g  # in torch's order: g * g may overflow
        highest = [torch.maximum(peak, v) for peak in peaks]
        (divisor,) = highest or [v]
        yield [w - (m / (root(divisor) / correction + eps)) * size, m, v, *highest]


ADAM = Row(
    reads=("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize", "bias_correction"),
    states=lambda group: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq"),
    law=adam,
    counts=True,
    decoupled=lambda group: bool(group["decoupled_weight_decay"]),
    native="adam",
    triton="adam",
    fused="adam",
    numbers=lambda group: (*group["betas"], group["eps"]),
    compiled=lambda group: bool(group.get("bias_correction", True)),  # as these always do
    codes=lambda group: (_signed(group["betas"][0]), Code(signed=False, stochastic=True)),
)


def sgd(batch: Batch, group: Group) -> Iterator[list[Tensor]]:
    """Sutskever et al. 2013, as in torch's documentation."""
    lr, momentum = rounded(group["lr"], batch), group["momentum"]
    for w, g, states in decayed(batch, group, decoupled=False):
        if not states:
            yield [w - g * lr]
            continue
        held = states[0] * momentum + g
        yield [w - (g + held * momentum if group["nesterov"] else held) * lr, held]


# Not with dampening: the first momentum is the gradient, of which a law that starts from zero would take a part.
SGD = Row(
    reads=("lr", "weight_decay", "maximize", "momentum", "nesterov"),
    states=lambda group: ("momentum_buffer",) if group["momentum"] else (),
    law=sgd,
    start=-0.0,
    sparse=True,
    native="sgd",
    triton="sgd",
    fused="sgd",
    numbers=lambda group: (group["momentum"], group["nesterov"]),
    codes=lambda group: (Code(signed=True, stochastic=True),),
)


def lion(batch: Batch, group: Group) -> Iterator[list[Tensor]]:
    """Chen et al. 2023, algorithm 2."""
    (beta1, beta2), lr = group["betas"], rounded(group["lr"], batch)
    for w, g, (m,) in decayed(batch, group, decoupled=True):
        mixed = m * beta1 + g * (1 - beta1)
        sign = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0, which would train on
        yield [w - sign * lr, m * beta2 + g * (1 - beta2)]


LION = Row(
    reads=("lr", "betas", "weight_decay", "maximize"),
    states=lambda group: ("exp_avg",),
    law=lion,
    decoupled=lambda group: True,
    native="lion",
    triton="lion",
    numbers=lambda group: tuple(group["betas"]),
    codes=lambda group: (_signed(group["betas"][1]),),
)


def lamb(batch: Batch, group: Group) -> Iterator[list[Tensor]]:
    """You et al. 2020, algorithm 2."""
    (beta1, beta2), eps, lr = group["betas"], group["eps"], precise(group["lr"], batch)
    share = 1 - beta1 if group["grad_averaging"] else 1.0
    means, roots = bias_corrections(batch, group["betas"], corrected=group["bias_correction"])
    decay, decoupled = group["weight_decay"], group["decoupled_weight_decay"]
    rows = zip(batch.weights, batch.grads, *batch.states.values(), means, roots, strict=True)
    for w, grad, mean, square, of_mean, of_root in rows:
        g = grad + w * decay if decay and not decoupled else grad
        m = mean * beta1 + g * share
        v = square * beta2 + (g * g) * (1 - beta2)
        u = (m / of_mean) / (root(v) / of_root + eps)
        if decay and decoupled:
            u = u + w * decay
        trust = torch.ones((), dtype=widest(w.device), device=w.device)
        if group["always_adapt"] or decay:
            size, length = (torch.linalg.vector_norm(t, dtype=trust.dtype) for t in (w, u))
            trust = torch.where((size > 0) & (length > 0), size / length, trust)
        yield [w - u * (trust * lr).to(batch.dtype), m, v]


LAMB = Row(
    reads=(
        "lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "max_grad_norm",
        "decoupled_weight_decay", "always_adapt",
    ),
    states=lambda group: ("exp_avg", "exp_avg_sq"),
    law=lamb,
    counts=True,
    whole=True,
    clips=True,
    triton="lamb",
    numbers=lambda group: (
        *group["betas"], group["eps"], group["bias_correction"], group["grad_averaging"],
        not group["decoupled_weight_decay"], group["always_adapt"] or group["weight_decay"] != 0, 2,
    ),
)  # fmt: skip


def novograd(batch: Batch, group: Group) -> Iterator[list[Tensor]]:
    """Ginsburg et al. 2019, algorithm 1."""
    (beta1, beta2), lr, decay = group["betas"], rounded(group["lr"], batch), group["weight_decay"]
    share = 1 - beta1 if group["grad_averaging"] else 1.0
    means, roots = bias_corrections(batch, group["betas"], corrected=group["bias_correction"])
    rows = zip(batch.weights, batch.grads, *batch.states.values(), batch.steps, means, roots, strict=True)
    for w, g, mean, held, step, of_mean, of_root in rows:
        before, wide = held.to(widest(g.device)), widest(g.device)
        if group["norm_type"] == 2:
            size = torch.linalg.vector_norm(g, dtype=wide)
            mixed = (before.square() * beta2 + size.square() * (1 - beta2)).sqrt()
        else:
            size = torch.linalg.vector_norm(g, torch.inf, dtype=wide)
            mixed = before * beta2 + size * (1 - beta2)
        if not group["init_zero"]:
            mixed = torch.where(step.to(g.device) == 1, size, mixed)
        norm = mixed.to(held.dtype)
        divisor = norm / of_root + group["eps"]
        if group["reg_inside_moment"]:
            m = mean * beta1 + (g / divisor + w * decay) * share
            u = m / of_mean
        else:
            m = mean * beta1 + g * share
            u = (m / of_mean) / divisor + w * decay
        yield [w - u * lr, m, norm]


NOVOGRAD = Row(
    reads=(
        "lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "reg_inside_moment", "norm_type",
        "init_zero",
    ),
    states=lambda group: ("exp_avg", "norm"),
    law=novograd,
    scalars=("norm",),
    counts=True,
    whole=True,
    triton="novograd",
    numbers=lambda group: (
        *group["betas"], group["eps"], group["bias_correction"], group["grad_averaging"], group["reg_inside_moment"],
        not group["init_zero"], group["norm_type"],
    ),
)  # fmt: skip


def muon(batch: Batch, group: Group) -> Iterator[list[Tensor]]:
    """Jordan et al. 2024, as torch.optim.Muon, operation by operation."""
    lr, momentum, name = group["lr"], group["momentum"], group["adjust_lr_fn"]
    for w, g, (held,), owner in zip(
        batch.weights, batch.grads, zip(*batch.states.values(), strict=True), batch.owners, strict=True
    ):
        m = held.lerp(g, 1 - momentum)
        u = g.lerp(m, momentum) if group["nesterov"] else m
        own, (rows, columns) = local(owner), owner.shape
        matrix = u.as_strided(own.shape, own.stride())
        matrix = whole(like(owner, matrix.bfloat16()))  # as it is read
        o = local(spread(_orthogonal(matrix, group, emulate=batch.emulate).contiguous(), owner))
        o = in_layout_of(o, own).as_strided(w.shape, w.stride())
        ratio = {"match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}.get(name, math.sqrt(max(1, rows / columns)))
        if isinstance(lr, Tensor):
            yield [w * rounded(1 - lr * group["weight_decay"], batch) - o.to(w.dtype) * rounded(lr * ratio, batch), m]
        else:
            yield [torch.add(w * (1 - lr * group["weight_decay"]), o, alpha=-lr * ratio), m]


MUON = Row(
    reads=("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    states=lambda group: ("momentum_buffer",),
    law=muon,
    whole=True,
    codes=lambda group: (Code(signed=True, stochastic=True),),
    coarse=False,
    gathers=True,
)


def _orthogonal(matrix: Tensor, group: Group, *, emulate: bool) -> Tensor:
    """Returns the bf16 matrix that Newton and Schulz's iteration makes of another one; emulated, of fp32 products."""
    a, b, c = group["ns_coefficients"]
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix.bfloat16().clone() if wide else matrix.bfloat16().clone().T
    x.div_(x.norm().clamp(min=group["eps"]))

    def product(of: Callable[..., Tensor], *tensors: Tensor, **factors: float) -> Tensor:
        return of(*(t.float() for t in tensors), **factors).bfloat16() if emulate else of(*tensors, **factors)

    for _ in range(group["ns_steps"]):
        gram = product(torch.matmul, x, x.T)
        x = product(torch.addmm, x, product(torch.addmm, gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


def _signed(beta: float) -> Code:
    """Returns the code of a running mean: to nearest where the gradients' noise moves it by more than a code does."""
    return Code(signed=True, stochastic=beta > _NOISY)


def decayed(batch: Batch, group: Group, *, decoupled: bool) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Yields each weight, its gradient and its states, after weight decay: of the weight itself if `decoupled`."""
    # If "maximize" is true, the gradient is negated first, so that an update always descends.
    decay, kept = group["weight_decay"], None
    if decay and decoupled:
        kept = rounded(1 - precise(group["lr"], batch) * decay, batch)
    for w, grad, *states in zip(batch.weights, batch.grads, *batch.states.values(), strict=True):
        g = -grad if group["maximize"] else grad
        if kept is not None:
            yield w * kept, g, states
        else:
            yield w, g + w * decay if decay else g, states


def precise(value: Number, batch: Batch) -> Number:
    """Moves a tensor to the batch's device, in the dtype that `widest` returns; returns a Python number as it is."""
    return _moved(value, batch, widest(batch.device))


def rounded(value: Number, batch: Batch) -> Number:
    """Moves a tensor to the batch's device and rounds it to the update's dtype; returns a Python number as it is."""
    return _moved(value, batch, batch.dtype)


def _moved(value: Number, batch: Batch, dtype: torch.dtype) -> Number:
    if not isinstance(value, Tensor):
        return value
    # From a CPU to another device as a number, since a copy would wait for the device.
    return float(value) if value.is_cpu and batch.device.type != "cpu" else value.to(batch.device, dtype)


def bias_corrections(
    batch: Batch, betas: tuple[float, float], *, corrected: bool, lr: Number | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns for each parameter the divisors of Adam's bias correction, 1 - beta1^t and sqrt(1 - beta2^t)."""
    # `t` is the step count of the parameter. With `lr`, the first list has lr / (1 - beta1^t) instead. The elements are
    # 0-dim tensors in the dtype of the update.
    beta1, beta2 = betas
    steps = torch.stack(batch.steps).to(batch.device, widest(batch.device))
    if not corrected:
        steps = torch.full_like(steps, torch.inf)  # both powers become 0
    means, roots = 1 - beta1**steps, (1 - beta2**steps).sqrt()
    firsts = means if lr is None else lr / means
    return list(firsts.to(batch.dtype).unbind()), list(roots.to(batch.dtype).unbind())


def root(t: Tensor) -> Tensor:
    """Returns the square root of each element, correctly rounded to the dtype of `t`."""
    return t.to(widest(t.device)).sqrt().to(t.dtype)


def widest(device: torch.device) -> torch.dtype:
    """Returns the widest float dtype that the device supports; coefficients are computed in it."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the L2 norm over all elements of `grads`, in a dtype in which no square of an fp32 value overflows."""
    if isinstance(grads, Gradients) and grads.norm is not None:
        return grads.norm.to(device)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}  # few launches
    for grad in grads:
        if grad.numel():
            alike.setdefault((grad.device, grad.dtype), []).append(as_real(grad))
    each = (torch.stack(list(foreach_norm(held, 2, dtype=widest(place)))) for (place, _), held in alike.items())
    norms = [torch.linalg.vector_norm(held).to(device) for held in each]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm
