"""Features two by two: each pair of settings trains, skips and resumes bit for bit in some row, or is refused.

Its losses are those of a plain loop in fp32, within a tolerance for the format of its products. Rows under DDP and
FSDP2 run in two processes, of which one has an infinite loss: both skip that step.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import HalfstepError
from tests.replicas import digest

FACTORS = {
    "level": ("O0", "O1", "O2", "O3"),
    "low": ("bf16", "fp16"),
    "products": ("plan", "fp8", "fp8-mx", "nvfp4"),
    "moments": ("full", "bf16", "8bit"),
    "rounding": ("nearest", "stochastic"),
    "engine": ("alone", "DDP", "FSDP2"),
    "compiled": (False, True),
    "again": (False, True),  # activation checkpointing
    "accumulate": (1, 2),
}
BACKEND = "aot_eager"
STEPS, BAD, SAVED, LR = 6, 2, 4, 0.001
# A loss squares values that are products of two rounded ones: 4 roundings of bf16, each up to 2**-8. Those of 8 and 4
# bits, up to 2**-4 and 2**-2, average out over 32 outputs.
CLOSE = {"plan": 2**-6, "fp8": 2**-4, "fp8-mx": 2**-4, "nvfp4": 2**-3}


def refusal(row):
    """Returns the words with which a row is refused; None if it trains."""
    if row["rounding"] == "stochastic" and (row["level"], row["low"]) != ("O3", "bf16"):
        return "rounding 'stochastic' is for bf16 weights without a master"
    if row["products"] != "plan" and (row["level"] in ("O0", "O3") or row["low"] == "fp16"):
        return "products in 8 or 4 bits (need|have)"
    return None


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def covering(rows):
    """Returns some of the rows, in which all pairs of values are that are in any row."""
    pairs = [(row, pairs_of(row)) for row in rows]
    left, chosen = set().union(*(each for _, each in pairs)), []
    while left:
        row, found = max(pairs, key=lambda pair: len(pair[1] & left))
        chosen.append(row)
        left -= found
    return chosen


EVERY = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
TRAINED = covering([row for row in EVERY if refusal(row) is None])
REFUSED = covering([row for row in EVERY if refusal(row) is not None])
FAST = (
    "O2-fp16-plan-8bit-nearest-FSDP2",
    "O3-bf16-plan-full-stochastic-DDP",
    "O2-bf16-nvfp4-bf16-nearest-DDP",
    "O2-bf16-fp8-full-nearest-alone",
)


def named(row):
    return "-".join(str(value) if not isinstance(value, bool) else name * value for name, value in row.items())


class Part(nn.Module):
    def __init__(self, *, again):
        super().__init__()
        self.norm, self.up, self.down, self.again = nn.LayerNorm(32), nn.Linear(32, 160), nn.Linear(160, 32), again

    def run(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)


def made(*, again=False):
    torch.manual_seed(0)
    net = nn.Sequential(Part(again=again), Part(again=again), nn.Linear(32, 4))
    return net, torch.optim.AdamW(net.parameters(), lr=LR)


def loss_of(model, row, rank, share):
    """Returns a share of the loss of a process, which has the same batch in each step."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * rank + share))
    return model(x).square().mean() / row["accumulate"]


def in_fp32(row, skips):
    """Returns the losses of each process where one plain loop in fp32 has all batches, and skips the same steps."""
    net, optimizer = made()
    if (row["level"], row["moments"]) == ("O0", "full"):
        get_state_dict(net, optimizer)  # torch's makes a step with gradients of 0 first, which halfstep's leave out
    losses = []
    for skipped in skips:
        optimizer.zero_grad()
        ranks = range(1 + (row["engine"] != "alone"))
        found = [sum(loss_of(net, row, rank, share) for share in range(row["accumulate"])) for rank in ranks]
        (sum(found) / len(found)).backward()
        losses.append([loss.item() for loss in found])
        if not skipped:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    return list(map(list, zip(*losses, strict=True)))


