"""Processes that are started once: four over gloo, or some on GPUs. A test sends them a function;
every rank of a group runs it and answers."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fserver.ringx import window

SIZE = 4
LIMIT = {"cpu": 60.0, "cuda": 300.0}
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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "fserver"])
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve, args=(rank, size, device, str(directory / "store"), theirs)
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(
        self, members: Sequence[int], function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """The results of ``function(Rank, *args, **options)`` by rank in the group.

        Raises:
            AssertionError: with the traceback, if a rank raised, or if one does not answer.
        """
        for member in members:
            self._connections[member].send((tuple(members), function, args, options))
        answers = []
        for member in members:
            assert self._connections[member].poll(LIMIT[self.device]), f"rank {member} hangs"
            answers.append(self._connections[member].recv())
        for member, (good, value) in zip(members, answers, strict=True):
            assert good, f"rank {member}:\n{value}"
        return [value for _, value in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(rank: int, size: int, device: str, store: str, connection: Connection) -> None:
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
    while True:
        try:
            members, function, args, options = connection.recv()
        except EOFError:
            return  # without leaving the group: the others may be gone
        me = Rank(groups[members], members.index(rank), len(members))
        try:
            connection.send((True, function(me, *args, **options)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
