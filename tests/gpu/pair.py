"""Two processes with a GPU each, which run functions for a test side by side. Nothing waits long:
who does not finish is asked what its GPU sees, and ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from fserver.bench.errors import BenchError
from fserver.bench.processes import Child, failure, gather

LIMIT_S = 10.0
START_S = 40.0  # torch, and a context


def at_once(devices: tuple[int | None, int | None]) -> bool:
    """Whether the two processes use their GPUs at the same time. Of one GPU they take turns, which
    lasts milliseconds for each message, unless NVIDIA's multi-process service (MPS) runs."""
    return devices[0] != devices[1] or "CUDA_MPS_PIPE_DIRECTORY" in os.environ


class Side:
    """What a function that runs in one of the processes is given.

    Attributes:
        index: 0, who speaks first, or 1.
        device: ordinal of its GPU, or None: it uses none.
    """

    def __init__(self, index: int, device: int | None, link: Connection, rounds: Any) -> None:
        self.index, self.device, self.link = index, device, link
        self.channels: list[Any] = []
        self._rounds = rounds

    def exchange(self, mine: Any) -> Any:
        """Gives the other side an object and takes its own."""
        self.link.send(mine)
        if not self.link.poll(LIMIT_S):
            raise TimeoutError("the other side does not answer")
        return self.link.recv()

    def barrier(self) -> None:
        self.exchange(None)

    def together(self) -> None:
        """A barrier that both leave at the same moment: nobody is woken, which would take one of
        them tens of microseconds."""
        mine, theirs = self.index, 1 - self.index
        self._rounds[mine] = goal = self._rounds[mine] + 1
        end = time.monotonic() + LIMIT_S
        while self._rounds[theirs] < goal:
            if time.monotonic() > end:
                raise TimeoutError("the other side does not come")

    def open(
        self, out: list[Any], into: list[Any], mode: str, timeout_ms: float = 5000, **table: Any
    ) -> Any:
        """A channel with the other side: tensors that go there, and tensors that come."""
        from fserver.channel.gpu import GpuSide
        from fserver.channel.plan import Table

        first = self.index == 0
        side = GpuSide(self.device, mode, [out], [into], first, timeout_ms, Table(**table))
        self.channels.append(side)
        side.attach([self.exchange(side.describe(0))])
        self.barrier()
        return side

    def autopsy(self) -> None:
        """Prints what the open channels look like, and ends them."""
        for number, channel in enumerate(self.channels):
            lane, plan = channel.lane, channel.plan
            with contextlib.suppress(Exception):
                say(
                    self.index,
                    f"channel {number}: status {channel.status()}, stream {lane.pending()}",
                )
                for name, at in plan.layout.items():
                    size = min(48, plan.used - at)
                    words = memoryview(lane.peek(plan.arena + at, size)).cast("I")
                    say(self.index, f"  {name} at {at}: {list(words)}")
            lane.abort()


def say(index: int, text: str) -> None:
    print(f"    side {index}: {text}", file=sys.stderr, flush=True)


def _serve(
    control: Connection, index: int, device: int | None, link: Connection, rounds: Any
) -> None:
    with contextlib.suppress(OSError):  # other processes are not in the way of the timings
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= 8:
            os.sched_setaffinity(0, set(cores[4 * index : 4 * index + 4]))
    import torch

    if device is not None:
        torch.cuda.set_device(device)
        torch.ones(1, device="cuda").add_(1).item()
    control.send("ready")
    while True:
        function, kwargs, limit = control.recv()
        side = Side(index, device, link, rounds)
        watch = threading.Timer(limit, side.autopsy)
        watch.daemon = True
        watch.start()
        try:
            answer = function(side, **kwargs)
        except BaseException as error:  # to the test
            side.autopsy()
            answer = failure(error)
        control.send(answer)
        watch.cancel()


class Pair:
    """The two processes, and their GPUs, which may be the same.

    Args:
        devices: ordinals, as each process sees them.
        env: environment variables of both, or of each.
    """

    def __init__(
        self,
        devices: tuple[int | None, int | None],
        *env: dict[str, str],
    ) -> None:
        self.devices = devices
        env = env or ({},)
        links, rounds = multiprocessing.Pipe(), multiprocessing.RawArray("Q", 2)
        self.sides = [
            Child(f"side {i}", _serve, i, device, links[i], rounds, **env[i % len(env)])
            for i, device in enumerate(devices)
        ]
        for link in links:
            link.close()
        self._results(2 * START_S)

    def start(self, index: int, function: Any, limit: float = LIMIT_S, **kwargs: Any) -> None:
        self.sides[index].put((function, kwargs, limit))

    def result(self, index: int, limit: float = LIMIT_S + 5) -> Any:
        return self.sides[index].get(limit)

    def run(self, function: Any, limit: float = LIMIT_S, **kwargs: Any) -> list[Any]:
        """Runs a function of a module on both sides and gives both results. When one fails, the
        other is not waited for."""
        for index in (0, 1):
            self.start(index, function, limit, **kwargs)
        return self._results(limit + 5)

    def _results(self, limit: float) -> list[Any]:
        try:
            return gather(self.sides, limit, 2)
        except BenchError:
            self.close()
            raise

    def kill(self, index: int) -> None:
        self.sides[index].close()

    @property
    def alive(self) -> bool:
        return all(side.process.is_alive() for side in self.sides)

    def close(self) -> None:
        for side in self.sides:
            side.conn.close()
        for side in self.sides:
            side.close(1)
