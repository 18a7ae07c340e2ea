"""The Python side of peer.cc, and a program with a C++ plugin.

python peer.py worker|server PEER   peer.cc has that role, and this process the other one
python peer.py plugin PLUGIN        a worker of Python's and a server of the plugin's, one process
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import torch

import fserver


def work(scheduler: str) -> None:
    with fserver.Worker(scheduler=scheduler) as worker:
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


def beside(scheduler: str, path: str) -> None:
    plugin = ctypes.CDLL(path)
    assert plugin.plugin_begin(scheduler.encode()) == 0
    with fserver.Worker(scheduler=scheduler) as worker:
        x = torch.arange(1000, dtype=torch.float32)
        for step in range(300):
            y = torch.empty_like(x)
            worker.wait(worker.push_pull([x + step], [0], [y], [0]), timeout_ms=30000)
            assert torch.equal(y, (x + step) * 2)
    plugin.plugin_end()


def main(role: str, path: str) -> int:
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False)
    if role == "plugin":
        beside(scheduler.scheduler, path)
        scheduler.stop()
        return 0
    host, port = scheduler.scheduler.split(":")
    env = {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
    peer = subprocess.Popen([path], env={**os.environ, **env})
    try:
        (serve if role == "worker" else work)(scheduler.scheduler)
        status = peer.wait(30)
    finally:
        peer.kill()
    scheduler.stop()
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
