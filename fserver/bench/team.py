"""Processes that exchange objects with each other: those of another library, and of a graph."""

import itertools
import os
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from .actors import Actor
from .crew import Crew, Factory, Member, Nodes, Peer

APART_S = 0.5  # so that they do not say at the same time where they hang

Links = Sequence[Connection | None]


class SideActor(Actor):
    """One of the processes. `index` is its number among all, of which the workers come first, and
    `rank` that among those of its role; its tensors are on `device`."""

    def __init__(
        self, make: Factory, index: int, shape: tuple[int, int], links: Links, cores: Sequence[int]
    ):
        if cores:  # other processes are not in the way of the timings
            os.sched_setaffinity(0, set(cores))
        super().__init__(make)
        self.index, self.count = index, sum(shape)
        self.workers, self.servers = shape
        self.is_worker = index < self.workers
        self.rank = index if self.is_worker else index - self.workers
        self.device = torch.device("cpu")
        self._links = links

    def use(self, gpu: int) -> None:
        """Has the tensors on this GPU."""
        self.device = torch.device("cuda", gpu)
        torch.cuda.set_device(self.device)
        torch.ones(1, device=self.device).add_(1).item()

    def exchange(self, mine: Any) -> list[Any]:
        """What each of the processes gives, in their order."""
        for link in self._links:
            if link:
                link.send(mine)
        return [link.recv() if link else mine for link in self._links]

    def barrier(self) -> None:
        """Waits for all others."""
        self.exchange(None)

    def settle(self) -> None:
        """Waits for what is on the stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class Team(Crew):
    """The processes, which have begun to start."""

    def __init__(
        self,
        actor: type[SideActor],
        shape: tuple[int, int],
        args: tuple[Any, ...] = (),
        cores: Sequence[Sequence[int]] = (),
        variables: Mapping[str, str] | None = None,
        nodes: Nodes = Nodes(),  # noqa: B008 (immutable)
    ):
        """Starts so many workers and servers: `actor` is made with what SideActor takes and `args`.
        The environment of the processes has these variables from the start."""
        super().__init__([])
        count = sum(shape)
        links: list[list[Connection | None]] = [[None] * count for _ in range(count)]
        for a, b in itertools.combinations(range(count), 2):
            links[a][b], links[b][a] = Pipe()
        try:
            for i in range(count):
                role, rank = ("worker", i) if i < shape[0] else ("server", i - shape[0])
                own = i, shape, links[i], cores[i] if cores else (), *args
                member = Member(f"{role} {rank}", actor, role, args=own, variables=variables or {})
                self.peers.append(Peer.spawn(member, nodes))
        except BaseException:
            self.close(0)
            raise
        finally:
            for link in filter(None, itertools.chain(*links)):
                link.close()

    def call(self, limit: float, method: str, *args: Any) -> list[Any]:
        """Runs a method in all, for so many seconds; a process that takes longer prints where it
        is. Gives the results in order."""
        for i, peer in enumerate(self.peers):
            peer.tell("within", limit + i * APART_S, method, *args)
        return self.results(limit + 2)
