"""Worker groups that are connected and do nothing, for `fserver bench fanin --idle`.

A batch has a request of every group, so a group that never asks would stop the server. These ask
ahead: before a round each has as many requests waiting at the server as the round has exchanges,
and their answers are held back until it is over. While time is taken nothing travels between
them and the server.
"""

import time
from typing import Any

import torch

from .crew import Case, Crew
from .peers import TIMEOUT_MS, ServerPart, WorkerPart
from .turns import CrewPlayer, Figures


class IdlersPlayer(CrewPlayer):
    """A crew of "worker", "idlers" and "server"."""

    def __init__(self, crew: Crew, groups: int):
        super().__init__(crew)
        self._groups = groups

    def check(self, seed: int) -> None:
        self._beside(1, "verify", seed)

    def measure(self, warmup: int, count: int) -> Figures:
        return self._beside(warmup + count, "measure", warmup, count)

    def _beside(self, exchanges: int, method: str, *args: Any) -> Any:
        crew = self._crew
        crew.one("idlers", "queue", exchanges)
        crew.one("server", "await_requests", exchanges * self._groups)
        both = [crew["worker"], crew["server"]]
        for peer in both:
            peer.tell(method, *args)
        figures, _ = crew.results(peers=both)
        crew.one("server", "release")
        crew.one("idlers", "collect")
        return figures


class IdlersPart(WorkerPart):
    """The groups that only wait."""

    def prepare(self, case: Case) -> None:
        self._answer = torch.empty(0, dtype=torch.uint8)
        self._handles: list[tuple[Any, int]] = []

    def queue(self, count: int) -> None:
        """Asks so many times, for nothing."""
        self._handles = [
            (node, node.push_pull([], [], [self._answer], [0]))
            for _ in range(count)
            for node in self.nodes
        ]

    def collect(self) -> None:
        """Waits for all answers."""
        for node, handle in self._handles:
            node.wait(handle, TIMEOUT_MS * 10)


class IdlersServerPart(ServerPart):
    """A server that answers the first group at once and the others when a round is over."""

    def prepare(self, case: Case) -> None:
        super().prepare(case)
        self._kept: list[Any] = []
        self._requests = 0  # of the idle groups, so far
        self._nothing = [torch.empty(0, dtype=torch.uint8)]

    def await_requests(self, count: int) -> None:
        """Returns when so many more of the idle groups are here."""
        self._requests += count
        end = time.monotonic() + TIMEOUT_MS / 1e3
        while self.nodes[0].describe()["requests"] < self._requests + self.sequence:
            if time.monotonic() > end:
                raise AssertionError("the requests of the idle groups did not come")
            time.sleep(0.001)

    def next_batch(self) -> list[Any]:
        """The request of the first group."""
        batch = super().next_batch()
        self._kept += batch[1:]
        return batch[:1]

    def run(self, count: int) -> None:
        """ServerPart.run, for an echo to the first group."""
        get_batch, respond = self.nodes[0].get_batch, self.nodes[0].respond
        for _ in range(count):
            (handler, tensors, _), *rest = get_batch(timeout_ms=TIMEOUT_MS)
            respond(tensors, handler)
            self._kept += rest
        self.sequence += count

    def release(self) -> None:
        """Answers the idle groups."""
        for handler, _, _ in self._kept:
            self.nodes[0].respond(self._nothing, handler)
        self._kept = []