class Opened:
    """A model and its session, with the settings of a row."""

    def __init__(self, row, rank=0):
        self.net, self.optimizer = made(again=row["again"])
        self.row, self.rank, spread = row, rank, row["engine"] != "alone"
        self.bad = None if row["level"] == "O0" or (spread and rank == 0) else BAD
        if row["compiled"]:
            for part in self.net[:2]:
                part.compile(backend=BACKEND)
        if row["engine"] == "FSDP2":
            policy = halfstep.fsdp_policy(row["level"], low=row["low"])
            for part in (*self.net[:2], self.net):
                fully_shard(part, mp_policy=policy)
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=LR)
        settings = {name: row[name] for name in ("low", "products", "moments", "rounding")}
        settings |= {"rounding": None} if row["rounding"] == "nearest" and row["level"] != "O3" else {}
        self.session = halfstep.initialize(self.net, self.optimizer, row["level"], **settings)
        self.model = nn.parallel.DistributedDataParallel(self.net) if row["engine"] == "DDP" else self.net

    def pass_of(self, step, share):
        last = share == self.row["accumulate"] - 1
        if self.row["engine"] == "FSDP2":
            self.net.set_requires_gradient_sync(last)
        with self.model.no_sync() if self.row["engine"] == "DDP" and not last else nullcontext():
            loss = loss_of(self.model, self.row, self.rank, share)
            self.session.backward(loss * torch.inf if step == self.bad else loss)
        return loss.item()

    def train(self, first, last):
        """Returns the loss and whether it was skipped, for each step."""
        losses, skips = [], []
        for step in range(first, last):
            self.optimizer.zero_grad()
            before = self.state()
            losses.append(sum(self.pass_of(step, share) for share in range(self.row["accumulate"])))
            skips.append(bool(self.session.step(max_norm=1.0).skipped))
            assert not skips[-1] or same(before[:2], self.state()[:2])
        return losses, skips

    def state(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return whole(model), whole(optimizer), self.session.state_dict()

    def load(self, state):
        set_state_dict(self.net, self.optimizer, model_state_dict=state[0], optim_state_dict=state[1])
        self.session.load_state_dict(state[2])


def whole(value):
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def leaves(value):
    found = torch.utils._pytree.tree_leaves(value)
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def same(one, other):
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all([torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs])


def cell(rank, row):
    """Returns the losses of a row, which steps it skipped, whether it resumed bit for bit, and its last weights."""
    straight, first, second = (Opened(row, rank) for _ in range(3))
    losses, skips = straight.train(0, STEPS)
    first.train(0, SAVED)
    second.load(first.state())
    second.train(SAVED, STEPS)
    resumed = same(second.state(), straight.state())
    for each in (straight, first, second):
        each.session.close()
    return losses, skips, resumed, digest(leaves(straight.net.state_dict()))


def pooled(folder, slow):
    rows = [row for row in TRAINED if row["engine"] != "alone"]
    return {named(row): (cell, (row,)) for row in rows if slow or any(name in named(row) for name in FAST)}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which dynamo reads
@pytest.mark.slow_but(*FAST)
@pytest.mark.parametrize("row", TRAINED, ids=named)
def test_each_pair_of_settings_trains_skips_and_resumes_bit_for_bit(row, request):
    if row["engine"] == "alone":
        found = [cell(0, row)]
    else:
        found = [each[named(row)] for each in request.getfixturevalue("found")]
    for (losses, skips, resumed, weights), plain in zip(found, in_fp32(row, found[0][1]), strict=True):
        assert losses == pytest.approx(plain, rel=CLOSE[row["products"]])
        assert losses[-1] < losses[0]
        assert skips[BAD] == (row["level"] != "O0")
        assert sum(skips) <= 1 + (row["low"] == "fp16")  # the loss scale may come down once
        assert resumed
        assert (skips, weights) == (found[0][1], found[0][3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor uses
@pytest.mark.parametrize("row", [r for r in TRAINED if r["compiled"] and r["engine"] == "alone"], ids=named)
def test_pairs_with_compiled_blocks_hold_under_inductor(row, request, monkeypatch):
    monkeypatch.setitem(globals(), "BACKEND", "inductor")
    test_each_pair_of_settings_trains_skips_and_resumes_bit_for_bit(row, request)


@pytest.mark.parametrize("row", REFUSED, ids=named)
def test_each_other_pair_is_refused_by_name(row, process_group):
    with pytest.raises(HalfstepError, match=refusal(row)):
        Opened(row)
