"""A window without GPUs: files that all ranks map, and barriers over gloo. Nothing is asynchronous
in one rank; ranks are to each other."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from exact import attend, poisoned
from torch import Tensor
from world import Rank

from fserver.ringx import api
from fserver.ringx.ranks import Ranks


class Done:
    """A mark that has come."""

    def wait(self) -> None:
        pass


class Files:
    """What `fserver.ringx.window.Window` does. Memory is full of NaN at first."""

    def __init__(self, ranks: Ranks, directory: str, room: int | None = None):
        self._ranks, self._directory, self._room = ranks, directory, room
        self._memory: dict[str, list[torch.UntypedStorage]] = {}
        self._chance = random.Random(ranks.rank)
        self.moved = 0

    def reserve(self, ranks: Ranks, name: str, size: int) -> bool:
        if self._room is not None and size > self._room:
            return False
        have = self._memory.get(name)
        if have is None or have[0].nbytes() < size:
            paths = [f"{self._directory}/{name}-{size}-{rank}" for rank in range(self._ranks.size)]
            with open(paths[self._ranks.rank], "wb") as file:
                file.write(b"\xff" * size)
            dist.barrier(self._ranks.group)
            self._memory[name] = [torch.UntypedStorage.from_file(p, True, size) for p in paths]
        return True

    def of(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0
    ) -> Tensor:
        storage = self._memory[name][rank]
        if self._chance.random() < 0.3:
            time.sleep(0.002)  # others are ahead
        return torch.empty(0, dtype=dtype).set_(storage, start, shape)

    def ours(self, tensor: Tensor) -> bool:
        """Whether it is in the memory of another rank."""
        begin = tensor.untyped_storage().data_ptr()
        others = (
            storage
            for storages in self._memory.values()
            for rank, storage in enumerate(storages)
            if rank != self._ranks.rank
        )
        return any(storage.data_ptr() == begin for storage in others)

    def beside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Done:
        return Done()

    def call(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fence(self) -> None:
        dist.barrier(self._ranks.group)


@contextmanager
def windowed(me: Rank, room: int | None = None) -> Iterator[Files]:
    """All ranks reach each other's memory; with room for so many bytes."""
    names = [tempfile.mkdtemp(prefix="ringx-") if me.rank == 0 else ""]
    dist.broadcast_object_list(names, group_src=0, group=me.group)
    window = Files(Ranks(me.group), names[0], room)
    before, copy = api.window_of, Tensor.copy_

    def counted(self: Tensor, source: Tensor, *args: Any, **options: Any) -> Tensor:
        if window.ours(self) or window.ours(source):
            window.moved += source.nbytes
        return copy(self, source, *args, **options)

    api.window_of = lambda ranks, device: window if ranks.size > 1 else None
    Tensor.copy_ = counted
    try:
        yield window
    finally:
        api.window_of, Tensor.copy_ = before, copy
        dist.barrier(me.group)
        if me.rank == 0:
            for name in os.listdir(names[0]):
                os.unlink(f"{names[0]}/{name}")
            os.rmdir(names[0])


def in_window(me: Rank, *args: Any, room: int | None = None, **options: Any) -> dict[str, Tensor]:
    with windowed(me, room):
        return attend(me, *args, copies=True, **options)


def in_window_poisoned(me: Rank, *args: Any, **options: Any) -> dict[str, Tensor]:
    with windowed(me):
        return poisoned(me, *args, copies=True, **options)
