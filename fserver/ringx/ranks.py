"""The ranks of a group, and their collectives."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fserver.errors import ConfigError, Error, TimeoutError

T = TypeVar("T")

Group = dist.ProcessGroup | DeviceMesh
"""What names the ranks of a call."""

UNUSABLE = "The group is no longer usable: end its processes, or make a new group."
"""The remedy in messages."""


class Ranks:
    """A process group, seen from this process. Its methods start collectives; the caller waits.

    Attributes:
        step: the purpose of the collectives. Error texts begin with it.

    Raises:
        TimeoutError: a collective, or the wait for one, has taken longer than the group's timeout.
        Error: a collective has failed for another reason, for example because a rank has ended.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.step = "forward"

    def broadcast(self, tensor: Tensor, owner: int) -> Collective:
        root = dist.get_global_rank(self.group, owner)
        return Collective(
            self,
            f"the broadcast from rank {owner}",
            lambda: dist.broadcast(tensor, root, group=self.group, async_op=True),
        )

    def sum_at(self, owner: int, tensor: Tensor) -> Collective:
        """Leaves the sum in the owner's tensor; what is in the others' is undefined."""
        root = dist.get_global_rank(self.group, owner)
        return Collective(
            self,
            f"the sum at rank {owner}",
            lambda: dist.reduce(tensor, root, group=self.group, async_op=True),
        )

    def maximum(self, tensor: Tensor) -> Collective:
        maximum = dist.ReduceOp.MAX
        return Collective(
            self,
            "the maximum over all ranks",
            lambda: dist.all_reduce(tensor, maximum, group=self.group, async_op=True),
        )

    def gather(self, everybody: Tensor, tensor: Tensor) -> Collective:
        return Collective(
            self,
            "the all-gather",
            lambda: dist.all_gather_into_tensor(everybody, tensor, group=self.group, async_op=True),
        )

    def scatter_sum(self, mine: Tensor, tensor: Tensor) -> Collective:
        return Collective(
            self,
            "the reduce-scatter",
            lambda: dist.reduce_scatter_tensor(mine, tensor, group=self.group, async_op=True),
        )

    def all_to_all(
        self, got: Tensor, sent: Tensor, of_each: list[int], to_each: list[int]
    ) -> Collective:
        """`of_each` and `to_each`: how many rows of `got` and `sent` each rank sends and gets."""
        return Collective(
            self,
            "the all-to-all",
            lambda: dist.all_to_all_single(
                got, sent, of_each, to_each, group=self.group, async_op=True
            ),
        )

    def guarded(self, what: str, call: Callable[[], T]) -> T:
        """Returns what a call to torch.distributed returns, and makes its errors fserver's."""
        try:
            return call()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # no other rank's doing
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: RuntimeError) -> Error:
        over = re.search("time(d |-)?out", str(error), re.IGNORECASE)
        members = reprlib.repr(dist.get_process_group_ranks(self.group))
        text = (
            f"ringx: {self.step}: {what} {'timed out' if over else 'failed'} on rank {self.rank} "
            f"of the group (global ranks {members}). At least one rank has not made the same call, "
            f"or has ended: see the output of the other ranks. {UNUSABLE}"
        )
        if over:
            text += (
                " If ranks are only slow, give init_process_group or new_group a longer timeout."
            )
        return (TimeoutError if over else Error)(f"{text} torch.distributed says: {error}")


def said(value: object) -> str:
    """Formats a value for a message."""
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def ranks_of(group: object) -> Ranks:
    """Returns the ranks of a group, of a DeviceMesh with one dimension, or, for None, all.

    Raises:
        ConfigError: it is none of these, or this process is not a member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "ringx: torch.distributed is not initialized (call init_process_group first)"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"ringx: group is a DeviceMesh with {group.ndim} dimensions: want one (such as "
                'mesh["cp"], the one that splits the sequence)'
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "ringx: group: this process is not a member (call the function on members only)"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"ringx: group {said(group)}: want a group from new_group, a DeviceMesh with one "
            "dimension, or None for all ranks"
        )
    try:
        return Ranks(group)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"ringx: group {said(group)}: {error} (make a new group)") from error


class Collective:
    """A collective that has been started."""

    def __init__(self, ranks: Ranks, what: str, start: Callable[[], dist.Work | None]):
        self._ranks, self._what = ranks, what
        work = ranks.guarded(what, start)
        assert work is not None  # as this process is in the group
        self._work = work

    def wait(self) -> None:
        """Lets the current stream wait for the result, on a CPU the caller."""
        self._ranks.guarded(self._what, self._work.wait)
