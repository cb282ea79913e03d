# %% [markdown]
# # Tutorial: a run that breaks in fp16
#
# A small model trains on Shakespeare in fp16 on a CPU. It breaks after some steps; halfstep says where and why, and
# names an edit of the plan. With the edit the model trains to the same loss as in fp32. At the end halfstep finds the
# same problem before training. All of it takes seconds: `python examples/tutorial.py`, or cell by cell in an editor.
#
# ## The model
#
# The model reads 64 letters and predicts the next one. Its blocks have a squared ReLU, as in some language models.
# Nothing in it refers to halfstep.

# %%
import gzip
from importlib.resources import files

import torch
from torch import nn
from torch.nn import functional as F

import halfstep

text = gzip.decompress((files("halfstep") / "lab/workloads/data/tinyshakespeare.txt.gz").read_bytes()).decode()
letters = sorted(set(text))
numbers = torch.tensor([letters.index(letter) for letter in text[:200_000]])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.relu(self.linear(x)).square()


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(len(letters), 32)
        self.up = nn.Linear(64 * 32, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(letters))

    def forward(self, seen):
        return self.head(self.norm(self.blocks(self.up(self.embed(seen).flatten(1)))))


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(numbers) - 64, (32,), generator=generator)
        yield torch.stack([numbers[start : start + 64] for start in starts]), numbers[starts + 64]


# %% [markdown]
# ## In fp32
#
# O0 is plain fp32, the baseline for every other format.


# %%
def start(plan, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, halfstep.initialize(model, optimizer, plan, **options)


def train(model, optimizer, session, steps=160):
    for step, (seen, following) in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(seen), following)
        session.backward(loss)
        record = session.step()
        if step % 40 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}, loss scale {float(record.scale):g}")
    with torch.no_grad():
        losses = [F.cross_entropy(model(seen), following) for seen, following in batches(20, seed=1)]
    print(f"mean loss of 20 other batches: {torch.stack(losses).mean().item():.3f}")


model, optimizer, session = start("O0")
train(model, optimizer, session)
session.close()

# %% [markdown]
# ## In fp16
#
# O2 stores the weights in fp16 and keeps fp32 masters. Few CPUs are fast in fp16, so halfstep emulates it: products
# are rounded as a GPU rounds them, at about the speed of fp32. After some steps the loss is NaN: the loss scale falls
# step by step, which does not help, and the session raises.

# %%
model, optimizer, session = start("O2", low="fp16")
try:
    train(model, optimizer, session)
except halfstep.NumericsError as error:
    print(error)

# %% [markdown]
# ## What broke
#
# The verdict has named the operation, the module and the line. `blame` looks at the batch again, and tries the edit
# on a copy of the model.


# %%
failed = list(batches(160))[session.status().steps - 1]


def closure():
    seen, following = failed
    return F.cross_entropy(model(seen), following)


verdict = halfstep.blame(session, closure)
assert verdict is not None, "the loss and its gradients are finite"
print(verdict)

# %% [markdown]
# The square of a number above 256 does not fit into fp16, whose largest number is 65,504. No loss scale helps: the
# overflow is in the forward pass.
#
# ## With the edit
#
# The edit is data: it becomes part of the plan, and a plan can be saved in a file. Training starts again under
# the new plan, and ends where fp32 did.

# %%
plan = session.plan.edit(*verdict.cure)
halfstep.save_plan(plan, "plan.toml")
session.close()

model, optimizer, session = start("plan.toml")
train(model, optimizer, session)
print(f"{session.status().skipped} of {session.status().steps} steps skipped")

# %% [markdown]
# ## Before training
#
# `whatif` runs a model in fp32 and predicts what each format would lose. For the trained model it reports that some
# results of one block exceed fp16's range (*saturated*), and that bf16 would work. `prediction.edits("fp16")`
# returns the edits for a plan.

# %%
session.close()
model, optimizer, session = start("O0")
train(model, optimizer, session)
session.close()

prediction = halfstep.whatif(closure, model, optimizer=optimizer, formats=("fp16", "bf16"))
print(prediction)
