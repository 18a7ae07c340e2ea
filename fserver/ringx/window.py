"""Memory that every rank of a group can copy from and to, where the ranks are GPUs of one host that
reach each other: torch's symmetric memory. Copy engines move the bytes, so that attention keeps all
of the GPU, of which a collective takes a part.

A copy asks nobody. Who may read and write when is settled by fences, which all ranks pass together.
What ranks have to know of each other's arguments they tell through a file in memory, not by a
collective, which would wait for a place on the GPU.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fserver.errors import Error, TimeoutError

from .ranks import UNUSABLE, Ranks


class Board:
    """Where the ranks of a group on one host write numbers for each other.

    Args:
        ranks: all of them make one at the same time.
        device: of the tensors that the group's collectives take.
        most: numbers that one rank writes.

    Raises:
        OSError: not all of them can have the file.
    """

    def __init__(self, ranks: Ranks, device: torch.device, most: int):
        self._rank, self._size, self._turn = ranks.rank, ranks.size, 0
        self._broken = False
        self._timeout = _timeout(ranks, device).total_seconds()
        self._width = 8 * (most + 2)  # the turn before, a checksum behind
        size = 2 * ranks.size * self._width
        number, problem = secrets.randbits(62), None
        try:
            if ranks.rank == 0:
                file = os.open(_path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                os.posix_fallocate(file, 0, size)  # or the first write might end the process
        except OSError as error:
            problem = error
        said = torch.tensor([number], device=device)
        ranks.broadcast(said, 0).wait()
        path = _path(int(said.item()))
        try:
            if ranks.rank != 0:
                file = os.open(path, os.O_RDWR)
            if not problem:
                self._memory = mmap.mmap(file, size)
                os.close(file)
        except OSError as error:
            problem = error
        failed = _any(ranks, problem is not None, device)
        if ranks.rank == 0 and os.path.exists(path):
            os.unlink(path)
        if failed:
            raise problem or OSError("another rank of the group cannot open the file")

    def gather(self, numbers: list[int], step: str) -> list[list[int]]:
        """Returns the numbers that each rank has written. Error texts name the `step`.

        Raises:
            TimeoutError: a rank has not made the call within the timeout of the group.
            Error: an earlier call has timed out.
        """
        if self._broken:
            raise Error(f"ringx: a rank of the group has missed an earlier call. {UNUSABLE}")
        self._turn += 1  # places alternate: who writes a turn's has read all of the last one's
        record = struct.pack(f"{len(numbers) + 1}q", self._turn, *numbers)
        record += struct.pack("q", zlib.crc32(record))
        start = self._turn % 2 * self._size * self._width
        at = start + self._rank * self._width
        own = slice(at, at + len(record))
        self._memory[own] = record
        found = []
        for rank in range(self._size):
            at = start + rank * self._width
            began = time.monotonic()
            while True:
                came = self._memory[at : at + len(record)]
                turn, *theirs, check = struct.unpack(f"{len(numbers) + 2}q", came)
                if turn == self._turn and check == zlib.crc32(came[:-8]):  # written, and wholly
                    break
                waited = time.monotonic() - began
                if waited > self._timeout:
                    self._broken, self._memory[own] = True, bytes(len(record))
                    raise TimeoutError(
                        f"ringx: {step}: rank {rank} of the group has not made the same call "
                        f"within {self._timeout:g} s (see its output). {UNUSABLE}"
                    )
                time.sleep(0 if waited < 1e-3 else 1e-4)
            found.append(theirs)
        return found


def _path(number: int) -> str:
    return f"/dev/shm/fserver-ringx-{number:x}"


class Mark(Protocol):
    """A point in the order of the copies."""

    def wait(self) -> None:
        """Lets the current stream wait for it."""


@dataclass(eq=False)
class _Memory:
    handle: Any  # of torch's symmetric memory
    tensor: Tensor  # of this rank
    captured: bool = False


class Window:
    """Memory on all ranks, for keys and for gradients, and a stream on which copies and fences
    follow each other.

    All ranks of the group make the same calls of `reserve` and `fence` in the same order.
    """

    def __init__(self, ranks: Ranks, device: torch.device, board: Board):
        self._group, self._device, self.board = ranks.group.group_name, device, board
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._memory: dict[str, _Memory] = {}
        self._kept: list[_Memory] = []  # that graphs have, and others take the place of
        self._refused: dict[str, int] = {}  # bytes that a rank does not have
        self._last: torch.cuda.Event | None = None
        self._timeout = round(_timeout(ranks, device) / timedelta(milliseconds=1))

    def reserve(self, name: str, size: int) -> bool:
        """Has so many bytes under this name on each rank. False on all of them if that is not to be
        had: a rank has no such memory, or a graph is being captured, and no call before it needed
        as much."""
        have = self._memory.get(name)
        enough = have is not None and have.tensor.nbytes >= size
        if torch.cuda.is_current_stream_capturing():
            if have is not None:
                have.captured = True
            return enough
        if enough:
            return True
        if size >= self._refused.get(name, size + 1):
            return False
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize(self._device)  # what is to be freed may be in use
        if have is not None and have.captured:
            self._kept.append(have)
        self._memory.pop(name, None)
        del have
        torch.cuda.empty_cache()  # this memory is not of torch's allocator
        aligned, problem = -(-size // ALIGNED) * ALIGNED, None
        try:
            tensor = symmetric.empty(aligned, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            problem = error
        answers = self.board.gather([problem is not None], "memory for copies")
        if any(failed for (failed,) in answers):
            self._refused[name] = size
            what = problem or "another rank has none"
            warnings.warn(f"ringx: collectives for want of {size} bytes: {what}", stacklevel=2)
            return False
        self._memory[name] = _Memory(symmetric.rendezvous(tensor, self._group), tensor)
        return True

    @property
    def size(self) -> int:
        """Bytes of this rank. The window keeps them, beside torch's allocator."""
        return sum(memory.tensor.nbytes for memory in [*self._memory.values(), *self._kept])

    def of(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0
    ) -> Tensor:
        """The memory of a rank, from its element `start` on."""
        memory: Tensor = self._memory[name].handle.get_buffer(rank, shape, dtype, start)
        return memory

    @contextmanager
    def call(self) -> Iterator[None]:
        """What one call does with the window, behind what the last one did, on whatever stream. The
        current stream waits for the end of all copies, also if the call fails."""
        stream, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        if self._last and not capturing:
            stream.wait_event(self._last)
        try:
            yield
        finally:
            stream.wait_stream(self._stream)
            if not capturing:
                self._last = stream.record_event()

    def beside(self) -> AbstractContextManager[Any]:
        """What is enqueued in it comes behind what the current stream has now, and beside what it
        gets then."""
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def fence(self) -> None:
        """Lets the copies behind it wait until all ranks have come to it. To be called within
        `beside`. A rank that does not come within the group's time ends the others' wait with an
        error of CUDA's."""
        self._memory["keys"].handle.barrier(channel=0, timeout_ms=self._timeout)


