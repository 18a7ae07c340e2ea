"""Two processes with a GPU each, which run functions for a test side by side."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 120.0


class Side:
    """What a function that runs in one of the processes is given.

    Attributes:
        index: 0, who speaks first, or 1.
        device: ordinal of its GPU.
    """

    def __init__(self, index: int, device: int, link: Connection) -> None:
        self.index, self.device, self.link = index, device, link

    def exchange(self, mine: Any) -> Any:
        """Gives the other side an object and takes its own."""
        self.link.send(mine)
        if not self.link.poll(LIMIT_S):
            raise TimeoutError("the other side does not answer")
        return self.link.recv()

    def barrier(self) -> None:
        self.exchange(None)

    def open(self, out: list[Any], into: list[Any], mode: str, timeout_ms: float = 20000) -> Any:
        """A channel with the other side: tensors that go there, and tensors that come."""
        from fserver.channel.gpu import GpuSide

        side = GpuSide(self.device, mode, [out], [into], self.index == 0, timeout_ms)
        side.attach([self.exchange(side.describe(0))])
        self.barrier()
        return side


def _serve(index: int, device: int, link: Connection, control: Connection) -> None:
    with contextlib.suppress(OSError):  # other processes are not in the way of the timings
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= 8:
            os.sched_setaffinity(0, set(cores[4 * index : 4 * index + 4]))
    import torch

    torch.cuda.set_device(device)
    side = Side(index, device, link)
    while True:
        try:
            module, name, kwargs = control.recv()
        except EOFError:
            return
        try:
            result = getattr(importlib.import_module(module), name)(side, **kwargs)
            control.send((True, result))
        except BaseException:  # to the test
            control.send((False, traceback.format_exc()))


class Pair:
    """The two processes, and their GPUs, which may be the same."""

    def __init__(self, devices: tuple[int, int]) -> None:
        self.devices = devices
        context = multiprocessing.get_context("spawn")
        links = context.Pipe()
        self.controls, self.processes = [], []
        for index, device in enumerate(devices):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(index, device, links[index], there), daemon=True
            )
            process.start()
            there.close()
            self.controls.append(here)
            self.processes.append(process)
        for link in links:
            link.close()

    def start(self, index: int, function: Any, **kwargs: Any) -> None:
        self.controls[index].send((function.__module__, function.__name__, kwargs))

    def result(self, index: int, limit: float = LIMIT_S) -> Any:
        if not self.controls[index].poll(limit):
            raise TimeoutError(f"side {index} has not finished within {limit} s")
        ok, value = self.controls[index].recv()
        if not ok:
            raise AssertionError(f"side {index}:\n{value}")
        return value

    def run(self, function: Any, **kwargs: Any) -> list[Any]:
        """Runs a function of a module on both sides and gives both results."""
        for index in (0, 1):
            self.start(index, function, **kwargs)
        results, errors = [], []
        for index in (0, 1):
            try:
                results.append(self.result(index))
            except Exception as error:  # both sides' errors are of interest
                errors.append(str(error))
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return results

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
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
