"""Processes that exchange objects with each other: those of another library, and of a graph."""

import ast
import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .actors import Actor
from .crew import Crew, Factory, Member, Nodes, spawned

APART_S = 0.5  # so that they do not say at the same time where they hang
WAIT = timedelta(seconds=30)


class SideActor(Actor):
    """One of the processes. `index` is its number among all, of which the workers come first, and
    `rank` that among those of its role; its tensors are on `device`. The store at `at` passes what
    they exchange."""

    def __init__(
        self,
        make: Factory,
        index: int,
        shape: tuple[int, int],
        at: tuple[str, int],
        cores: Sequence[int] = (),
        timeout: timedelta = WAIT,
    ):
        if cores:  # other processes are not in the way of the timings
            os.sched_setaffinity(0, set(cores))
        super().__init__(make)
        self.index, self.count = index, sum(shape)
        self.workers, self.servers = shape
        self.is_worker = index < self.workers
        self.rank = index if self.is_worker else index - self.workers
        self.device = torch.device("cpu")
        self.store = dist.TCPStore(*at, is_master=False, timeout=timeout)
        self._exchanges = itertools.count()

    def use(self, gpu: int) -> None:
        """Has the tensors on this GPU."""
        self.device = torch.device("cuda", gpu)
        torch.cuda.set_device(self.device)
        torch.ones(1, device=self.device).add_(1).item()

    def exchange(self, mine: Any) -> list[Any]:
        """What each of the processes gives, in their order: literals of Python."""
        turn = next(self._exchanges)
        self.store.set(f"{turn}/{self.index}", repr(mine))
        given = [self.store.get(f"{turn}/{i}") for i in range(self.count)]
        return [ast.literal_eval(text.decode()) for text in given]

    def barrier(self) -> None:
        self.exchange(None)

    def settle(self) -> None:
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
        host = "127.0.0.1"
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        at, members = (host, self._store.port), []
        for i in range(sum(shape)):
            role, rank = ("worker", i) if i < shape[0] else ("server", i - shape[0])
            own = i, shape, at, cores[i] if cores else (), *args
            members.append(
                Member(f"{role} {rank}", actor, role, args=own, variables=variables or {})
            )
        super().__init__(spawned(members, nodes))

    def call(self, limit: float, method: str, *args: Any) -> list[Any]:
        """Runs a method in all, for so many seconds; a process that takes longer prints where it
        is. Gives the results in order."""
        for i, peer in enumerate(self.peers):
            peer.tell("within", limit + i * APART_S, method, *args)
        return self.results(limit + 2)
