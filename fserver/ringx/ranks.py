"""The ranks of a group, and their collectives."""

from __future__ import annotations

import pickle
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

from fserver.errors import ConfigError, Error, TimeoutError

T = TypeVar("T")

Group = dist.ProcessGroup | DeviceMesh
"""What names the ranks of a call."""

Lengths = tuple[Sequence[int], Sequence[int]]
"""The local lengths of q and of k, by rank."""

UNUSABLE = "The group is no longer usable: end its processes, or make a new group."
"""The remedy in messages."""


@dataclass(eq=False)
class Kept:
    """What this process keeps of a group from call to call."""

    control: Any = None  # the backend by which `Ranks.ask` compares
    calls: int = 0  # of `ringx_attention` that this process has made
    agreed: dict[object, Lengths] = field(default_factory=dict)  # by arguments that all compared
    uneven: bool = False  # whether the ranks had different lengths once
    broken: bool = False  # whether a rank has missed a comparison
    window: Any = False  # what the ranks copy by, or None; False as long as nobody has asked


_kept: WeakKeyDictionary[dist.ProcessGroup, Kept] = WeakKeyDictionary()


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
        self.kept = _kept.setdefault(group, Kept())

    def broadcast(self, tensor: Tensor, owner: int) -> Collective:
        root = dist.get_global_rank(self.group, owner)
        return self._start(f"the broadcast from rank {owner}", dist.broadcast, tensor, root)

    def sum_at(self, owner: int, tensor: Tensor) -> Collective:
        """Leaves the sum in the owner's tensor; what is in the others' is undefined."""
        root = dist.get_global_rank(self.group, owner)
        return self._start(f"the sum at rank {owner}", dist.reduce, tensor, root)

    def maximum(self, tensor: Tensor) -> Collective:
        maximum = dist.ReduceOp.MAX
        return self._start("the maximum over all ranks", dist.all_reduce, tensor, maximum)

    def gather(self, everybody: Tensor, tensor: Tensor) -> Collective:
        return self._start("the all-gather", dist.all_gather_into_tensor, everybody, tensor)

    def scatter_sum(self, mine: Tensor, tensor: Tensor) -> Collective:
        return self._start("the reduce-scatter", dist.reduce_scatter_tensor, mine, tensor)

    def exchange(self, got: Tensor, tensor: Tensor, *rows: list[int]) -> Collective:
        """Row r goes to rank r, and comes from it. Or two lists say how many rows of `got` come
        from each rank, and how many of `tensor` go to each."""
        return self._start("the all-to-all", dist.all_to_all_single, got, tensor, *rows)

    def pass_on(self, got: Tensor, tensor: Tensor) -> Collective:
        """Sends to the next rank, and receives from the one before. gloo's transfers between two
        ranks take no memory of a GPU. Its all-to-all does, by way of the CPU."""
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        what = f"passing on from rank {before} to rank {after}"
        if self.staged(tensor.device):
            rows = (
                [len(tensor) * (rank == peer) for rank in range(self.size)]
                for peer in (before, after)
            )
            return self._start(what, dist.all_to_all_single, got, tensor, *rows)
        pairs = (dist.isend, tensor, after), (dist.irecv, got, before)
        members, group = dist.get_process_group_ranks(self.group), self.group
        ops = [dist.P2POp(op, what, members[peer], group) for op, what, peer in pairs]
        # gloo's transfers between two ranks know the group's timeout only if they are told.
        limit = () if tensor.is_cuda else (self.timeout,)
        return Collective(self, what, lambda: dist.batch_isend_irecv(ops), *limit)

    def staged(self, device: torch.device) -> bool:
        """Reports whether tensors of this device travel by way of the CPU."""
        backends = dist.get_backend_config(self.group).split(",")
        return device.type != "cpu" and f"{device.type}:gloo" in backends

    def _start(self, what: str, call: Callable[..., Any], *args: Any) -> Collective:
        return Collective(self, what, lambda: [call(*args, group=self.group, async_op=True)])

    @property
    def timeout(self) -> timedelta:
        """Of the group's collectives."""
        backends = (self.group._get_backend(device) for device in self.group._device_types)
        found = (getattr(getattr(each, "options", None), "_timeout", None) for each in backends)
        return next(filter(None, found), dist.default_pg_timeout)

    def ask(self, value: T, hint: str = "") -> list[T]:
        """Returns what each rank has said. The ranks have a backend of gloo's for it: a rank that
        asks alone meets no collective of others, and nobody waits for a GPU. The step is sent too,
        so that ranks at different steps do not take each other's answers. `hint` is for the text of
        an error."""
        if self.size == 1:
            return [value]
        self.check_unbroken()
        text = pickle.dumps((self.step, value))
        try:
            sizes = self._told(torch.tensor([[len(text)]], device="cpu"), hint)
            padded = bytearray(text.ljust(int(sizes.max())))
            texts = self._told(torch.frombuffer(padded, dtype=torch.uint8)[None], hint)
        except Error:
            self.kept.broken = True
            raise
        steps, values = zip(
            *(pickle.loads(bytes(theirs.tolist())) for theirs in texts), strict=True
        )
        if other := next((rank for rank in range(self.size) if steps[rank] != steps[0]), None):
            self.kept.broken = True
            raise Error(
                f"ringx: {self.step}: rank 0 of the group is at {steps[0]!r} and rank {other} at "
                f"{steps[other]!r}: want the same calls in the same order on all ranks. {UNUSABLE}"
            )
        return [*values]

    def check_unbroken(self) -> None:
        """Raises an Error if the ranks have lost each other in an earlier call."""
        if self.kept.broken:
            raise Error(f"ringx: a rank of the group has missed an earlier call. {UNUSABLE}")

    def _told(self, mine: Tensor, hint: str) -> Tensor:
        found = mine.new_empty(self.size, mine.shape[1])
        control = self.guarded("connecting for comparisons", self._control, hint)
        self.guarded("the comparison", lambda: control._allgather_base(found, mine).wait(), hint)
        return found

    def _control(self) -> Any:
        """A backend that is no group of torch's: the numbers of those are the same on all ranks of
        the world, also on those that are not in this group."""
        if self.kept.control is None:
            store = dist.PrefixStore("fserver-ringx", _get_process_group_store(self.group))
            options = store, self.rank, self.size, self.timeout
            self.kept.control = dist.ProcessGroupGloo(*options)
        return self.kept.control

    def guarded(self, what: str, call: Callable[[], T], hint: str = "") -> T:
        """Returns what a call to torch.distributed returns, and makes its errors fserver's."""
        try:
            return call()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # no other rank's doing
        except RuntimeError as error:
            over = re.search("time(d |-)?out", str(error), re.IGNORECASE)
            members = reprlib.repr(dist.get_process_group_ranks(self.group))
            slow = "If ranks are only slow, give init_process_group or new_group a longer timeout. "
            raise (TimeoutError if over else Error)(
                f"ringx: {self.step}: {what} {'timed out' if over else 'failed'} on rank "
                f"{self.rank} of the group (global ranks {members}). At least one rank has not "
                "made the same call, or has ended: see the output of the other ranks. "
                f"{hint if over else ''}{UNUSABLE} {slow if over else ''}"
                f"torch.distributed says: {error}"
            ) from error


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
        outside = group.get_coordinate() is None
        group = dist.GroupMember.NON_GROUP_MEMBER if outside else group.get_group()
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
    """A collective that has been started, in one piece or several. Keeps its tensors until it has
    been waited for."""

    def __init__(self, ranks: Ranks, what: str, start: Callable[[], list[dist.Work]], *limit: Any):
        self._ranks, self._what, self._limit = ranks, what, limit
        self._works = ranks.guarded(what, start)
        self._kept: object = start  # has the tensors

    def wait(self) -> None:
        """Lets the current stream wait for the result, on a CPU the caller."""
        self._ranks.guarded(self._what, lambda: [work.wait(*self._limit) for work in self._works])
        self._kept = None
