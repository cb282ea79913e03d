"""The rows of a table that a sparse gradient reaches, updated as a small batch of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.kernels.batch import Batch, Layout, Options
from halfstep.optim.masters import is_low
from halfstep.torch_internals import sparse_indices, sparse_values


@dataclass(frozen=True)
class SparseRows:
    """Copies of some rows of a weight, as a batch, with the tables and the indices that they come from."""

    batch: Batch
    tables: list[Tensor]
    index: Tensor

    def write_back(self) -> None:
        """Writes the updated rows back into their tables."""
        for table, rows in zip(self.tables, [*self.batch.weights, *self.batch.extras], strict=True):
            table.index_copy_(0, self.index, rows)


def touched_rows(
    layout: Layout, weight: Tensor, extra: list[Tensor], grad: Tensor, options: Options
) -> SparseRows | None:
    """Returns the rows of `weight` and its `extra` that the sparse `grad` reaches, or None if the update needs all.

    State, such as a momentum, and weight decay change every row. On devices other than the CPU the host does not know
    the number of rows; a dense gradient avoids waiting for it.
    """
    if options.states or options.weight_decay or weight.device.type != "cpu" or grad.sparse_dim() != 1:
        return None
    merged = grad.detach().coalesce()
    index = merged.indices()[0]
    tables = [weight, *extra]
    weights, *extras = [table.index_select(0, index) for table in tables]
    if not weights.numel():
        return None
    return SparseRows(Batch(layout, [weights], extras, [merged.values()]), tables, index)


def widened(grad: Tensor) -> Tensor:
    """Returns a sparse gradient with low-precision values as fp32, so that the values of one row add up in fp32."""
    if not is_low(grad) or grad.is_coalesced():
        return grad
    indices, values = sparse_indices(grad), sparse_values(grad).float()
    return torch.sparse_coo_tensor(indices, values, grad.shape, device=grad.device, check_invariants=False)
