"""The processes of the GPU tests: a server that answers, and workers that check what comes back.

Everything runs in children, so that the process of pytest never touches CUDA. A worker's function
gives its result; what it raises fails the test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fserver.bench import processes
from fserver.bench.errors import BenchError

LIMIT = 20.0
"""Seconds after which something that a test waits for will not come any more."""

START = 40.0
"""Seconds for a process to start, import torch and be heard for the first time."""

OVER = "the function is over"
"""What a process sends when it can run another function."""

POISON = 0xA5

PATHS = {"kernel": "kernel", "copy": "copy", "host": "host"}
"""How a channel of each mode goes between GPUs of one host."""


UNMAPPED = "cma unmapped"
"""A transport for options(): cma, by which no GPU's memory is mapped."""


FRESH = {"FRESH": "1"}
"""Environment of a process that is killed to see its device memory come back. Others that are idle
may have run something, and then their contexts would come back too, and hide what does not."""


def options(device: int | None, transport: str) -> dict[str, Any]:
    """Keywords of a node of rank 0 on a GPU, or on the CPU (None)."""
    gpu = device or 0
    backend = "CPU" if device is None else "GPU"
    how: dict[str, Any] = {"transport": transport}
    if transport == UNMAPPED:
        how = {"transport": "cma", "settings": {"BYTEPS_ENABLE_IPC": "0"}}
    return {"gpu": gpu, "rank_offset": -gpu, "backend": backend, **how}


def place(device: int | None) -> str:
    return "cpu" if device is None else f"cuda:{device}"


def _main(pipe: Connection) -> None:
    """Runs one job after the other: what it sends, its result or its error, and OVER."""
    import gc

    import torch

    import fserver  # noqa: F401

    torch.cuda.init()
    while True:
        function, args, settings = pipe.recv()
        os.environ.update(settings)
        try:
            pipe.send(function(pipe, *args))
        except BaseException as error:
            pipe.send(processes.failure(error))
        for name in settings:
            del os.environ[name]
        gc.collect()
        torch.cuda.set_device(0)
        torch.cuda.empty_cache()
        pipe.send(OVER)


class Process(processes.Child):
    """A process that runs functions of modules. To start one and to make its CUDA contexts
    takes seconds, so that tests share them."""

    idle: dict[frozenset[tuple[str, str]], list[Process]] = {}

    def __init__(self, env: dict[str, str]) -> None:
        self.env, self.first = frozenset(env.items()), True
        super().__init__("GPU process", _main, **env)

    @classmethod
    def of(cls, env: dict[str, str]) -> Process:
        """One with such an environment, started if none is idle."""
        free = cls.idle.get(frozenset(env.items()))
        return free.pop(0) if free else cls(env)

    @classmethod
    def ready(cls, count: int, **env: str) -> None:
        """Starts as many at once as are missing."""
        for _ in range(count - len(cls.idle.get(frozenset(env.items()), []))):
            cls(env).give_back()

    def give_back(self) -> None:
        Process.idle.setdefault(self.env, []).append(self)

    @classmethod
    def end(cls) -> None:
        for free in cls.idle.values():
            for one in free:
                one.close()
        cls.idle.clear()


class Child:
    """A function of a module that runs in a process of its own. Settings of fserver are those of
    the function, other variables those of the process."""

    def __init__(self, function: Callable[..., Any], *args: Any, **env: str) -> None:
        settings = {k: v for k, v in env.items() if k.startswith("FSERVER_")}
        self._on = Process.of({k: v for k, v in env.items() if k not in settings})
        self._dead = False
        self._on.name = function.__name__
        self._on.put((function, args, settings))

    def get(self) -> Any:
        """The next thing that the function sends, or its result."""
        limit = START if self._on.first else LIMIT
        self._on.first = False
        try:
            return self._on.get(limit)
        except BenchError:
            self._dead = True  # nodes may be left open
            raise

    def end(self) -> str:
        """What the function gives or says, for the error of another one."""
        try:
            return f"{self._on.name} ended with {self.get()}"
        except (BenchError, OSError) as error:
            return str(error)

    def put(self, value: Any) -> None:
        self._on.put(value)

    def kill(self) -> None:
        self._dead = True
        self._on.close()

    def reap(self, wait: bool) -> None:
        """Gives the process back, once the function has ended; else, or if that is not waited
        for, ends it."""
        try:
            while not self._dead:
                if not self._on.conn.poll(5 if wait else 0):
                    break
                if self._on.conn.recv() == OVER:
                    self._on.give_back()
                    return
        except (OSError, EOFError):
            pass
        self._on.close()


def allocator(_: Any) -> str:
    """Where torch has its memory of GPU 0 from: "native", "expandable" or "cudaMallocAsync"."""
    import torch

    kept = torch.zeros(1 << 20, device="cuda")
    name = torch.cuda.get_allocator_backend()
    if name == "native" and any(s.get("is_expandable") for s in torch.cuda.memory_snapshot()):
        name = "expandable"
    del kept
    return name


def server(device: int | None) -> Any:
    """One that hosts the scheduler and is not connected yet."""
    import fserver

    where = {"host_scheduler": True, "scheduler": "127.0.0.1:0"}
    return fserver.Server(**where, connect=False, **options(device, "auto"))


def worker(scheduler: str, device: int | None, transport: str) -> Any:
    import fserver

    return fserver.Worker(scheduler=scheduler, **options(device, transport))


def warm(t: Any) -> None:
    """Loads the kernels of this file: a thread that does so while a kernel of a channel waits
    would wait for that."""
    import torch

    t.fill_(1)
    torch.mul(t, 2, out=t)
    int((t != 2).sum())


def free_memory(pipe: Connection, device: int) -> None:
    """Bytes, each time that it is asked, once they have been the same for a while: the driver
    takes a dead process down with time."""
    import torch

    while pipe.recv():
        seen = [-1]
        end = time.monotonic() + LIMIT / 2
        while time.monotonic() < end and (len(seen) < 6 or len(set(seen[-5:])) > 1):
            seen.append(torch.cuda.mem_get_info(device)[0])
            time.sleep(0.1)
        pipe.send(seen[-1])
