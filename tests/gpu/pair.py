"""Two processes with a GPU each, which run functions for a test side by side. Nothing waits long:
who does not finish is asked what its GPU sees, and ended."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

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
    index: int,
    device: int | None,
    link: Connection,
    control: Connection,
    rounds: Any,
    env: dict[str, str],
) -> None:
    os.environ.update(env)
    with contextlib.suppress(OSError):  # other processes are not in the way of the timings
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= 8:
            os.sched_setaffinity(0, set(cores[4 * index : 4 * index + 4]))
    import torch

    if device is not None:
        torch.cuda.set_device(device)
        torch.ones(1, device="cuda").add_(1).item()
    control.send((True, "ready"))
    while True:
        try:
            module, name, kwargs, limit = control.recv()
        except EOFError:
            return
        side = Side(index, device, link, rounds)
        faulthandler.dump_traceback_later(limit + 3, exit=True)
        watch = threading.Timer(limit, side.autopsy)
        watch.daemon = True
        watch.start()
        try:
            result = getattr(importlib.import_module(module), name)(side, **kwargs)
            control.send((True, result))
        except BaseException:  # to the test
            side.autopsy()
            control.send((False, traceback.format_exc()))
        watch.cancel()
        faulthandler.cancel_dump_traceback_later()


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
        context = multiprocessing.get_context("spawn")
        links = context.Pipe()
        rounds = context.RawArray("Q", 2)
        self.controls, self.processes = [], []
        for index, device in enumerate(devices):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(index, device, links[index], there, rounds, env[index % len(env)]),
                daemon=True,
            )
            process.start()
            there.close()
            self.controls.append(here)
            self.processes.append(process)
        for link in links:
            link.close()
        for index in (0, 1):
            self.result(index, START_S)

    def start(self, index: int, function: Any, limit: float = LIMIT_S, **kwargs: Any) -> None:
        self.controls[index].send((function.__module__, function.__name__, kwargs, limit))

    def result(self, index: int, limit: float = LIMIT_S + 5) -> Any:
        if not self.controls[index].poll(limit):
            raise TimeoutError(f"side {index} has not finished within {limit} s")
        ok, value = self.controls[index].recv()
        if not ok:
            raise AssertionError(f"side {index}:\n{value}")
        return value

    def run(self, function: Any, limit: float = LIMIT_S, **kwargs: Any) -> list[Any]:
        """Runs a function of a module on both sides and gives both results. When one fails, the
        other is not waited for."""
        for index in (0, 1):
            self.start(index, function, limit, **kwargs)
        results: dict[int, Any] = {}
        errors: list[str] = []
        end = time.monotonic() + limit + 5
        while len(results) + len(errors) < 2:
            ready = multiprocessing.connection.wait(
                [c for i, c in enumerate(self.controls) if i not in results],
                max(0.0, end - time.monotonic()),
            )
            if not ready:
                errors.append("nobody has finished in time")
                break
            for index in (0, 1):
                if index in results or self.controls[index] not in ready:
                    continue
                try:
                    results[index] = self.result(index, 1)
                except (Exception, EOFError) as error:
                    errors.append(f"side {index}: {error!r}" if not str(error) else str(error))
                    results[index] = None
                    end = min(end, time.monotonic() + 2)
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return [results[0], results[1]]

    def kill(self, index: int) -> None:
        os.kill(self.processes[index].pid, signal.SIGKILL)
        self.processes[index].join(10)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for control in self.controls:
            control.close()
        for process in self.processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join(5)
