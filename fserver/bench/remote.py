"""A pair on two hosts: the worker tells the server what to do through fserver itself, with pushes
of JSON under a key that no case has."""

import dataclasses
import json
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from .actors import TIMEOUT_MS, ServerActor, WorkerActor
from .crew import Case, Crew, Member, pair_of

CONTROL = 1 << 63
METHODS = ("prepare", "verify", "measure")
SERVE_S = 24 * 3600.0  # for the server of two hosts


class CommandingWorker(WorkerActor):
    """Does what its parent says, and has the server do its part of it."""

    def prepare(self, case: Case) -> None:
        self._command("prepare", dataclasses.asdict(case))
        super().prepare(case)

    def verify(self, seed: int) -> None:
        self._command("verify", seed)
        super().verify(seed)

    def measure(self, warmup: int, count: int) -> dict[str, Any]:
        self._command("measure", warmup, count)
        return super().measure(warmup, count)

    def _command(self, method: str, *args: Any) -> None:
        text = torch.frombuffer(bytearray(json.dumps([method, *args]).encode()), dtype=torch.uint8)
        self.nodes[0].wait(self.nodes[0].push_pull([text], [CONTROL], [], []), TIMEOUT_MS)


class ObeyingServer(ServerActor):
    def serve(self) -> None:
        """Returns when the worker has left."""
        from fserver import ClosedError

        node = self.nodes[0]
        while True:
            try:
                ((handler, tensors, keys),) = node.get_batch()
            except ClosedError:
                return
            if keys != [CONTROL]:
                raise AssertionError(f"a push of keys {keys}, where a command was to come")
            method, *args = json.loads(bytes(tensors[0].tolist()))
            node.respond([], handler, need_event=False)
            if method == "prepare":  # JSON has made lists of its tuples, which do as well
                args = [Case(**args[0])]
            if method in METHODS:
                getattr(self, method)(*args)


def members(
    cores: tuple[int, int], role: str | None, worker: type[CommandingWorker] = CommandingWorker
) -> list[Member]:
    """The processes of this host: a pair, or the one of this role."""
    if not role:
        return pair_of(cores)
    is_server = role == "server"
    return [Member(role, ObeyingServer if is_server else worker, role, cores[is_server])]


def serve(connected: AbstractContextManager[Crew], scheduler: str) -> None:
    """Does what the worker of the other host says, until it has left."""
    print(f"bench: waiting for the worker at {scheduler}", file=sys.stderr)
    with connected as crew:
        crew.all("serve", timeout=SERVE_S)
