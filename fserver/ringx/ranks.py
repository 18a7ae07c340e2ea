"""The ranks of a group, and their collectives."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class Ranks:
    """This process among those of a group. Collectives are started; whoever calls waits."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def broadcast(self, tensor: Tensor, owner: int) -> dist.Work:
        root = dist.get_global_rank(self.group, owner)
        return _started(dist.broadcast(tensor, root, group=self.group, async_op=True))

    def sum_at(self, owner: int, tensor: Tensor) -> dist.Work:
        """Leaves the sum in the owner's tensor; what is in the others' is undefined."""
        root = dist.get_global_rank(self.group, owner)
        return _started(dist.reduce(tensor, root, group=self.group, async_op=True))

    def maximum(self, tensor: Tensor) -> dist.Work:
        return _started(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True))

    def gather(self, everybody: Tensor, tensor: Tensor) -> dist.Work:
        return _started(
            dist.all_gather_into_tensor(everybody, tensor, group=self.group, async_op=True)
        )

    def scatter_sum(self, mine: Tensor, tensor: Tensor) -> dist.Work:
        return _started(dist.reduce_scatter_tensor(mine, tensor, group=self.group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    """Of a collective in a group that this process is in, which is never None."""
    assert work is not None
    return work
