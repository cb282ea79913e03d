"""The CPU's attention backward in a low format: fp32's numbers rounded once, in sessions only, and gone after them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.machine import AMX_FP16, AVX512_BF16, PROCESSORS
from halfstep.train.cast.opkernels import goes_wide

NAME = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


class Attention(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.causal = causal

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)


def inputs(length, width, dtype=torch.bfloat16, requires_grad=True):
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(2, 3, length, width, generator=g).to(dtype) for _ in range(4)]
    return [t.requires_grad_(requires_grad) for t in made[:3]], made[3]


def session_on(low="bf16"):
    model = Attention()
    return halfstep.initialize(model, torch.optim.SGD([model.weight], lr=0.1), "O1", low=low, emulate=False)


def backward(qkv, grad, session=None, **kwargs):
    out = F.scaled_dot_product_attention(*qkv, **kwargs)
    if session is None:
        return torch.autograd.grad(out, qkv, grad)
    with session._casting.backward():
        return torch.autograd.grad(out, qkv, grad)


def by_hand(qkv, grad, mask=None):
    """Attention written out in fp32, from the forward pass's low result: dS = P * (dP - rowsum(dO * O))."""
    q, k, v = (t.detach().float() for t in qkv)
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    if mask is None:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    else:
        scores = scores + mask.float()
    p = scores.softmax(-1)
    out = F.scaled_dot_product_attention(*(t.detach() for t in qkv), attn_mask=mask, is_causal=mask is None).float()
    grad = grad.float()
    dp = grad @ v.transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) / q.size(-1) ** 0.5
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "width"), [(1, 8), (17, 64), (128, 32), (128, 64)])
def test_gradients_are_fp32s_rounded_once(length, width, masked):
    qkv, grad = inputs(length, width)
    mask = torch.randn(length, length).bfloat16() if masked else None
    session = session_on()
    got = backward(qkv, grad, session, attn_mask=mask, is_causal=not masked)
    session.close()
    for one, want in zip(got, by_hand(qkv, grad, mask), strict=True):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one.float(), want, rtol=2**-8 + 1e-4, atol=2e-4)  # half a place of bf16


LIMITS = [(row, width, longest) for row in (AMX_FP16, AVX512_BF16) for width, longest in row.wide_backward]


@pytest.mark.slow_but("FP16 128", "BF16 64")
@pytest.mark.parametrize(("row", "width", "longest"), LIMITS, ids=[f"{r.name} {w}" for r, w, _ in LIMITS])
def test_up_to_the_limits_of_the_cpu_it_is_wide_and_beyond_torchs_own(row, width, longest, on_processor):
    on_processor(row)
    session = session_on()
    for length, wide in ((longest, True), (longest + 1, False)):
        qkv, grad = inputs(length, width)
        plain = backward(qkv, grad)
        assert all(map(torch.equal, plain, backward(qkv, grad, session))) is not wide
        assert all(map(torch.equal, plain, backward(qkv, grad)))  # outside the session


def test_the_longer_of_queries_and_keys_counts(on_processor):
    on_processor(AVX512_BF16)
    session = session_on()
    for queries, keys, wide in ((128, 128, True), (128, 129, False), (129, 128, False)):
        (q, *_), grad = inputs(queries, 64)
        (_, k, v), _ = inputs(keys, 64)
        plain, inside = (backward((q, k, v), grad, *one) for one in ((), (session,)))
        assert all(map(torch.equal, plain, inside)) is not wide


def test_sessions_of_different_measurements_keep_to_their_own(on_processor):
    qkv, grad = inputs(200, 64)
    plain = backward(qkv, grad)
    on_processor(AMX_FP16)
    one = session_on()
    on_processor(AVX512_BF16)
    other = session_on()
    assert not all(map(torch.equal, plain, backward(qkv, grad, one)))
    assert all(map(torch.equal, plain, backward(qkv, grad, other)))
    one.close()
    other.close()


def test_the_limits_are_those_that_were_measured():
    with_amx = {16: 512, 32: 512, 33: 256, 64: 256, 65: 128, 96: 128, 128: 128, 129: None}
    without = {16: 128, 32: 128, 33: 128, 64: 128, 65: None, 128: None}
    for row in PROCESSORS:
        for width, longest in (with_amx if "AMX" in row.name else without).items():
            assert goes_wide(row.wide_backward, width, longest or 1) is (longest is not None)
            assert not goes_wide(row.wide_backward, width, (longest or 0) + 1)


def test_fp32_attention_is_torchs_own():
    qkv, grad = inputs(64, 32, torch.float32)
    plain = backward(qkv, grad)
    session = session_on()
    assert all(map(torch.equal, plain, backward(qkv, grad, session)))


def test_two_sessions_and_after_the_last_one_the_kernel_is_gone():
    qkv, grad = inputs(32, 32)
    plain = backward(qkv, grad)
    one, other = session_on(), session_on("fp16")
    wide = backward(qkv, grad, one)
    one.close()
    assert all(map(torch.equal, wide, backward(qkv, grad, other)))
    other.close()
    registered = torch._C._dispatch_dump(NAME)
    assert "backward.py" not in registered
    assert "opregistry.py" not in registered
    assert all(map(torch.equal, plain, backward(qkv, grad)))


def test_a_session_that_emulates_registers_no_kernel_for_it():
    model = nn.Linear(4, 4)
    before = torch._C._dispatch_dump(NAME)
    session = halfstep.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1", low="bf16", emulate=True)
    assert torch._C._dispatch_dump(NAME) == before
    session.close()


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gradient(compiled):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = halfstep.initialize(model, optimizer, "O2", low="bf16", emulate=False)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    session.backward(run(torch.randn(4, 12, 16)).square().sum())
    found = model.qkv.weight.grad.clone()
    session.close()
    torch._dynamo.reset()
    return found


def test_a_compiled_model_has_the_same_gradients():
    assert torch.equal(gradient(False), gradient(True))
