"""A pair on two hosts: the worker tells the server what to do through fserver itself, with pushes
of JSON under a key that no case has."""

import contextlib
import dataclasses
import json
import os
import secrets
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from .actors import TIMEOUT_MS, ServerActor, WorkerActor
from .baseline import Baseline, compiled
from .crew import Case, Crew
from .errors import BenchError

CONTROL = 1 << 63
METHODS = ("prepare", "verify", "measure")
REPLY = 4096  # bytes of the answer to "listen": JSON, and spaces
TOKEN = "RAWECHO_TOKEN"


def far_baseline(crew: Crew, core: int) -> Baseline:
    """Starts raw tcp between the two hosts."""
    program = compiled("rawecho.c")  # now, while nobody waits for it
    found = crew.one("worker", "listen")
    if "error" in found:
        raise BenchError(f"the host of the server: {found['error']}")
    command = [str(program), "connect", found["host"], found["port"], str(core)]
    return Baseline("raw tcp", command, **{TOKEN: found["token"]})


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

    def listen(self) -> dict[str, str]:
        """Has the server start that of the baseline: where it is and the token that it wants, or
        the error."""
        token = secrets.token_hex(16)
        reply = torch.zeros(REPLY, dtype=torch.uint8)
        self._command("listen", token, reply=[reply])
        return {"token": token, **json.loads(bytes(reply.tolist()))}

    def _command(self, method: str, *args: Any, reply: Sequence[torch.Tensor] = ()) -> None:
        keys, node = [CONTROL] * len(reply), self.nodes[0]
        text = [_tensor(json.dumps([method, *args]))]
        handle = node.push_pull(text, [CONTROL], [*reply], keys, need_event=False)
        node.wait(handle, TIMEOUT_MS)


class ObeyingServer(ServerActor):
    """Does what the worker says."""

    def serve(self) -> None:
        """Returns when the worker has left."""
        from fserver import ClosedError

        node = self.nodes[0]
        with contextlib.ExitStack() as raw:
            while True:
                try:
                    ((handler, tensors, keys),) = node.get_batch()
                except ClosedError:
                    return
                if keys != [CONTROL]:
                    raise AssertionError(f"a push of keys {keys}, where a command was to come")
                method, *args = json.loads(bytes(tensors[0].tolist()))
                answer = []
                if method == "listen":
                    answer = [_tensor(json.dumps(self._listen(raw, *args)).ljust(REPLY))]
                node.respond(answer, handler, need_event=False)
                if method == "prepare":  # JSON has made lists of its tuples, which do as well
                    args = [Case(**args[0])]
                if method in METHODS:
                    getattr(self, method)(*args)

    def _listen(self, raw: contextlib.ExitStack, token: str) -> dict[str, str]:
        """Starts the server of the baseline, on the address that fserver has here, for as long as
        `raw` is open. Returns where it is, or the error."""
        host = self.nodes[0].address.rpartition(":")[0].strip("[]")
        try:
            command = [str(compiled("rawecho.c")), "listen", host]
        except BenchError as error:
            return {"error": str(error)[: REPLY // 8]}  # of which JSON makes six times as much
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env={**os.environ, TOKEN: token}, text=True, **pipes)
        raw.enter_context(process)
        raw.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        return {"host": host, "port": line} if line.isdecimal() else {"error": line[: REPLY // 8]}


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
