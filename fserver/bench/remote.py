"""A pair on two hosts: the worker tells the server what to do through fserver itself, with pushes
of JSON under a key that no case has."""

import dataclasses
import json
import secrets
import sys
from typing import Any

import torch

from .baseline import Baseline, FarBaseline, FarServer, compiled
from .crew import Case, Crew
from .errors import BenchError
from .parts import TIMEOUT_MS, ServerPart, WorkerPart

CONTROL = 1 << 63
METHODS = ("prepare", "verify", "measure")
REPLY = 4096  # bytes of the answer to "listen": JSON, and spaces


def far_baseline(
    crew: Crew, way: str, cores: tuple[int, int] | None, where: str | None
) -> Baseline:
    """Starts raw tcp between the two hosts. `where` is not used: the server says where it is."""
    compiled("rawecho.c")  # now, while nobody waits for it
    found = crew.one("worker", "listen")
    if "error" in found:
        raise BenchError(f"the host of the server: {found['error']}")
    return FarBaseline(cores and cores[0], **found)


class CommandingWorker(WorkerPart):
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

    def listen(self) -> dict[str, Any]:
        """Has the server start that of the baseline: where it is and the token that it wants, or
        the error."""
        token = secrets.token_hex(16)
        reply = torch.zeros(REPLY, dtype=torch.uint8)
        self._command("listen", token, reply=reply)
        found = json.loads(bytes(reply.tolist()))
        return found if "error" in found else {**found, "token": token}

    def _command(self, method: str, *args: Any, reply: torch.Tensor | None = None) -> None:
        text = bytearray(json.dumps([method, *args]).encode())
        pull = [] if reply is None else [reply]
        node = self.nodes[0]
        node.wait(
            node.push_pull(
                [torch.frombuffer(text, dtype=torch.uint8)],
                [CONTROL],
                pull,
                [CONTROL] * len(pull),
                need_event=False,
            ),
            TIMEOUT_MS,
        )


class ObeyingServer(ServerPart):
    """Does what the worker says."""

    raw: FarServer | None = None

    def serve(self) -> None:
        """Returns when the worker has left."""
        try:
            self._obey()
        finally:
            if self.raw is not None:
                self.raw.close()

    def _obey(self) -> None:
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
            if method == "listen":
                self._listen(handler, *args)
                continue
            node.respond([], handler, need_event=False)
            if method not in METHODS:
                raise AssertionError(f"{method!r}: no such command")
            if method == "prepare":
                (fields,) = args
                fields = {**fields, "out": tuple(fields["out"]), "back": tuple(fields["back"])}
                args = [Case(**fields)]
            getattr(self, method)(*args)

    def _listen(self, handler: int, token: str) -> None:
        """Starts the server of the baseline, on the address that fserver has here."""
        if self.raw is not None:
            self.raw.close()
            self.raw = None
        node = self.nodes[0]
        host = node.address.rpartition(":")[0].strip("[]")
        try:
            self.raw = FarServer(host, token)
            reply: dict[str, Any] = {"host": host, "port": self.raw.port}
        except BenchError as error:
            reply = {"error": str(error)[: REPLY // 8]}  # of which JSON makes six times as much
        text = bytearray(json.dumps(reply).ljust(REPLY).encode())
        node.respond([torch.frombuffer(text, dtype=torch.uint8)], handler, need_event=False)
        if self.raw is not None and not self.raw.accept():
            print("bench: there is no baseline: its client did not connect", file=sys.stderr)
