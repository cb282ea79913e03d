"""What the tests of optim share: options, parameters of awkward shapes, and runs over made-up gradients."""

from dataclasses import dataclass
from functools import partial

import torch
from torch.optim import SGD, Adam, AdamW, Muon

from halfstep.train.kernels.batch import Batch
from halfstep.train.optim.implementations import IMPLEMENTATIONS
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.moments import Moments, _tensors
from halfstep.train.optim.optimizers import TABLE, Lamb, Lion, NovoGrad
from halfstep.train.optim.step import OnePassStepper

ADAMS = [
    (Adam, {"lr": 1e-2}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    (Adam, {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3, "maximize": True}),
    (AdamW, {"lr": 1e-2}),
    (AdamW, {"lr": 1e-2, "weight_decay": 0.3, "amsgrad": True, "maximize": True}),
    (AdamW, {"lr": torch.tensor(1e-2), "weight_decay": 0.3}),
]
SGDS = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": torch.tensor(0.1), "momentum": 0.5, "maximize": True}),
]
LIONS = [
    (Lion, {"lr": 1e-2}),
    (Lion, {"lr": 1e-2, "betas": (0.5, 0.8), "weight_decay": 0.3, "maximize": True}),
    (Lion, {"lr": torch.tensor(1e-2), "weight_decay": 0.3}),
]
LAMBS = [
    (Lamb, {"lr": 1e-2}),
    (Lamb, {"lr": 1e-2, "weight_decay": 0.0}),
    (Lamb, {"lr": 1e-2, "weight_decay": 0.0, "always_adapt": True, "max_grad_norm": None}),
    (Lamb, {"lr": torch.tensor(1e-2), "decoupled_weight_decay": False, "grad_averaging": False}),
    (Lamb, {"lr": 1e-2, "betas": (0.5, 0.8), "eps": 1e-3, "bias_correction": False, "max_grad_norm": 100.0}),
]
NOVOGRADS = [
    (NovoGrad, {"lr": 1e-2}),
    (NovoGrad, {"lr": 1e-2, "weight_decay": 0.1, "init_zero": True}),
    (NovoGrad, {"lr": 1e-2, "weight_decay": 0.1, "reg_inside_moment": True, "betas": (0.95, 0.98)}),
    (NovoGrad, {"lr": torch.tensor(1e-2), "norm_type": 0, "grad_averaging": False, "weight_decay": 0.1}),
    (NovoGrad, {"lr": 1e-2, "norm_type": 0, "bias_correction": False, "eps": 1e-3, "init_zero": True}),
]
OWN = ADAMS + SGDS + LIONS
MUONS = [  # of matrices alone: tests/optim/test_muon.py
    (Muon, {"lr": 0.02}),
    (Muon, {"lr": 0.02, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0}),
    (Muon, {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-5}),
    (Muon, {"lr": torch.tensor(0.02), "ns_coefficients": (2.0, -1.5, 0.5)}),
]
WHOLE = LAMBS + NOVOGRADS  # which take whole weights, and so have no loop for a CPU
OWN_STEP = [  # options that a row does not read: with these the optimizer's own step runs
    (Adam, {"differentiable": True}),
    (AdamW, {"differentiable": True}),
    (SGD, {"differentiable": True}),
    (SGD, {"dampening": 0.5, "momentum": 0.9}),
]


def textbook_adam(
    w, grads, *, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled, amsgrad=False, maximize=False,
    corrected=True,
):  # fmt: skip
    """Kingma & Ba 2015, algorithm 1; Reddi et al. 2018 (amsgrad); Loshchilov & Hutter 2019, algorithm 2 (decoupled)."""
    m = v = peak = torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        g = -g if maximize else g
        if decoupled:
            w = w - lr * weight_decay * w
        else:
            g = g + weight_decay * w
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        if amsgrad:  # torch takes the highest v, then corrects it
            peak = torch.maximum(peak, v)
        c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if corrected else (1, 1)
        m_hat, v_hat = m / c1, (peak if amsgrad else v) / c2
        w = w - lr * m_hat / (v_hat.sqrt() + eps)
    return w


def textbook_sgd(w, grads, *, lr, momentum=0.0, weight_decay=0.0, nesterov=False, maximize=False):
    """Sutskever et al. 2013 in the form of torch's documentation."""
    buffer = None
    for g in grads:
        g = (-g if maximize else g) + weight_decay * w
        buffer = g if buffer is None else momentum * buffer + g
        step = g + momentum * buffer if nesterov else buffer if momentum else g
        w = w - lr * step
    return w


