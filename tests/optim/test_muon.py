"""Muon's row: torch.optim.Muon to the bit, on masters, skipped, of other memory orders."""

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Muon

import halfstep
from halfstep.errors import SetupError
from halfstep.train.optim import implementations, moments
from halfstep.train.optim.masters import MasterStore
from halfstep.train.optim.moments import random_bits
from tests.optim.cases import MUONS, TRUE, Run, assert_same_bits, gradients, one_pass

OPTIONS = pytest.mark.parametrize("options", [options for _, options in MUONS], ids=range(len(MUONS)))


def matrices():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(16, 24, generator=g), torch.randn(40, 8, generator=g), torch.randn(9, 5, generator=g).t()]


def run(options, kind=None):
    params = [Parameter(value) for value in matrices()]
    optimizer, store = Muon(params, **options), MasterStore(kind or "none", torch.bfloat16)
    for p in params if kind else ():
        store.track(p)
    return Run(params, optimizer, store, one_pass(optimizer, store))


@OPTIONS
def test_weights_and_momentum_are_torchs_to_the_bit(options):
    ours, theirs = run(options), [Parameter(value) for value in matrices()]
    peer = Muon(theirs, **options)
    exact = not isinstance(options["lr"], torch.Tensor)
    for seed in range(5):
        grads = gradients(ours.params, seed)
        ours.step(grads)
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad.clone()
        peer.step()
    for p, q in zip(ours.params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    for index, entry in peer.state_dict()["state"].items():
        assert torch.equal(ours.optimizer.state_dict()["state"][index]["momentum_buffer"], entry["momentum_buffer"])


def test_masters_go_as_full_weights_do_and_a_skip_changes_nothing():
    full, split = run({"lr": 0.02}), run({"lr": 0.02}, "split")
    for seed in range(4):
        grads = [grad.bfloat16() for grad in gradients(full.params, seed)]
        full.step([grad.float() for grad in grads])
        split.step(grads)
    assert_same_bits(split.values(), full.values())
    before = split.everything()
    split.step([torch.full_like(p, torch.nan) for p in split.params], found=TRUE)
    assert_same_bits(split.everything(), before)


def test_emulated_products_are_those_of_bf16_computed_in_fp32(monkeypatch):
    seen, addmm = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *ts, **factors: seen.append(ts[0].dtype) or addmm(*ts, **factors))
    runs = [run({"lr": 0.02}), run({"lr": 0.02})]
    runs[1].stepper._emulates = lambda: True
    for each, dtype in zip(runs, (torch.bfloat16, torch.float32), strict=True):
        seen.clear()
        each.step(gradients(each.params, 0))
        assert {*seen} == {dtype}
    for p, q in zip(runs[0].params, runs[1].params, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.02 * 0.02)


@pytest.mark.parametrize("moments", ["full", "bf16"])
def test_a_session_trains_with_it_without_a_wait(moments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 8, bias=False))
    optimizer = Muon(model.parameters(), lr=0.02)
    x, y = torch.randn(32, 64), torch.randn(32, 8)
    with halfstep.initialize(model, optimizer, "O2", low="bf16", moments=moments) as session:
        losses = []
        for _ in range(10):
            losses.append(torch.nn.functional.mse_loss(model(x), y))
            session.backward(losses[-1])
            assert not session.step().synced
            optimizer.zero_grad()
        assert losses[-1] < 0.7 * losses[0]
        status, full = session.status(), moments == "full"
        assert ("(moments in bf16 13.5 KiB)" in str(status)) is not full
        assert status.moments == ({} if full else {"bf16": 2 * 96 * (64 + 8)})
        bytes_of_each = status.memory["optimizer"] / sum(p.numel() for p in model.parameters())
        assert bytes_of_each == pytest.approx(4 if full else 2, abs=0.3)


def test_random_bits_are_drawn_for_parts_of_a_matrix(monkeypatch):
    found, drawn = [], []
    for limit in (2**19, 128):
        monkeypatch.setitem(implementations._CHUNK, "cpu", limit)
        monkeypatch.setattr(
            moments, "random_bits", lambda *args, of=random_bits, **kw: drawn.append(args[1]) or of(*args, **kw)
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 96, bias=False)
        optimizer = Muon(model.parameters(), lr=0.02)
        options = {"low": "bf16", "moments": "bf16", "rounding": "stochastic"}
        with halfstep.initialize(model, optimizer, "O3", **options) as session:
            session.backward(model(torch.ones(2, 64)).sum())
            session.step()
            found.append([model.weight.clone(), optimizer.state_dict()["state"][0]["momentum_buffer"]])
    assert_same_bits(*found)
    assert {count for count in drawn if count < 6144} == {128}
    assert len(drawn) == 2 + 2 * 48


def test_eight_bits_are_refused():
    model = torch.nn.Linear(8, 8, bias=False)
    with pytest.raises(SetupError, match=r'moments="8bit" is too coarse for Muon.*use moments="bf16"'):
        halfstep.initialize(model, Muon(model.parameters()), "O2", low="bf16", moments="8bit")
