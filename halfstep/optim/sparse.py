"""The rows of a weight that a sparse gradient reaches, updated as a small batch of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.formats import is_narrow
from halfstep.kernels.batch import Batch, Layout, Options
from halfstep.torch_internals import sparse_indices, sparse_values


@dataclass(frozen=True)
class SparseRows:
    """Copies of some rows of a weight and its master, as a batch.

    `tables` are the tensors from which the rows were copied: the weight, and its master or remainder if it has one.
    `index` has the row numbers.
    """

    batch: Batch
    tables: list[Tensor]
    index: Tensor

    def write_back(self) -> None:
        """Writes the updated rows back into the weight and its master."""
        for table, rows in zip(self.tables, [*self.batch.weights, *self.batch.extras], strict=True):
            table.index_copy_(0, self.index, rows)


def touched_rows(
    layout: Layout, weight: Tensor, extra: list[Tensor], grad: Tensor, options: Options
) -> SparseRows | None:
    """Returns the rows of `weight` that the sparse `grad` reaches, or None if `grad` must be made dense."""
    # `grad` must be made dense if every row changes, because of weight decay or of state such as a momentum. It must
    # also be made dense on devices other than the CPU, where the host would have to wait for the number of rows.
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
    if not is_narrow(grad.dtype) or grad.is_coalesced():
        return grad
    indices, values = sparse_indices(grad), sparse_values(grad).float()
    return torch.sparse_coo_tensor(indices, values, grad.shape, device=grad.device, check_invariants=False)
