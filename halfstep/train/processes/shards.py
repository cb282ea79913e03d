"""Tensors that are sharded over processes: this process's shard of each, and how many different shards there are.

torch's modules for sharded tensors take a second to import, so only functions that meet such tensors import them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import SessionError, SetupError
from halfstep.formats import FP32, Format, as_format
from halfstep.machine import read_facts
from halfstep.plan.io import choose_plan
from halfstep.plan.plan import Plan
from halfstep.sharded import fsdp_modules, is_sharded, is_wrapped
from halfstep.torch_internals import frees_after_backward, holds_unreduced, learns_gradients, policy_of, version_of
from halfstep.validate import with_near_misses

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


def local(t: Tensor) -> Tensor:
    """Returns this process's shard of `t`, in the same memory and without a graph; a plain tensor is returned as is."""
    if not is_sharded(t):
        return t
    with torch.no_grad():
        part = t.to_local()
        return part.wait() if is_wrapped(part) and hasattr(part, "wait") else part


def like(t: Tensor, part: Tensor) -> Tensor:
    """Returns a DTensor sharded like `t` whose shard in this process is `part`; returns `part` if `t` is plain."""
    # Shape and stride are taken from `t`: what torch computes from the shard is wrong if shards differ in size.
    if not is_sharded(t):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


def whole(t: Tensor) -> Tensor:
    """Returns all of a sharded tensor, gathered from the processes; a plain tensor is returned as is."""
    return t.full_tensor() if is_sharded(t) else t


def spread(value: Tensor, t: Tensor) -> Tensor:
    """Returns `value`, which has the shape of `t`, sharded like `t`; each process cuts its shard, nothing is sent."""
    if not is_sharded(t) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(t.device), t.device_mesh, t.placements, src_data_rank=None)


def part_of(grad: Tensor, p: Tensor) -> Tensor:
    """Returns this process's shard of the gradient `grad` of a parameter `p`."""
    placed = is_sharded(grad) and is_sharded(p) and grad.placements == p.placements
    return local(grad) if placed else grad