ALIGNED = 2 << 20  # bytes, a page of a GPU

_windows: WeakKeyDictionary[dist.ProcessGroup, Window | None] = WeakKeyDictionary()


def known(ranks: Ranks) -> Window | None:
    """The group's window, if it has one from a call before."""
    return _windows.get(ranks.group)


def window_of(ranks: Ranks, device: torch.device, most: int) -> Window | None:
    """The group's window, with a board for so many numbers; None if there is none. The first call
    for a group asks the other ranks: all of them have to call it then."""
    if device.type != "cuda" or ranks.size == 1:
        return None
    if ranks.group not in _windows:
        if torch.cuda.is_current_stream_capturing():
            return None
        ranks.step = "finding out about copies"
        _windows[ranks.group] = _made(ranks, device, most) if _reach(ranks, device) else None
    return _windows[ranks.group]


def _made(ranks: Ranks, device: torch.device, most: int) -> Window | None:
    """A window that has been tried, or None on all ranks."""
    problem: Exception | None = None
    try:
        window = Window(ranks, device, Board(ranks, device, most))
        if window.reserve("keys", ALIGNED):
            with window.call(), window.beside():
                window.fence()
        else:
            problem = RuntimeError("no memory")
    except Error:  # a rank does not come: no more can be settled with it
        raise
    except (OSError, RuntimeError) as error:  # such as a backend of symmetric memory without them
        problem = error
    failed = _any(ranks, problem is not None, device)
    if problem:
        warnings.warn(
            f"ringx: copies=True uses collectives, because the ranks cannot copy here: {problem}",
            stacklevel=2,
        )
    return None if failed else window


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
    return not _any(ranks, not good, device)


def _any(ranks: Ranks, flag: bool, device: torch.device) -> bool:
    """Whether a rank says so."""
    said = torch.tensor([flag], dtype=torch.int32, device=device)
    ranks.maximum(said).wait()
    return bool(said.item())


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
    return getattr(options, "_timeout", None) or dist.default_pg_timeout