def textbook_lion(w, grads, *, lr, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
    """Chen et al. 2023, algorithm 2."""
    m = torch.zeros_like(w)
    for g in grads:
        g = -g if maximize else g
        update = torch.sign(betas[0] * m + (1 - betas[0]) * g)
        w = w - lr * (update + weight_decay * w)
        m = betas[1] * m + (1 - betas[1]) * g
    return w


TEXTBOOKS = {
    Adam: partial(textbook_adam, decoupled=False),
    AdamW: partial(textbook_adam, decoupled=True, weight_decay=1e-2),
    SGD: textbook_sgd,
    Lion: textbook_lion,
}

HERE = [name for name in IMPLEMENTATIONS if name != "triton"]  # on a CPU; that one has tests/kernels/test_triton.py

TRUE = torch.tensor(True)
FALSE = torch.tensor(False)


def parameters(dtype=torch.float32):
    """A matrix, a vector, a scalar, a channels_last kernel and a part of a larger tensor, in this order."""
    g = torch.Generator().manual_seed(1)
    kernel = torch.randn(4, 3, 3, 3, generator=g).to(memory_format=torch.channels_last)
    part = torch.randn(6, 8, generator=g)[:, ::2]
    values = [torch.randn(7, 19, generator=g), torch.randn(33, generator=g), torch.randn((), generator=g), kernel, part]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def gradients(params, seed, scale=1.0):
    """Gradients as autograd leaves them, in the dtype of their parameter; those of the kernel come contiguous."""
    g = torch.Generator().manual_seed(100 + seed)
    return [(torch.randn(p.shape, generator=g) * scale).to(p.dtype) for p in params]


def options_of(optimizer):
    return TABLE[type(optimizer)].options(optimizer.param_groups[0])


def has_kernel(implementation, cls, options):
    """Whether an implementation computes the update of an optimizer with these options, by its row."""
    return takes(implementation, cls(parameters(), **options), torch.zeros(3))


def takes(implementation, optimizer, weight, layout="full", extras=()):
    """Whether an implementation updates a weight by the row of an optimizer."""
    batch = Batch(layout, [weight], [*extras], [weight])
    return IMPLEMENTATIONS[implementation](TABLE[type(optimizer)], batch, optimizer.param_groups[0]) is not None


@dataclass
class Run:
    params: list
    optimizer: object
    store: MasterStore
    stepper: OnePassStepper
    moments: Moments | None = None

    def step(self, grads, factor=None, found=FALSE):
        self.stepper.step(self.params, grads, factor, found)

    def values(self):
        return [self.store.full(p).clone() for p in self.params]

    def everything(self):
        """All that a step may change, bit for bit: weights, extras, state and step counts."""
        extras = [self.store.extra(p) for p in self.store] if self.store.kind != "none" else []
        state = [
            value
            for entry in self.optimizer.state_dict()["state"].values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]
        codes = [t for _, batch in self.moments._held.values() for t in _tensors(batch)] if self.moments else []
        return [bits(t).clone() for t in [*self.params, *extras, *state, *codes]]


def one_pass(optimizer, store, implementations=IMPLEMENTATIONS, moments=None):
    return OnePassStepper(optimizer, store, TABLE[type(optimizer)], implementations, moments=moments)


def own_run(
    cls, options, kind=None, low=torch.bfloat16, implementation=None, dtype=torch.float32, *, params=None, kept=None
):
    """A run of halfstep's update on `parameters()`: stored full (`kind` None), or low with masters of a kind.

    Moments are `kept` as a plan says; with those words weights without a master are rounded stochastically.
    """
    params = parameters(dtype) if params is None else params
    optimizer = cls(params, **options)
    store = MasterStore(kind or "none", low)
    for p in params if kind else ():
        store.track(p)
    table = IMPLEMENTATIONS if implementation is None else {implementation: IMPLEMENTATIONS[implementation]}
    moments = kept and Moments(optimizer, kept, (), str, rounds=kind == "none")
    return Run(params, optimizer, store, one_pass(optimizer, store, table, moments), moments)


def matrices():
    """Weights large enough for codes: in rows of whole groups and of others, longer than a part, in another order."""
    g = torch.Generator().manual_seed(2)
    values = [torch.randn(shape, generator=g) for shape in [(40, 128), (42, 100), (3, 7000), (4100, 1), (2, 3, 700)]]
    values.append(torch.randn(16, 33, 3, 3, generator=g).to(memory_format=torch.channels_last))
    values.append(torch.randn(100, 50, generator=g).t())  # whose slices are not in one piece
    return [torch.nn.Parameter(value) for value in values]


def as_held(full):
    """What a split master holds of fp32 values: of a NaN that would round to no NaN the nearest that does."""
    pattern = full.view(torch.int32)
    sign, magnitude = pattern & -(2**31), pattern & 0x7FFFFFFF
    magnitude = torch.where(full.isnan(), magnitude.clamp(0x7F808000, 0x7FFF7FFF), magnitude)
    return (sign | magnitude).view(torch.float32)


def bits(t):
    """The bits of a tensor: what comparisons of NaN and of -0.0 need."""
    t = t.detach().contiguous()
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def assert_same_bits(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(bits(one), bits(other), rtol=0, atol=0)