def shards(p: Tensor) -> int:
    """Returns how many different shards a tensor is cut into: 1 if each process has all of it."""
    if not is_sharded(p):
        return 1
    sizes = zip(p.placements, p.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


@dataclass(frozen=True)
class Part:
    """This process's part of a matrix, of which each process of a group has as many rows (`dim` 0) or columns (1)."""

    group: dist.ProcessGroup
    dim: int

    def largest(self, magnitudes: Tensor) -> Tensor:
        """Returns the largest of each magnitude (fp32) in all processes; NaN is the largest."""
        bits = magnitudes.view(torch.int32).contiguous()  # in the order of the magnitudes
        dist.all_reduce(bits, dist.ReduceOp.MAX, self.group)
        return bits.view(torch.float32)

    def index(self, own: Tensor, columns: int) -> Tensor:
        """Returns the indices in the whole matrix, row by row, of those in this part, which has `columns`."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if self.dim == 0:
            return own + rank * own.numel()
        return own + (own // columns * (size - 1) + rank) * columns


def sharded_parameters(roots: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the sharded parameters of models, each once."""
    found = {id(p): p for root in roots for p in root.parameters() if is_sharded(p)}
    return list(found.values())  # type: ignore[arg-type]  # a DTensor that is a Parameter is of its own class


def policies(roots: Sequence[nn.Module]) -> dict[str, str]:
    """Returns the `mp_policy` of each module that `fully_shard` was called on, as text, by module name."""
    sharding = {id(module) for module in fsdp_modules(roots)}
    return {
        name: str(policy_of(module))
        for index, root in enumerate(roots)
        for name, module in root.named_modules(prefix="" if len(roots) == 1 else str(index))
        if id(module) in sharding
    }


def group_is_open() -> bool:
    """Tells whether a process group is initialized."""
    return dist.is_available() and dist.is_initialized()


def own_number() -> int | None:
    """Returns this process's rank, or None if no process group is initialized."""
    return dist.get_rank() if group_is_open() else None


def reshard(roots: Iterable[nn.Module]) -> None:
    """Makes models hold their sharded parameters again; after an evaluation they hold gathered ones."""
    for module in fsdp_modules(roots):
        module.reshard()


def check_gathered(roots: Sequence[nn.Module]) -> None:
    """Refuses gradients of gradients where FSDP2 frees the weights that they need: they would be silently wrong."""
    # Of several models, one that is not sharded may be the one that is asked for.
    freed = [any(map(frees_after_backward, fsdp_modules([root]))) for root in roots]
    if freed and all(freed):
        raise SessionError(
            "create_graph=True needs gathered weights until the backward pass of the gradients, but fully_shard frees "
            "them after the first one: call model.set_reshard_after_forward(False) and "
            "model.set_reshard_after_backward(False) before the forward"
        )


class Unreduced:
    """Refuses a backward pass at another loss scale than that of gradients which FSDP2 holds unreduced.

    It also tells FSDP2 of weights that were unfrozen where it had trained none.
    """

    def __init__(self, roots: Iterable[nn.Module], *, scaled: bool) -> None:
        self._roots, self._scaled = list(roots), scaled
        self._frozen = fsdp_modules(self._roots)  # or not known to train yet
        self._carried: tuple[Tensor, int] | None = None  # the scale of the last backward pass, and the writes to it

    def before_backward(self, scale: Tensor) -> None:
        """Notes the scale of the next backward pass."""
        self._frozen = [module for module in self._frozen if not learns_gradients(module)]
        before, self._carried = self._carried, (scale, version_of(scale))
        if not self._scaled or before is None or (before[0] is scale and before[1] == self._carried[1]):
            return
        if any(holds_unreduced(module) for module in fsdp_modules(self._roots)):
            self._carried = before
            raise SessionError(
                "this backward pass has another loss scale than an earlier one whose gradients are still unreduced, "
                "after set_requires_gradient_sync(False); call model.set_requires_gradient_sync(True) before the last "
                "backward pass of each loss_id, and before the last one of a step"
            )


def group_of(parameters: Sequence[nn.Parameter]) -> dist.ProcessGroup:
    """Returns the group of the processes that hold shards of these parameters; a collective call the first time."""
    meshes: list[DeviceMesh] = list({id(p.device_mesh): p.device_mesh for p in parameters if is_sharded(p)}.values())
    ranks = sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    if dist.get_rank() not in ranks:
        raise SetupError(
            f"the model is sharded over the processes {ranks}, and this is process {dist.get_rank()}; call "
            "halfstep.initialize only in the processes that hold shards"
        )
    world = dist.group.WORLD
    assert world is not None  # a mesh needs one
    if len(ranks) == dist.get_world_size():
        return world
    for mesh in meshes:
        if mesh.ndim == 1 and mesh.size() == len(ranks):
            return mesh.get_group()
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


@with_near_misses
def fsdp_policy(
    plan: Plan | str = "O1",
    *,
    low: Format | torch.dtype | str | None = None,
    reduce: Format | torch.dtype | str = FP32,
) -> MixedPrecisionPolicy:
    """Returns the `mp_policy` of `fully_shard` for a model that `halfstep.initialize` will train under a plan.

    Weights are stored and updated as fp32 shards, which are the masters. They are gathered in the low format; at O0, in
    fp32. Gradients are summed over the processes in the format `reduce`. The formats of the inputs and outputs of
    modules are set by the plan, not by this policy. `plan` and `low` are those of `initialize`. Call `fully_shard`
    first, then create the optimizer, then call `initialize`:

        policy = halfstep.fsdp_policy("O2", low="bf16")
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        session = halfstep.initialize(model, optimizer, "O2", low="bf16")

    All weights are gathered in the low format, even those of norms and embeddings that the plan uses in fp32; they are
    widened after the gather. To keep the weights of some modules exact, shard these modules first, as a separate group:
    `fully_shard([*norms], mp_policy=halfstep.fsdp_policy("O0"))`.

    Raises:
        PlanError: `plan` is not a known level, a Plan, or a plan file that can be read.
        FormatError: `low` or `reduce` is not a known format.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # which takes a second to import

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen, _ = choose_plan(plan, low, read_facts(device))
    return MixedPrecisionPolicy(
        param_dtype=None if chosen.ops == "none" else chosen.low.dtype,
        reduce_dtype=as_format(reduce).dtype,
        output_dtype=None,
        cast_forward_inputs=False,
    )
