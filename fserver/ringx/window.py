"""Memory that every rank of a group can copy from and to, where the ranks are GPUs of one host that
reach each other: torch's symmetric memory. Copy engines move the bytes, so that attention keeps all
of the GPU, of which a collective takes a part.

A copy asks nobody. Who may read and write when is settled by fences, which all ranks pass together.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fserver.errors import Error

from .ranks import Ranks

T = TypeVar("T")


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

    def __init__(self, ranks: Ranks, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._memory: dict[str, _Memory] = {}
        self._kept: list[_Memory] = []  # that graphs have, and others take the place of
        self._refused: dict[str, int] = {}  # bytes that a rank does not have
        self._last: torch.cuda.Event | None = None
        self._timeout = round(ranks.timeout / timedelta(milliseconds=1))

    def reserve(self, ranks: Ranks, name: str, size: int) -> bool:
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

        # What is to be freed may be in use here. Other ranks do not use it any more: their copies
        # come before the last fence, which this waits for. CUDA keeps memory that they have mapped.
        torch.cuda.synchronize(self._device)
        if have is not None and have.captured:
            self._kept.append(have)
        self._memory.pop(name, None)
        del have
        torch.cuda.empty_cache()  # this memory is not of torch's allocator
        step, ranks.step = ranks.step, "memory for copies"

        def made() -> Tensor:
            aligned = -(-size // ALIGNED) * ALIGNED
            return symmetric.empty(aligned, dtype=torch.uint8, device=self._device)

        handle = None
        tensor, problem = _agreed(ranks, made)
        if tensor is not None:  # on all ranks: they can wait for each other
            join = partial(symmetric.rendezvous, tensor, ranks.group.group_name)
            handle, problem = _agreed(ranks, join)
        ranks.step = step
        if tensor is None or problem:
            self._refused[name] = size
            warnings.warn(f"ringx: collectives for want of {size} bytes: {problem}", stacklevel=2)
            return False
        self._memory[name] = _Memory(handle, tensor)
        return True

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

    def mark(self) -> torch.cuda.Event:
        """Returns a point in the order of the copies, for which a stream can wait."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def fence(self) -> None:
        """Lets the copies behind it wait until all ranks have come to it. To be called within
        `beside`. A rank that does not come within the group's time ends the others' wait with an
        error of CUDA's."""
        self._memory["keys"].handle.barrier(channel=0, timeout_ms=self._timeout)


ALIGNED = 2 << 20  # bytes, a page of a GPU


def window_of(ranks: Ranks, device: torch.device) -> Window | None:
    """The group's window; None if there is none. The first call for a group asks the other ranks:
    all of them have to call it then."""
    if device.type != "cuda" or ranks.size == 1:
        return None
    if ranks.kept.window is False:
        if torch.cuda.is_current_stream_capturing():
            return None
        ranks.step = "finding out about copies"
        places = ranks.ask(_place(device))
        good = _reach(device, places)
        ranks.kept.window = _made(ranks, device) if all(ranks.ask(good)) else None
    found: Window | None = ranks.kept.window
    return found


def _made(ranks: Ranks, device: torch.device) -> Window | None:
    """A window that has been tried, or None on all ranks."""

    def tried(window: Window) -> Window:
        if not window.reserve(ranks, "keys", ALIGNED):
            raise RuntimeError("no memory")
        with window.call(), window.beside():
            window.fence()
        return window

    window, problem = _agreed(ranks, lambda: Window(ranks, device))
    if window:
        window, problem = _agreed(ranks, partial(tried, window))
    if problem:
        warnings.warn(
            f"ringx: copies=True uses collectives, because the ranks cannot copy here: {problem}",
            stacklevel=2,
        )
    return window


def _agreed(ranks: Ranks, make: Callable[[], T]) -> tuple[T | None, object]:
    """Returns what each rank makes. If one cannot, returns None on all of them, and why. So
    whatever fails where, the ranks ask each other as often."""
    made, problem = None, None
    try:
        made = make()
    except Error:  # a rank does not come: no more can be settled with it
        raise
    except Exception as error:  # such as a backend of symmetric memory without them
        problem = error
    if any(ranks.ask(problem is not None)):
        return None, problem or "another rank cannot"
    return made, None


def _place(device: torch.device) -> tuple[str, str]:
    """Names of the host, or of the container, and of the GPU; empty: no copies from here."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":  # who says so wants no such copies
        return "", _gpu(device.index)
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401

        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read()
        host += "".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt", "net"))
    except (ImportError, OSError):
        host = ""
    return host, _gpu(device.index)


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _reach(device: torch.device, places: list[tuple[str, str]]) -> bool:
    """Whether each rank has a GPU of its own that this one reaches, in one container."""
    hosts, gpus = zip(*places, strict=True)
    seen = {_gpu(i): i for i in range(torch.cuda.device_count())}
    others = [gpu for gpu in gpus if gpu != _gpu(device.index)]
    return (
        hosts[0] != ""
        and len({*hosts}) == 1
        and len({*gpus}) == len(gpus)
        and all(
            gpu in seen and torch.cuda.can_device_access_peer(device.index, seen[gpu])
            for gpu in others
        )
    )
