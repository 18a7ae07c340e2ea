"""The Python side of peer.cc and of ps_peer.cc, and a program with a C++ plugin.

python peer.py worker|server PEER   PEER has that role, and this process the other one
python peer.py beside PEER          a worker of Python's, and one of ps_peer.cc with keys and values
python peer.py plugin PLUGIN        a worker of Python's and a server of the plugin's, one process
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

import fserver


def work(scheduler: str, **settings: int) -> None:
    with fserver.Worker(scheduler=scheduler, **settings) as worker:
        x = torch.randn(3, 4, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        shape = torch.empty(2, dtype=torch.int64)
        for step in range(20):
            handle = worker.push_pull([x, torch.tensor([step])], [1, 2], [y, shape], [1, 2])
            worker.wait(handle, timeout_ms=30000)
            assert torch.equal(x, y)
            assert shape.tolist() == [3 + step, 4]
        try:
            worker.wait(worker.push_pull([x], [1], [y], [1]), timeout_ms=30000)
            raise AssertionError("not refused")
        except fserver.RefusedError as error:
            assert error.reason == "no more"
        worker.barrier(True, True)
        worker.barrier(False, True)  # as Finalize of other workers does


def serve(scheduler: str) -> None:
    with fserver.Server(scheduler=scheduler) as server:
        while True:
            ((handler, tensors, keys),) = server.get_batch(timeout_ms=30000)
            if keys == [1]:
                server.fail(handler, "no more")
                break
            x, step = tensors
            assert x.dtype == torch.bfloat16 and x.shape == (3, 4)
            assert x.flatten()[0] == 1
            server.respond([x, torch.tensor([3 + int(step[0]), 4])], handler)
        server.barrier(True, True)


def with_plugin(scheduler: str, path: str) -> None:
    plugin = ctypes.CDLL(path)
    assert plugin.plugin_begin(scheduler.encode()) == 0
    with fserver.Worker(scheduler=scheduler) as worker:
        x = torch.arange(1000, dtype=torch.float32)
        for step in range(300):
            y = torch.empty_like(x)
            worker.wait(worker.push_pull([x + step], [0], [y], [0]), timeout_ms=30000)
            assert torch.equal(y, (x + step) * 2)
    plugin.plugin_end()


@contextlib.contextmanager
def started(scheduler: str, role: str, *command: str, workers: int = 1) -> Iterator[None]:
    """Another process with a role, which has to end well."""
    host, port = scheduler.split(":")
    env = {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
    env |= {"DMLC_NUM_WORKER": str(workers), "DMLC_NODE_RANK": "0"}
    peer = subprocess.Popen(command, env={**os.environ, **env})
    try:
        yield
        assert peer.wait(30) == 0
    finally:
        peer.kill()


def main(role: str, path: str) -> None:
    workers = 2 if role == "beside" else 1
    with fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, workers=workers) as node:
        scheduler = node.scheduler
        if role == "plugin":
            with_plugin(scheduler, path)
        elif role == "beside":
            with (
                started(scheduler, "server", path, workers=2),
                started(scheduler, "worker", path, "values", workers=2),
            ):
                work(scheduler, workers=2, node_rank=1)
        else:
            with started(scheduler, role, path):
                (serve if role == "worker" else work)(scheduler)


if __name__ == "__main__":
    main(*sys.argv[1:])
