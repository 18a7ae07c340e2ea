"""Several Python threads on one node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from nodes import LIMIT, Cluster, in_thread

import fserver

MakeCluster = Callable[..., Cluster]


def test_micro_batches_in_threads(cluster: MakeCluster) -> None:
    """Two threads per worker, with keys of their own; two servers; two threads answer each."""
    rounds, threads = 150, 2
    c = cluster(workers=2, servers=2)

    def work(worker: fserver.Worker, m: int) -> None:
        for i in range(rounds):
            value = float(1000 * worker.rank + 100 * m + i)
            y = [torch.empty(i % 5, 16) for _ in c.servers]
            h = worker.push_pull([torch.full((i % 5, 16), value)], [m], y, [m])
            worker.wait(h, LIMIT * 1e3)
            for rank, part in enumerate(y):
                assert bool((part == value + rank).all())

    answered_all = threading.Event()

    def serve(server: fserver.Server) -> None:
        while not answered_all.is_set():
            for handler, [x], _ in server.get_batch(timeout_ms=100):
                server.respond([x + server.rank], handler)

    done = [in_thread(serve, server) for server in c.servers for _ in range(2)]
    working = [in_thread(work, worker, m) for worker in c.workers for m in range(threads)]
    for future in working:
        future.result(LIMIT * 2)
    answered_all.set()
    for future in done:
        future.result(LIMIT)


def test_blocking_calls_release_the_gil(pair: Cluster) -> None:
    h = pair.worker.push_pull([torch.ones(1)], [0], [torch.empty(1)], [0])
    calls = [
        in_thread(lambda: pair.worker.wait(h, LIMIT * 1e3)),
        in_thread(lambda: pair.worker.barrier(True, True)),
    ]
    [(handler, _, _)] = pair.server.get_batch()
    calls.append(in_thread(pair.server.get_batch))
    for _ in range(20):  # another process may have the core for so long
        end = time.monotonic() + 0.3
        longest, last = 0.0, time.monotonic()
        while last < end:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        if longest < 0.25:
            break
    assert longest < 0.25
    assert not any(call.done() for call in calls)
    pair.server.respond([torch.ones(1)], handler)
    calls[0].result(LIMIT)
    pair.server.barrier(True, True)
    calls[1].result(LIMIT)
    pair.worker.close()
    with pytest.raises(fserver.Error):
        calls[2].result(LIMIT)


def test_several_threads_wait_for_one_handler(pair: Cluster) -> None:
    y = torch.empty(1)
    h = pair.worker.push_pull([torch.ones(1)], [0], [y], [0])
    waiting = [in_thread(lambda: (pair.worker.wait(h, LIMIT * 1e3), y.item())) for _ in range(4)]
    pair.server.respond([torch.full((1,), 5.0)], pair.server.get_batch()[0][0])
    assert [future.result(LIMIT)[1] for future in waiting] == [5] * 4


def test_close_while_threads_call(cluster: MakeCluster) -> None:
    """Threads that use a node while it is closed get ClosedError, at worst PeerLostError."""
    for _ in range(5):
        c = cluster()
        started = threading.Barrier(4)

        def use(call: Callable[[], object], started: threading.Barrier = started) -> None:
            started.wait(LIMIT)
            while True:
                call()

        def ask(w: fserver.Worker = c.worker) -> None:
            w.wait(w.push_pull([torch.ones(4096)], [0], [torch.empty(4096)], [0]))

        def serve(s: fserver.Server = c.server) -> None:
            for handler, tensors, _ in s.get_batch():
                s.respond(tensors, handler)

        using = [in_thread(use, call) for call in (ask, serve, c.worker.describe)]
        started.wait(LIMIT)
        time.sleep(0.02)  # let them use it for a while
        c.worker.close()
        c.server.close()
        for future in using:
            with pytest.raises((fserver.ClosedError, fserver.PeerLostError)):
                future.result(LIMIT)
