"""Processes that exchange objects with each other: those of another library, and of a graph."""

import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .actors import Actor
from .crew import Factory, Member, Nodes, Peer, end_all
from .errors import BenchError, WrongDataError

START_S = 120.0  # imports of torch in many processes
APART_S = 0.5  # so that they do not say at the same time where they hang
PARTING_S = 1.0  # for the others to say what they have seen, once one has failed


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


class Team:
    """The processes, which have begun to start. They end with the first error."""

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
        count = sum(shape)
        links: list[list[Connection | None]] = [[None] * count for _ in range(count)]
        for a, b in itertools.combinations(range(count), 2):
            links[a][b], links[b][a] = Pipe()
        self.peers: list[Peer] = []
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
        is. Gives the results in order. Raises as `results` does."""
        for i, peer in enumerate(self.peers):
            with contextlib.suppress(OSError):  # its result says how it ended
                peer.tell("within", limit + i * APART_S, method, *args)
        return self.results(limit + 2)

    def results(self, limit: float = START_S) -> list[Any]:
        """Waits for all: that they have started, or what a method returned. Once one has failed,
        the others have PARTING_S: the first may only have waited for another.

        Raises:
            BenchError: one failed or took too long; the text has all errors. The processes ended.
        """
        found: dict[str, Any] = {}
        errors: list[Exception] = []
        waiting = {peer.fileno(): peer for peer in self.peers}
        end = time.monotonic() + limit
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for peer in [waiting.pop(fd) for fd in list(waiting) if fd in ready]:
                try:
                    found[peer.name] = peer.result()
                except (BenchError, OSError) as error:
                    errors.append(error)
                    end = min(end, time.monotonic() + PARTING_S)
        if waiting and not errors:
            names = " and ".join(peer.name for peer in waiting.values())
            errors.append(BenchError(f"no answer from {names} within {limit:g} s"))
        if errors:
            self.close(0)
            wrong = [error for error in errors if isinstance(error, WrongDataError)]
            raise BenchError("\n".join(map(str, wrong or errors[::-1])))
        return [found[peer.name] for peer in self.peers]

    def leave(self) -> None:
        """Tells the processes to end, and does not wait for it."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.tell("end")

    def close(self, patience: float = 2) -> None:
        """Ends the processes, which have so many seconds each to do it themselves."""
        if patience:
            self.leave()
        peers, self.peers = self.peers, []
        end_all(peers, patience)
