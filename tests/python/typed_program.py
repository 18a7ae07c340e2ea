"""A program of a user's, for mypy --strict: see test_names.py. It is not run."""

from __future__ import annotations

import asyncio

import torch

import fserver
from fserver.channel import Channel


def worker_side(worker: fserver.Worker, x: torch.Tensor, y: torch.Tensor) -> float:
    handle: fserver.Handle = worker.push_pull([x], [0], [y], [0])
    handle.wait(timeout_ms=1000)
    if not handle.done():
        raise AssertionError
    number: int = handle
    worker.wait(number, timeout_ms=1000)
    worker.barrier(include_server=True, include_client=True)
    for link in worker.links():
        print(link.role, link.rank + 1, link.transport.upper(), link)
    stamps: list[int] = worker.fetch_trace(handle)
    return (stamps[-1] - stamps[0]) / 1e3


def server_side(server: fserver.Server) -> None:
    try:
        while True:
            for handler, (x,), keys in server.get_batch(timeout_ms=100, at_least=1):
                rank: int = server.worker_of(handler)
                server.respond([x * (rank + sum(keys))], handler)
    except fserver.ClosedError:
        pass
    except fserver.PeerLostError as error:
        print(error.role.upper(), error.rank + 1, error.address, error.reason)


async def both(worker: fserver.Worker, server: fserver.Server, x: torch.Tensor) -> None:
    first = worker.push_pull([x], [0], [], [])
    second = worker.push_pull([x], [1], [], [])
    for handler, tensors, _ in await server.get_batch_async(timeout_ms=1000):
        answers: list[torch.Tensor] = [t + 1 for t in tensors]
        server.respond(answers, handler)
    await first
    await asyncio.gather(first, second)
    await asyncio.wait_for(second, timeout=1)


def channels(worker: fserver.Worker, server: fserver.Server, x: torch.Tensor) -> None:
    with worker.channel([x], [0], [x.clone()], [0], mode="copy", name="a") as channel:
        channel.send(rows=[1])
        channel.recv()
    other: Channel = server.channel([0], [x], [0], device=server.device)
    mode: str = other.mode
    rows: list[torch.Tensor] = other.rows
    print(mode, rows, other.tensors[0][0].shape)
    other.close()


def main() -> None:
    shared = fserver.empty_shared(4, 8, dtype=torch.float32)
    settings = {"FSERVER_LOG": "error"}
    with fserver.Scheduler(scheduler="127.0.0.1:0", settings=settings) as scheduler:
        at: str = scheduler.scheduler
        with (
            fserver.Server(scheduler=at, workers=1, connect=False) as server,
            fserver.Worker.from_env() as worker,
        ):
            print(worker_side(worker, shared, fserver.shared_like(shared)), worker.describe())
            asyncio.run(both(worker, server, shared))
            channels(worker, server, shared)
            server_side(server)
    try:
        fserver.init()
        kept: int = fserver.push_pull([shared], [0], [], [])
        fserver.wait(kept)
    except (fserver.TimeoutError, fserver.Error) as error:
        print(error)
