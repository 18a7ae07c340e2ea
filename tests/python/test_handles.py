"""Handles: the ints that they are, wait, done and await; and get_batch in event loops."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pytest
import torch
from nodes import LIMIT, Cluster, eventually, in_thread, open_cluster

import fserver
from fserver import aio, fserver_lib

MakeCluster = Callable[..., Cluster]
T = TypeVar("T")

MODES = pytest.mark.parametrize("progress", ["caller", "thread"])


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own, within the limit of the tests."""

    async def bounded() -> T:
        return await asyncio.wait_for(work, LIMIT)

    return asyncio.run(bounded())


def ask(worker: fserver.Worker, value: float = 1.0) -> tuple[fserver.Handle, torch.Tensor]:
    y = torch.zeros(4)
    return worker.push_pull([torch.full((4,), float(value))], [0], [y], [0]), y


def serve(server: fserver.Server, n: int) -> None:
    """Answers n batches with twice what was pushed."""
    for _ in range(n):
        for handler, (x,), _ in server.get_batch(LIMIT * 1e3):
            server.respond([x * 2], handler)


async def serve_async(server: fserver.Server, n: int) -> None:
    for _ in range(n):
        for handler, (x,), _ in await server.get_batch_async():
            server.respond([x * 2], handler)


# The int that it is


