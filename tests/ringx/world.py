"""Processes that are started once: four over gloo, or some on GPUs. A test sends them a function;
every rank of a group runs it and answers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fserver.bench.processes import Child, failure, gather
from fserver.ringx import window

SIZE = 4
LIMIT = {"cpu": 120.0, "cuda": 300.0}
"""Seconds after which ranks that have not answered hang."""

GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (3,), (2, 3), (1, 2, 3))
"""N = 1 to 4 from rank 0, and three groups that start elsewhere."""


@dataclass
class Rank:
    """What a function that runs in the processes gets as its first argument."""

    group: dist.ProcessGroup
    rank: int
    size: int


class World:
    """The processes.

    Args:
        directory: an empty folder, where they meet.
        size: how many there are.
        device: "cpu", or "cuda": then each has a GPU of its own and the group is NCCL's. If there
            are too few GPUs, processes share them and the group is gloo's.
    """

    def __init__(self, directory: Path, size: int = SIZE, device: str = "cpu"):
        self.size, self.device = size, device
        where = size, device, str(directory / "store")
        self._ranks = [Child(f"rank {rank}", _serve, rank, *where) for rank in range(size)]

    def run(
        self, members: Sequence[int], function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """The results of ``function(Rank, *args, **options)`` by rank in the group.

        Raises:
            BenchError: with the traceback, if a rank raised, or if one does not answer.
        """
        self._signal(signal.SIGCONT)
        for member in members:
            self._ranks[member].put((tuple(members), function, args, options))
        limit = LIMIT[self.device]
        try:
            return gather([self._ranks[member] for member in members], limit, limit)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        """Stops all ranks, or lets them go on. They are stopped between two calls, because each of
        gloo's threads wakes up 100 times a second: together they took a tenth of two cores."""
        if self.device == "cpu":
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for rank in self._ranks:
            rank.conn.close()
        for rank in self._ranks:
            rank.close(10)


KEPT: set[dist.ProcessGroup] = set()
"""The groups of this process that last as long as it does."""


def keep_groups() -> None:
    """Keeps all groups that there are now."""
    KEPT.update(dist.distributed_c10d._world.pg_map)


def leave_others() -> None:
    """Leaves the groups that functions have made. Each of gloo's has a thread that wakes up a
    hundred times a second. All ranks have answered, so nobody waits in one."""
    if made := {*dist.distributed_c10d._world.pg_map} - KEPT:
        for group in made:
            dist.destroy_process_group(group)
        gc.collect()  # what names them


def _serve(connection: Connection, rank: int, size: int, device: str, store: str) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    if 0 < gpus < size:  # NCCL wants a GPU for each rank, and so does a window
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        window._reach = lambda ranks, device: True
    if gpus < size:
        dist.init_process_group("gloo", **where)
    else:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **where)
    groups = {(*range(size),): dist.group.WORLD}
    for members in GROUPS if device == "cpu" else ():
        groups[members] = dist.new_group(list(members))
    keep_groups()
    while True:
        try:
            members, function, args, options = connection.recv()
        except EOFError:
            return  # without leaving the group: the others may be gone
        leave_others()
        me = Rank(groups[members], members.index(rank), len(members))
        try:
            answer = function(me, *args, **options)
        except BaseException as error:
            answer = failure(error)
        connection.send(answer)
