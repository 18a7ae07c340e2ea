"""Four processes over gloo, started once. A test sends them a function; every rank of a group runs
it and answers."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4
LIMIT = 60.0
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
    """The processes."""

    def __init__(self, directory: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "fserver"])
        pipes = [context.Pipe() for _ in range(SIZE)]
        self._connections = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, str(directory / "store"), theirs))
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
            assert self._connections[member].poll(LIMIT), f"rank {member} hangs"
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


def _serve(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    groups = {members: dist.new_group(list(members)) for members in GROUPS}
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
