"""Memory that every rank of a group can copy from and to, where the ranks are GPUs of one host that
reach each other: torch's symmetric memory. Copy engines move the bytes, so that attention keeps all
of the GPU, of which a collective takes a part.

A copy asks nobody. Who may read and write when is settled by fences, which all ranks pass together.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .schedules import Ranks


class Mark(Protocol):
    """A point in the order of the copies."""

    def wait(self) -> None:
        """Lets the current stream wait for it."""


class Window:
    """Memory by name on all ranks, and a stream on which copies and fences follow each other.

    All ranks of the group make the same calls of `reserve` and `fence` in the same order.
    """

    def __init__(self, ranks: Ranks, device: torch.device):
        self._ranks, self._device = ranks, device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._memory: dict[str, Any] = {}
        self._timeout = round(_timeout(ranks, device) / timedelta(milliseconds=1))

    def reserve(self, name: str, size: int) -> bool:
        """Has so many bytes under this name on each rank. False if that is not to be had now: a
        graph is being captured, and no call before it needed as much."""
        have = self._memory.get(name)
        if have is not None and have.buffer_size >= size:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize(self._device)  # what is to be freed may be in use
        self._memory.pop(name, None)
        size = -(-size // ALIGNED) * ALIGNED
        tensor = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(tensor, self._ranks.group.group_name)
        if handle is None:
            raise RuntimeError("ringx: torch gives no symmetric memory")
        self._memory[name] = handle
        return True

    def of(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0
    ) -> Tensor:
        """The memory of a rank, from its element `start` on."""
        return self._memory[name].get_buffer(rank, shape, dtype, start)

    def beside(self) -> AbstractContextManager[Any]:
        """What is enqueued in it comes behind what the current stream has now, and beside what it
        gets then."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def fence(self) -> Mark:
        """Lets the copies behind it wait until all ranks have come to it. A rank that does not come
        within the group's time ends with an error of CUDA's, not in a wait."""
        with torch.cuda.stream(self._stream):
            next(iter(self._memory.values())).barrier(channel=0, timeout_ms=self._timeout)
        return self.mark()


ALIGNED = 2 << 20  # bytes, a page of a GPU

_windows: WeakKeyDictionary[dist.ProcessGroup, Window | None] = WeakKeyDictionary()


def window_of(ranks: Ranks, device: torch.device) -> Window | None:
    """The group's window; None if there is none. The first call for a group asks the other ranks:
    all of them have to call it then."""
    if device.type != "cuda" or ranks.size == 1:
        return None
    if ranks.group not in _windows:
        if torch.cuda.is_current_stream_capturing():
            return None
        _windows[ranks.group] = Window(ranks, device) if _reach(ranks, device) else None
    return _windows[ranks.group]


def _reach(ranks: Ranks, device: torch.device) -> bool:
    """Whether each rank has a GPU of its own that all others reach, in one container."""
    mine = torch.tensor(_place(device), device=device)
    everybody = mine.new_empty(ranks.size * len(mine))
    ranks.gather(everybody, mine).wait()
    hosts, gpus = zip(*everybody.view(ranks.size, -1).tolist(), strict=True)
    seen = {_gpu(i): i for i in range(torch.cuda.device_count())}
    good = hosts[0] != 0 and len({*hosts}) == 1 and len({*gpus}) == ranks.size
    good = good and all(
        gpu == _gpu(device.index)
        or (gpu in seen and torch.cuda.can_device_access_peer(device.index, seen[gpu]))
        for gpu in gpus
    )
    bad = torch.tensor([not good], dtype=torch.int32, device=device)
    ranks.maximum(bad).wait()
    return not bad.item()


def _place(device: torch.device) -> list[int]:
    """Numbers that tell hosts and GPUs apart; 0: no copies from here."""
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401

        with open("/proc/sys/kernel/random/boot_id") as file:
            text = file.read()
        text += "".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt", "net"))
    except (ImportError, OSError):
        return [0, 0]
    wanted = os.environ.get("NCCL_P2P_DISABLE", "0") == "0"  # who says so wants no such copies
    return [_number(text) if wanted else 0, _gpu(device.index)]


def _gpu(index: int) -> int:
    return _number(str(torch.cuda.get_device_properties(index).uuid))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _timeout(ranks: Ranks, device: torch.device) -> timedelta:
    """Of the group's collectives."""
    options = getattr(ranks.group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None) or timedelta(minutes=10)
