"""Clusters for the tests: nodes in this process, and processes that are quick to start."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import fserver
from fserver import _loader
from fserver.bench import processes
from fserver.settings import environment

LIMIT = 30.0
"""Seconds after which something that a test waits for will not come any more."""


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> None:
    """The settings of whoever runs the tests are not those of the tests."""
    for name in environment():
        del os.environ[name]


@dataclass
class Cluster:
    """Nodes of one cluster in this process, by rank."""

    scheduler: fserver.Scheduler
    workers: list[fserver.Worker]
    servers: list[fserver.Server]

    @property
    def nodes(self) -> list[fserver.Node]:
        return [self.scheduler, *self.servers, *self.workers]

    @property
    def worker(self) -> fserver.Worker:
        return self.workers[0]

    @property
    def server(self) -> fserver.Server:
        return self.servers[0]

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Runs a call in a thread of its own; the future has its result or exception."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Runs blocking calls at the same time; gives their results."""
    futures = [in_thread(call) for call in calls]
    return [future.result(LIMIT) for future in futures]


def open_cluster(
    workers: int = 1, servers: int = 1, group_size: int = 1, connect: bool = True, **options: Any
) -> Cluster:
    """Opens all nodes of a cluster in this process."""
    shape = {"workers": workers, "servers": servers, "group_size": group_size}
    options = {"init_timeout": LIMIT, **options, **shape, "connect": False}
    options.setdefault("settings", {"FSERVER_LOG": "error"})
    options.setdefault("backend", "CPU")
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", **options)
    cluster = Cluster(scheduler, [], [])
    for group in range(max(workers, servers)):
        for gpu in range(group_size):
            place = {"scheduler": scheduler.scheduler, "node_rank": group, "gpu": gpu, **options}
            if group < servers:
                cluster.servers.append(fserver.Server(**place))
            if group < workers:
                cluster.workers.append(fserver.Worker(**place))
    if connect:
        together([node.connect for node in cluster.nodes])
    return cluster


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, and closes them at the end of the test."""
    made: list[Cluster] = []

    def make(*args: Any, **options: Any) -> Cluster:
        made.append(open_cluster(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pair(cluster: Callable[..., Cluster]) -> Cluster:
    """A worker and a server."""
    return cluster()


def eventually(condition: Callable[[], bool], limit: float = LIMIT) -> None:
    """Waits for what nobody reports."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.005)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no node, no receive buffer and no goroutine behind."""
    gc.collect()
    before = _loader.load().live()
    yield
    gc.collect()
    eventually(lambda: all(now <= was for now, was in zip(_live(), before, strict=True)))


def _live() -> tuple[int, int, int]:
    return _loader.load().live()


# Other processes


class Child(processes.Child):
    """Another process. Its function gets a connection to the test, then the arguments."""

    def __init__(self, function: Callable[..., None], *args: Any, **env: str):
        super().__init__(function.__name__, _child, function, args, env)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def get(self, limit: float = LIMIT) -> Any:
        """What the child has sent. Raises BenchError if an exception has ended it."""
        return super().get(limit)

    def kill(self) -> float:
        """kill -9; gives the time."""
        now = time.monotonic()
        self.process.kill()
        return now

    def freeze(self) -> None:
        """SIGSTOP; none of its threads runs any more."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: _states(self.pid) == {"T"})

    def end(self) -> None:
        """The child ends by itself, without an error."""
        self.process.join(LIMIT)
        while self.process.exitcode != 0:
            self.get(0)


def _states(pid: int) -> set[str]:
    """What the threads of a process do, by the letters of proc(5)."""
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.add(stat.read_text().rpartition(")")[2].split()[0])
    return found


class Parent:
    """The test, seen from a child."""

    def __init__(self, conn: Connection):
        self._conn = conn

    def put(self, value: Any) -> None:
        self._conn.send(value)

    def get(self) -> Any:
        return self._conn.recv()


def _child(
    conn: Connection, function: Callable[..., None], args: tuple[Any, ...], env: dict[str, str]
) -> None:
    for name in environment():
        del os.environ[name]
    os.environ.update({"STEPMESH_BACKEND": "CPU", **env})
    try:
        function(Parent(conn), *args)
    except Exception:
        traceback.print_exc()  # the test may fail before it hears of it
        raise


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts processes, and ends those that are left at the end of the test."""
    made: list[Child] = []

    def make(function: Callable[..., None], *args: Any, **env: str) -> Child:
        made.append(Child(function, *args, **env))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def port() -> Iterator[int]:
    """A port of loopback for a scheduler in another process. A socket that is bound and does not
    listen holds it; the scheduler, which sets SO_REUSEADDR too, can listen there."""
    with contextlib.closing(socket.socket()) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
