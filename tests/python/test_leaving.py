"""Servers that end, in whatever way, after their workers have left and without stop()."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Parent, in_thread

import fserver

MakeChild = Callable[..., Child]

OPTIONS: dict[str, Any] = {"backend": "CPU", "init_timeout": LIMIT}
LINES: dict[str, Any] = {"FSERVER_LOG": "warn", "FSERVER_STOP_TIMEOUT": 10}
WAYS = ("return", "close", "drop", "exit", "kill")


def serve(server: fserver.Server) -> None:
    """Answers until the workers leave."""
    while True:
        try:
            batch = server.get_batch()
        except fserver.ClosedError:
            return
        for handler, tensors, _ in batch:
            server.respond([tensors[0] + 1], handler)


def server_process(parent: Parent, way: str, scheduler: str) -> None:
    """A server, with the scheduler if there is no address of one."""
    where = {"scheduler": scheduler} if scheduler else {"host_scheduler": True}
    where = where if scheduler else {"scheduler": "127.0.0.1:0", **where}
    server = fserver.Server(**where, **OPTIONS, servers=int(parent.get()), connect=False)
    parent.put(scheduler or server.scheduler)
    server.connect()
    serve(server)
    if way == "close":
        server.close()
    elif way == "drop":
        del server
        gc.collect()
        parent.put("dropped")
        parent.get()  # the process lives on
    elif way == "exit":
        sys.exit(0)
    elif way == "kill":
        os._exit(0)


def work(scheduler: str, servers: int) -> fserver.Worker:
    worker = fserver.Worker(
        scheduler=scheduler, servers=servers, **OPTIONS, settings=LINES, connect=True
    )
    x, y = torch.ones(8), [torch.empty(8) for _ in range(servers)]
    worker.wait(worker.push_pull([x], [1], y, list(range(2, 2 + servers))))
    assert all(out.tolist() == [2.0] * 8 for out in y)
    return worker


@pytest.mark.parametrize("way", WAYS)
def test_one_server(child: MakeChild, way: str) -> None:
    """The scheduler is a node of the test."""
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", **OPTIONS, connect=False)
    ready = in_thread(scheduler.connect)
    server = child(server_process, way, scheduler.scheduler)
    server.put(1)
    worker = work(server.get(), 1)
    ready.result(LIMIT)
    worker.stop()
    scheduler.stop()
    if way == "drop":
        assert server.get() == "dropped"
        server.put("")
    server.end()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "kill"])
def test_server_that_hosts_the_scheduler(child: MakeChild, way: str) -> None:
    """Two processes are a whole cluster; the one that ends first takes the scheduler along."""
    server = child(server_process, way, "")
    server.put(1)
    worker = work(server.get(), 1)
    worker.stop()
    if way == "drop":
        assert server.get() == "dropped"
        server.put("")
    server.end()


@pytest.mark.parametrize("end", [KeyboardInterrupt, fserver.TimeoutError])
def test_a_server_that_hosts_the_scheduler_stops_in_time(end: type[BaseException]) -> None:
    """While its worker stays: the scheduler would wait for that one without a limit."""
    hosts: dict[str, Any] = {"scheduler": "127.0.0.1:0", "host_scheduler": True, **OPTIONS}
    limit = {"FSERVER_STOP_TIMEOUT": 1 if end is fserver.TimeoutError else 30}
    server = fserver.Server(**hosts, settings=limit, connect=False)
    ready = in_thread(server.connect)
    worker = fserver.Worker(scheduler=server.scheduler, **OPTIONS)
    ready.result(LIMIT)
    if end is KeyboardInterrupt:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    with pytest.raises(end):
        server.stop()
    assert time.monotonic() - begin < 10
    assert server._hosted is not None and server._hosted.closed
    server.close()
    worker.close()


def test_a_program_that_ends(tmp_path: Any) -> None:
    """An interpreter that comes to its end, with the node still there."""
    program = tmp_path / "server.py"
    program.write_text(
        "import fserver\n"
        'server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, backend="CPU",\n'
        "                        connect=False)\n"
        "print(server.scheduler, flush=True)\n"
        "server.connect()\n"
        "try:\n"
        "    while True:\n"
        "        for handler, [x], _ in server.get_batch():\n"
        "            server.respond([x + 1], handler)\n"
        "except fserver.ClosedError:\n"
        "    pass\n"
    )
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": path, "FSERVER_LOG": "warn"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout and server.stderr
        worker = work(server.stdout.readline().strip(), 1)
        worker.stop()
        assert server.wait(LIMIT) == 0
        assert server.stderr.read() == ""


@pytest.mark.parametrize("ends", [["exit", "exit"], ["kill", "close"]])
def test_several_servers(child: MakeChild, ends: list[str]) -> None:
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", servers=2, **OPTIONS, connect=False)
    ready = in_thread(scheduler.connect)
    servers = [
        child(server_process, way, scheduler.scheduler, DMLC_NODE_RANK=str(i))
        for i, way in enumerate(ends)
    ]
    for server in servers:
        server.put(2)
        server.get()
    worker = work(scheduler.scheduler, 2)
    ready.result(LIMIT)
    worker.stop()
    scheduler.stop()
    for server in servers:
        server.end()


def test_before_the_worker_leaves(child: MakeChild) -> None:
    """A server that ends while it is needed is lost, as ever."""
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", **OPTIONS, connect=False)
    ready = in_thread(scheduler.connect)
    server = child(server_process, "kill", scheduler.scheduler)
    server.put(1)
    worker = work(server.get(), 1)
    ready.result(LIMIT)
    server.kill()
    x = torch.ones(8)
    with pytest.raises(fserver.PeerLostError, match="server 0"):
        for _ in range(1000):
            worker.wait(worker.push_pull([x], [1], [x.clone()], [2]), timeout_ms=LIMIT * 1000)
    worker.close()
    scheduler.close()
