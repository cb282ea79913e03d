"""Features two by two: each pair of settings trains, skips and resumes bit for bit in some row, or is refused."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.errors import HalfstepError

FACTORS = {
    "level": ("O0", "O1", "O2", "O3"),
    "low": ("bf16", "fp16"),
    "moments": ("full", "bf16", "8bit"),
    "rounding": ("nearest", "stochastic"),
    "engine": ("alone", "DDP", "FSDP2"),
    "compiled": (False, True),
    "again": (False, True),  # activation checkpointing
    "accumulate": (1, 2),
}
STEPS, BAD, SAVED = 6, 2, 4


def refusal(row):
    """Returns the words with which a row is refused; None if it trains."""
    if row["rounding"] == "stochastic" and (row["level"], row["low"]) != ("O3", "bf16"):
        return "rounding 'stochastic' is for bf16 weights without a master"
    return None


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def covering(rows):
    """Returns some of the rows, in which all pairs of values are that are in any row."""
    left, chosen = set().union(*map(pairs_of, rows)), []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs_of(row) & left)))
        left -= pairs_of(chosen[-1])
    return chosen


EVERY = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
TRAINED = covering([row for row in EVERY if refusal(row) is None])
REFUSED = covering([row for row in EVERY if refusal(row) is not None])


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


class Opened:
    """A model and its session, with the settings of a row."""

    def __init__(self, row):
        torch.manual_seed(0)
        self.net, self.row = nn.Sequential(Part(again=row["again"]), Part(again=row["again"]), nn.Linear(32, 4)), row
        if row["compiled"]:
            for part in self.net[:2]:
                part.compile(backend="aot_eager")
        if row["engine"] == "FSDP2":
            policy = halfstep.fsdp_policy(row["level"], low=row["low"])
            for part in (*self.net[:2], self.net):
                fully_shard(part, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        settings = {name: row[name] for name in ("low", "moments", "rounding")}
        settings |= {"rounding": None} if row["rounding"] == "nearest" and row["level"] != "O3" else {}
        self.session = halfstep.initialize(self.net, self.optimizer, row["level"], **settings)
        self.model = nn.parallel.DistributedDataParallel(self.net) if row["engine"] == "DDP" else self.net

    def train(self, first, last):
        skips = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            before = self.state()
            for share in range(self.row["accumulate"]):
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + share))
                loss = self.model(x).square().mean() / self.row["accumulate"]
                bad = step == BAD and self.row["level"] != "O0"
                self.session.backward(loss * torch.inf if bad else loss)
            skips.append(bool(self.session.step(max_norm=1.0).skipped))
            assert not skips[-1] or same(before[:2], self.state()[:2])
        return skips

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


def same(one, other):
    flat = [torch.utils._pytree.tree_leaves(each) for each in (one, other)]
    full = [[t.full_tensor() if hasattr(t, "full_tensor") else t for t in each] for each in flat]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*full, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which dynamo reads
@pytest.mark.slow_but("O2-fp16-bf16-nearest-alone", "O3-bf16-8bit-stochastic-FSDP2", "O2-bf16-full-nearest-DDP")
@pytest.mark.parametrize("row", TRAINED, ids=named)
def test_each_pair_of_settings_trains_skips_and_resumes_bit_for_bit(row, process_group):
    straight = Opened(row)
    skips = straight.train(0, STEPS)
    assert skips[BAD] == (row["level"] != "O0")
    assert sum(skips) <= 1 + (row["low"] == "fp16")  # the loss scale may come down once
    first = Opened(row)
    first.train(0, SAVED)
    second = Opened(row)
    second.load(first.state())
    second.train(SAVED, STEPS)
    assert same(second.state(), straight.state())


@pytest.mark.parametrize("row", REFUSED, ids=named)
def test_each_other_pair_is_refused_by_name(row, process_group):
    with pytest.raises(HalfstepError, match=refusal(row)):
        Opened(row)
