"""A pair on two hosts: the worker tells the server what to do through fserver itself, with pushes
of JSON under a key that no case has."""

import dataclasses
import json
from typing import Any

import torch

from .actors import TIMEOUT_MS, ServerActor, WorkerActor
from .crew import Case

CONTROL = 1 << 63
METHODS = ("prepare", "verify", "measure")


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
