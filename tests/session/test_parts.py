"""What the optimizers of a session hold."""

import torch
from torch import nn

from halfstep.train.session.parts import memory_of


def test_the_bytes_of_weights_masters_gradients_and_state():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = 2 * 8 * 4 + 2 * 4  # two moments of 8 numbers, and a step count each for weight and bias
    assert memory_of(list(model.parameters()), [optimizer], masters=7) == {
        "weights": 32,
        "masters": 7,
        "gradients": 32,
        "optimizer": state,
    }


def test_a_sparse_gradient_counts_with_its_entries_and_their_indices():
    weight = nn.Parameter(torch.ones(30, 40))
    weight.grad = torch.sparse_coo_tensor([[0, 2], [1, 2]], [1.0, 2.0], (30, 40), check_invariants=True)
    assert memory_of([weight], [])["gradients"] == 2 * (4 + 8 + 8)