def test_a_handle_is_the_int_that_it_was(pair: Cluster) -> None:
    serving = in_thread(serve, pair.server, 2)
    first, _ = ask(pair.worker)
    second, _ = ask(pair.worker)
    assert (first, second) == (0, 2) and isinstance(second, int)
    assert isinstance(second, fserver.Handle)
    assert second + 1 == 3 and not first and second > first and hash(second) == hash(2)
    assert {2: "x"}[second] == "x" and second in {2} and [0, 1, 2].index(second) == 2
    assert f"{second} {second:03d} {second!s} %d" % second == "2 002 2 2"
    assert json.dumps([second]) == "[2]" and torch.tensor([second]).tolist() == [2]
    for plain in (copy.copy(second), copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert plain == 2 and type(plain) is int
    serving.result(LIMIT)
    for handler in (second, 2, 3, second + 1):
        pair.worker.wait(handler, LIMIT * 1e3)
    assert pair.worker.get_all_handlers(second) == [2, 3]
    assert len(pair.worker.fetch_trace(second)) == 8


def test_the_functions_of_stepmesh_give_plain_ints(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fserver, "Worker", fserver_lib.StepmeshWorker)
    pair = cluster()
    assert type(pair.worker.push_pull([torch.zeros(1)], [0], [], [])) is int


def test_handles_of_two_workers_are_not_equal(cluster: MakeCluster) -> None:
    """asyncio.gather takes equal arguments for one."""
    both = cluster(workers=2)
    handles = [ask(worker)[0] for worker in both.workers]
    assert [int(h) for h in handles] == [0, 0]
    assert handles[0] != handles[1] and handles[0] == 0 == handles[1]
    assert len(set(handles)) == 2 and {0: "x"}[handles[1]] == "x"

    async def work() -> None:
        await asyncio.gather(*handles, serve_async(both.server, 1))

    run(work())
    assert all(handle.done() for handle in handles)


# wait and done


@MODES
def test_wait_and_done(cluster: MakeCluster, progress: str) -> None:
    pair = cluster(progress=progress)
    handle, y = ask(pair.worker, 3)
    assert not handle.done()
    with pytest.raises(fserver.TimeoutError, match=r"^wait: handler 0 has not completed"):
        handle.wait(timeout_ms=5)
    serving = in_thread(serve, pair.server, 1)
    begin = time.monotonic()
    while not handle.done():  # it makes progress by itself
        assert time.monotonic() - begin < LIMIT
    handle.wait()
    assert y.tolist() == [6] * 4
    serving.result(LIMIT)
    pair.worker.close()
    assert handle.done()
    with pytest.raises(fserver.ClosedError):
        handle.wait()


def test_done_lets_go(pair: Cluster) -> None:
    """As wait does: who polls may change the tensors then."""
    handle, y = ask(pair.worker, 3)
    other, z = ask(pair.worker, 4)
    serving = in_thread(serve, pair.server, 2)
    pair.worker.wait(other)  # ends the first as well, before anybody asks
    while not handle.done():
        pass
    for t in (y, z):
        t.untyped_storage().resize_(0)
    serving.result(LIMIT)


def test_a_forgotten_handle(pair: Cluster) -> None:
    """Its request has ended, so it is done, and wait knows no more about it."""

    def serve_all(n: int) -> None:
        for _ in range(n):
            for handler, _, _ in pair.server.get_batch(LIMIT * 1e3):
                pair.server.respond([], handler)

    serving = in_thread(serve_all, 4098)
    x = torch.zeros(1)
    handle = pair.worker.push_pull([x], [0], [], [])
    for _ in range(4097):
        pair.worker.wait(pair.worker.push_pull([x], [0], [], []), LIMIT * 1e3)
    serving.result(LIMIT)
    assert handle.done()
    with pytest.raises(fserver.ConfigError, match="handler 0 is not known"):
        handle.wait()
    with pytest.raises(fserver.ConfigError, match="handler 0 is not known"):
        run(_awaited(handle))


def test_a_handle_of_no_worker() -> None:
    handle = fserver.Handle(3)
    assert handle.done() and repr(handle) == "<fserver.Handle 3>"
    with pytest.raises(fserver.ConfigError, match="^wait: this Handle is of no worker"):
        handle.wait()
    with pytest.raises(fserver.ConfigError, match="^await: this Handle is of no worker"):
        run(_awaited(handle))


async def _awaited(what: Awaitable[T]) -> T:
    return await what


# await


@MODES
def test_await(cluster: MakeCluster, progress: str) -> None:
    """One event loop serves and asks, while no thread is in a call."""
    pair = cluster(progress=progress)
    threads = threading.active_count()

    async def work() -> list[float]:
        serving = asyncio.ensure_future(serve_async(pair.server, 30))
        took = []
        for i in range(30):
            begin = time.monotonic()
            handle, y = ask(pair.worker, i)
            await handle
            took.append(time.monotonic() - begin)
            assert y.tolist() == [2 * i] * 4 and handle.done()
            await handle  # it has completed
            assert threading.active_count() == threads
        await serving
        return took

    assert sorted(run(work()))[15] < 0.1, "it waits for timers, not for what comes"


def test_many_awaits_in_several_loops(cluster: MakeCluster) -> None:
    """200 awaits in each of three event loops, of one worker."""
    pair = cluster()
    count = 200

    async def work() -> None:
        asked = [ask(pair.worker, i) for i in range(count)]
        await asyncio.gather(*(handle for handle, _ in asked))
        for i, (_, y) in enumerate(asked):
            assert y.tolist() == [2 * i] * 4

    serving = in_thread(serve, pair.server, 3 * count)
    loops = [in_thread(run, work()) for _ in range(3)]
    for loop in loops:
        loop.result(LIMIT)
    serving.result(LIMIT)


def test_two_loops_take_batches(cluster: MakeCluster) -> None:
    """Each batch goes to one of them."""
    pair = cluster()
    serving = [in_thread(run, serve_async(pair.server, 50)) for _ in range(2)]
    asked = [ask(pair.worker, i) for i in range(100)]
    for i, (handle, y) in enumerate(asked):
        handle.wait(LIMIT * 1e3)
        assert y.tolist() == [2 * i] * 4
    for loop in serving:
        loop.result(LIMIT)


def test_a_cancelled_await(pair: Cluster) -> None:
    async def work() -> None:
        batch = asyncio.ensure_future(pair.server.get_batch_async())
        await asyncio.sleep(0.01)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        handle, y = ask(pair.worker, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.02)
        task = asyncio.ensure_future(_awaited(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not handle.done()
        await asyncio.gather(handle, serve_async(pair.server, 1))  # no batch has been lost
        assert y.tolist() == [2] * 4
        await handle
        handle.wait(0)

    run(work())


def test_the_limit_of_get_batch_async(pair: Cluster) -> None:
    async def work() -> None:
        assert await pair.server.get_batch_async(timeout_ms=0) == []
        begin = time.monotonic()
        assert await pair.server.get_batch_async(timeout_ms=50) == []
        assert 0.04 < time.monotonic() - begin < 5
        ask(pair.worker)
        [(handler, _, keys)] = await pair.server.get_batch_async(LIMIT * 1e3)
        assert keys == [0]
        pair.server.fail(handler, "no")
        for bad in (-1, float("nan"), "1"):
            with pytest.raises(fserver.ConfigError, match="timeout_ms is .*want milliseconds"):
                await pair.server.get_batch_async(bad)  # type: ignore[arg-type]
        with pytest.raises(fserver.ShapeError, match="at_least is 2"):
            await pair.server.get_batch_async(at_least=2)

    run(work())


# Errors


def test_refused_through_await(pair: Cluster) -> None:
    async def work() -> None:
        handle, _ = ask(pair.worker)
        [(handler, _, _)] = await pair.server.get_batch_async()
        pair.server.fail(handler, "not today")
        for _ in range(2):
            with pytest.raises(fserver.RefusedError, match="not today"):
                await handle
        assert repr(handle) == f"<fserver.Handle {handle} of worker 0: failed: RefusedError>"

    run(work())


@MODES
def test_a_lost_server_through_await(cluster: MakeCluster, progress: str) -> None:
    pair = cluster(progress=progress)

    async def work() -> None:
        asked = [ask(pair.worker)[0] for _ in range(3)]
        waiting = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.02)
        await asyncio.to_thread(pair.server.close)
        assert {type(error) for error in await waiting} == {fserver.PeerLostError}
        late, _ = ask(pair.worker)  # it fails as soon as it is handed over
        with pytest.raises(fserver.PeerLostError):
            await late

    run(work())


def test_a_lost_worker_through_get_batch_async(pair: Cluster) -> None:
    async def work() -> None:
        waiting = asyncio.ensure_future(pair.server.get_batch_async())
        await asyncio.sleep(0.02)
        await asyncio.to_thread(pair.worker.close)
        with pytest.raises(fserver.PeerLostError):
            await waiting

    run(work())


@MODES
def test_a_node_that_is_closed(cluster: MakeCluster, progress: str) -> None:
    """From the event loop and from another thread, while coroutines wait; and afterwards."""
    pair, other = cluster(progress=progress), cluster(progress=progress)

    async def work() -> None:
        handle, _ = ask(pair.worker)
        waiting = [asyncio.ensure_future(_awaited(handle)) for _ in range(2)]
        await asyncio.sleep(0.02)
        pair.worker.close()
        for one in (*waiting, handle):
            with pytest.raises(fserver.ClosedError):
                await one
        batch = asyncio.ensure_future(other.server.get_batch_async())
        await asyncio.sleep(0.02)
        await asyncio.to_thread(other.server.close)
        for again in (batch, other.server.get_batch_async()):
            with pytest.raises(fserver.ClosedError):
                await again

    run(work())


def test_a_node_that_is_dropped(nothing_left: None) -> None:
    """A handle does not keep its worker open, and a coroutine that waits does."""
    pair = open_cluster()
    handle, _ = ask(pair.worker)
    serve(pair.server, 1)
    handle.wait(LIMIT * 1e3)

    async def work() -> None:
        await handle
        worker = pair.workers.pop()
        last, _ = ask(worker)
        waiting = asyncio.ensure_future(_awaited(last))
        await asyncio.sleep(0)
        del worker
        await serve_async(pair.server, 1)
        await waiting

    run(work())
    gc.collect()
    assert handle.done() and repr(handle) == f"<fserver.Handle {handle}>"
    with pytest.raises(fserver.ClosedError, match="dropped"):
        handle.wait()
    with pytest.raises(fserver.ClosedError, match="dropped"):
        run(_awaited(handle))
    pair.close()


def test_no_descriptor_is_left(pair: Cluster) -> None:
    """Of event loops that end, and of nodes that are closed in a loop that goes on."""

    async def once() -> None:
        handle, _ = ask(pair.worker)
        await asyncio.gather(handle, serve_async(pair.server, 1))

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    run(once())
    before = descriptors()
    for _ in range(5):
        run(once())
    eventually(lambda: descriptors() <= before)


def test_a_ring_behind_the_looks(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ring of a node may come while timers run for an earlier one: it has looks, too."""
    pair = cluster()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[Any, ...]] = []
        watch = aio._Watch(pair.worker._node, loop)
        monkeypatch.setattr(loop, "call_later", lambda *args: timers.append(args))

        def run_timer() -> float:
            after, call, *args = timers.pop()
            call(*args)
            return float(after)

        watch._ready()
        assert run_timer() == 1
        watch._ready()
        assert run_timer() == 10
        assert run_timer() == 1  # of the second ring
        assert run_timer() == 10
        assert not timers

    run(work())


def test_a_loop_lets_go_of_nodes_that_stop(cluster: MakeCluster) -> None:
    """Also if they stop in a thread: the engine tells the loop before the node is closed."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        readers = len(loop._selector.get_map())  # type: ignore[attr-defined]
        for turn in range(4):
            pair = cluster()
            handle, _ = ask(pair.worker)
            await serve_async(pair.server, 1)
            await handle
            waits = asyncio.ensure_future(pair.server.get_batch_async())
            await asyncio.sleep(0.02)
            if turn % 2:
                waits.cancel()
            await asyncio.to_thread(pair.close)
            await asyncio.gather(waits, return_exceptions=True)
        end = time.monotonic() + LIMIT
        while len(loop._selector.get_map()) > readers:  # type: ignore[attr-defined]
            assert time.monotonic() < end
            await asyncio.sleep(0.05)

    run(work())
