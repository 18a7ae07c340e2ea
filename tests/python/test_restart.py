"""Nodes that die, or stop for a while, and come back, while the others run on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Parent, eventually, in_thread, together

import fserver

MakeChild = Callable[..., Child]

QUIET = {"FSERVER_LOG": "error"}
RAILS = {"group_size": 2, "init_timeout": LIMIT, "settings": QUIET}
"""Two rails of a worker and a server each: what happens on one is nothing to the other."""


def scheduler_process(parent: Parent, port: int, options: dict[str, Any]) -> None:
    node = fserver.Scheduler(scheduler=f"127.0.0.1:{port}", connect=False, **options)
    parent.put("open")
    node.connect()
    parent.put("connected")
    node.stop()
    parent.put("stopped")


def server_process(
    parent: Parent, scheduler: str, options: dict[str, Any], meets: bool = False
) -> None:
    """Answers with the bytes plus one, until the worker leaves."""
    node = fserver.Server(scheduler=scheduler, connect=False, **options)
    parent.put("open")
    node.connect()
    parent.put("connected")
    answer(node)
    if meets:  # the other servers, so that all know of the scheduler
        node.barrier(True, False)
    node.stop()
    parent.put("stopped")


def answer(node: fserver.Server, rounds: int | None = None) -> int:
    """Answers each request with its bytes plus one. Gives the number of losses that it saw."""
    losses = 0
    while rounds is None or rounds > 0:
        try:
            batch = node.get_batch()
        except fserver.ClosedError:
            break
        except fserver.PeerLostError:
            losses += 1
            time.sleep(0.001)
            continue
        for handler, [x], _ in batch:
            try:
                node.respond([x + 1], handler)
            except fserver.PeerLostError:
                losses += 1
            except fserver.ClosedError:  # the test is over
                return losses
        if rounds is not None:
            rounds -= 1
    return losses


def worker_process(parent: Parent, scheduler: str, options: dict[str, Any], count: int) -> None:
    """Makes push_pulls, then says so and stops when it is told to."""
    node = fserver.Worker(scheduler=scheduler, connect=False, **options)
    parent.put("open")
    node.connect()
    parent.put("connected")
    for i in range(count):
        ask(node, i)
    parent.put("done")
    parent.get()
    node.stop()
    parent.put("stopped")


def ask(node: fserver.Worker, i: int = 0, timeout_ms: float = LIMIT * 1e3) -> None:
    """One push_pull, with its bytes checked."""
    x = torch.full((64,), float(i % 1000))
    y = [torch.zeros(64) for _ in range(node.servers)]
    node.wait(node.push_pull([x], [i % 4], y, [0]), timeout_ms)
    for t in y:
        assert bool((t == x + 1).all()), (i, t)


@contextmanager
def busy(worker: fserver.Worker, server: fserver.Server) -> Iterator[None]:
    """A pair that makes push_pulls meanwhile, at least 1,000, and finds no fault."""
    stop = threading.Event()

    def push() -> int:
        count = 0
        while count < 1000 or not stop.is_set():
            ask(worker, count)
            count += 1
        return count

    def serve() -> None:
        while not done.done():
            for handler, [x], _ in server.get_batch(timeout_ms=20):
                server.respond([x + 1], handler)

    done = in_thread(push)
    serving = in_thread(serve)
    yield
    stop.set()
    assert done.result(LIMIT) >= 1000
    serving.result(LIMIT)


def lost(call: Callable[[], Any], since: float, role: str, rank: int) -> None:
    """The call reports the loss as soon as the connection ends, long before heartbeats time out."""
    with pytest.raises(fserver.PeerLostError) as raised:
        call()
    assert time.monotonic() - since < 5
    assert (raised.value.role, raised.value.rank) == (role, rank)


def met(server: fserver.Server) -> bool:
    """Whether a barrier of the servers was met. One that has not heard yet that the worker is back
    refuses it."""
    try:
        server.barrier(True, False)
    except fserver.PeerLostError:
        return False
    return True


def stop_all(*nodes: fserver.Node) -> None:
    together([node.stop for node in nodes])


def test_a_server_is_restarted(child: MakeChild) -> None:
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, **RAILS)
    at = scheduler.scheduler
    workers = [fserver.Worker(scheduler=at, gpu=i, connect=False, **RAILS) for i in range(2)]
    server = fserver.Server(scheduler=at, gpu=0, connect=False, **RAILS)
    other = child(server_process, at, {"gpu": 1, **RAILS})
    together([node.connect for node in (scheduler, server, *workers)])
    assert [other.get(), other.get()] == ["open", "connected"]
    with busy(workers[0], server):
        for i in range(3):
            ask(workers[1], i)
            other.freeze()  # so that it is not answered before
            pending = workers[1].push_pull([torch.ones(9)], [7], [torch.zeros(9)], [0])
            killed = other.kill()
            lost(lambda h=pending: workers[1].wait(h), killed, "server", 1)
            with pytest.raises(fserver.PeerLostError):
                ask(workers[1], 3)
            other = child(server_process, at, {"gpu": 1, **RAILS})
            assert other.get() == "open"
            began = time.monotonic()
            assert other.get() == "connected"
            ask(workers[1], 4)
            assert time.monotonic() - began < 5
    stop_all(*workers, server, scheduler)
    assert other.get() == "stopped"
    other.end()


def test_a_worker_is_restarted(child: MakeChild) -> None:
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, **RAILS)
    at = scheduler.scheduler
    servers = [fserver.Server(scheduler=at, gpu=i, connect=False, **RAILS) for i in range(2)]
    worker = fserver.Worker(scheduler=at, gpu=0, connect=False, **RAILS)
    other = child(worker_process, at, {"gpu": 1, **RAILS}, 0)
    together([node.connect for node in (scheduler, worker, *servers)])
    assert [other.get(), other.get(), other.get()] == ["open", "connected", "done"]
    with busy(worker, servers[0]):
        for _ in range(3):
            waiting = in_thread(servers[1].get_batch)
            killed = other.kill()
            lost(lambda f=waiting: f.result(LIMIT), killed, "worker", 1)
            with pytest.raises(fserver.PeerLostError):
                servers[1].barrier(True, False)
            other = child(worker_process, at, {"gpu": 1, **RAILS}, 20)
            assert [other.get(), other.get()] == ["open", "connected"]
            assert answer(servers[1], 20) == 0
            assert other.get() == "done"
            together([lambda s=s: eventually(lambda: met(s)) for s in servers])
    other.put("stop")
    stop_all(worker, *servers, scheduler)
    assert other.get() == "stopped"


def knows_of_no_scheduler(node: fserver.Worker) -> None:
    """Waits until the node knows that the scheduler is gone: a barrier waits for the next."""
    while True:
        try:
            node.barrier(False, True, timeout_ms=100)
        except fserver.TimeoutError:
            return
        except fserver.PeerLostError as error:
            assert error.role == "scheduler"


@pytest.mark.parametrize("along", ["", "server"])
def test_the_scheduler_is_restarted(child: MakeChild, port: int, along: str) -> None:
    """Alone, and together with a server."""
    scheduler = child(scheduler_process, port, RAILS)
    assert scheduler.get() == "open"
    at = f"127.0.0.1:{port}"
    workers = [fserver.Worker(scheduler=at, gpu=i, connect=False, **RAILS) for i in range(2)]
    server = fserver.Server(scheduler=at, gpu=0, connect=False, **RAILS)
    other = child(server_process, at, {"gpu": 1, **RAILS}, not along)
    together([node.connect for node in (server, *workers)])
    assert [other.get(), other.get(), scheduler.get()] == ["open", "connected", "connected"]
    with busy(workers[0], server):
        calls = threading.Event()
        waiting = in_thread(lambda: calls.set() or server.barrier(True, True))
        assert calls.wait(LIMIT)
        time.sleep(0.5)  # until the call is made, of which there is no sign
        killed = scheduler.kill()
        if along:
            other.kill()
        lost(lambda: waiting.result(LIMIT), killed, "scheduler", 0)
        if along:
            with pytest.raises(fserver.PeerLostError):
                ask(workers[1])
        else:
            ask(workers[1])
        for w in workers:
            knows_of_no_scheduler(w)
        later = [in_thread(lambda w=w: w.barrier(False, True)) for w in workers]
        if along:
            other = child(server_process, at, {"gpu": 1, **RAILS})
        scheduler = child(scheduler_process, port, RAILS)
        assert [scheduler.get(), scheduler.get()] == ["open", "connected"]
        if along:
            assert [other.get(), other.get()] == ["open", "connected"]
        for barrier in later:
            try:
                barrier.result(LIMIT)
            except fserver.PeerLostError as error:  # of the server, which it learns only now
                assert along and error.role == "server"
        ask(workers[1], 5)
    leaving = [in_thread(w.stop) for w in workers]
    if not along:
        server.barrier(True, False)  # who stops without a scheduler, stops alone
    stop_all(server)
    for stopped in leaving:
        stopped.result(LIMIT)
    assert [other.get(), scheduler.get()] == ["stopped", "stopped"]


def hosting_process(parent: Parent, port: int, options: dict[str, Any]) -> None:
    node = fserver.Server(
        scheduler=f"127.0.0.1:{port}", host_scheduler=True, connect=False, **options
    )
    parent.put("open")
    node.connect()
    parent.put("connected")
    answer(node)
    node.stop()
    parent.put("stopped")


@pytest.mark.parametrize("on_peer_lost", ["raise", "wait"])
def test_a_server_that_hosts_the_scheduler_is_restarted(
    child: MakeChild, port: int, on_peer_lost: str
) -> None:
    options = {"init_timeout": LIMIT, "settings": QUIET}
    other = child(hosting_process, port, options)
    assert other.get() == "open"
    worker = fserver.Worker(scheduler=f"127.0.0.1:{port}", on_peer_lost=on_peer_lost, **options)
    assert other.get() == "connected"
    for i in range(2):
        ask(worker, i)
        other.kill()
        if on_peer_lost == "raise":
            with pytest.raises(fserver.PeerLostError):
                while True:
                    ask(worker, i)
        other = child(hosting_process, port, options)
        assert [other.get(), other.get()] == ["open", "connected"]
    ask(worker, 2)
    worker.stop()
    assert other.get() == "stopped"


def test_frames_are_lost_and_sent_again(child: MakeChild) -> None:
    lossy = {"PS_DROP_MSG": "10", "PS_RESEND": "1", "PS_RESEND_TIMEOUT": "5", **QUIET}
    options = {"init_timeout": LIMIT, "settings": lossy}
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False, **options)
    other = child(worker_process, server.scheduler, options, 100)
    server.connect()
    assert [other.get(), other.get()] == ["open", "connected"]
    assert answer(server, 100) == 0
    assert other.get() == "done"
    other.put("stop")
    server.stop()
    assert other.get() == "stopped"


def test_frames_are_lost() -> None:
    """Without PS_RESEND, what waits for them ends in its time-out."""
    options = {"init_timeout": 0.5, "settings": {"STEPMESH_DROP_RATE": "100", **QUIET}}
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, settings=QUIET)
    with pytest.raises(fserver.TimeoutError):
        fserver.Worker(scheduler=scheduler.scheduler, **options)
    scheduler.close()


def test_push_pulls_wait_for_the_next_server(child: MakeChild) -> None:
    options = {"init_timeout": LIMIT, "settings": QUIET}
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, **options)
    at = scheduler.scheduler
    worker = fserver.Worker(scheduler=at, connect=False, on_peer_lost="wait", **options)
    other = child(server_process, at, options)
    together([scheduler.connect, worker.connect])
    assert [other.get(), other.get()] == ["open", "connected"]
    ask(worker)
    other.freeze()
    x, y = torch.arange(8.0), torch.zeros(8)
    sent = worker.push_pull([x], [0], [y], [0])
    other.kill()
    with pytest.raises(fserver.TimeoutError):
        worker.wait(sent, 200)
    z = torch.zeros(8)
    held = worker.push_pull([x], [1], [z], [0])
    other = child(server_process, at, options)
    for handler, pulled in ((sent, y), (held, z)):
        worker.wait(handler, LIMIT * 1e3)
        assert pulled.tolist() == (x + 1).tolist()
    stop_all(worker, scheduler)
    assert [other.get(), other.get(), other.get()] == ["open", "connected", "stopped"]


def test_get_batch_waits_for_the_next_worker(child: MakeChild) -> None:
    options = {"init_timeout": LIMIT, "settings": QUIET}
    server = fserver.Server(
        scheduler="127.0.0.1:0", host_scheduler=True, connect=False, on_peer_lost="wait", **options
    )
    other = child(worker_process, server.scheduler, options, 0)
    server.connect()
    assert [other.get(), other.get(), other.get()] == ["open", "connected", "done"]
    answers = in_thread(answer, server, 10)
    other.kill()
    other = child(worker_process, server.scheduler, options, 10)
    assert answers.result(LIMIT) == 0
    assert [other.get(), other.get(), other.get()] == ["open", "connected", "done"]
    other.put("stop")
    server.stop()
    assert other.get() == "stopped"


def test_waiting_ends(child: MakeChild) -> None:
    options = {"init_timeout": LIMIT, "settings": QUIET}
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, **options)
    at = scheduler.scheduler
    worker = fserver.Worker(
        scheduler=at, connect=False, on_peer_lost="wait", rejoin_timeout=0.5, **options
    )
    other = child(server_process, at, options)
    together([scheduler.connect, worker.connect])
    assert [other.get(), other.get()] == ["open", "connected"]
    other.freeze()
    handler = worker.push_pull([torch.ones(1)], [0], [torch.zeros(1)], [0])
    killed = other.kill()
    with pytest.raises(fserver.PeerLostError):
        worker.wait(handler)
    assert 0.4 < time.monotonic() - killed < 20
    with pytest.raises(fserver.PeerLostError):
        worker.barrier(True, True)
    worker.close()
    scheduler.close()


@pytest.mark.parametrize(("name", "value"), [("on_peer_lost", "ignore"), ("rejoin_timeout", -1)])
def test_wrong_values(name: str, value: Any) -> None:
    with pytest.raises(fserver.ConfigError, match=f"FSERVER_{name.upper()}=.*{value}.*: want"):
        fserver.Worker(scheduler="127.0.0.1:1", **{name: value})


def stopped_worker(parent: Parent, scheduler: str, options: dict[str, Any]) -> None:
    """Makes push_pulls until one fails for good, and sends that error's text."""
    node = fserver.Worker(scheduler=scheduler, **options)
    parent.put("connected")
    i = 0
    while True:
        try:
            ask(node, i)
        except fserver.PeerLostError:
            continue
        except fserver.ClosedError as error:
            parent.put(str(error))
            return
        i += 1
        if i == 20:
            parent.put("running")


@pytest.mark.parametrize("stopped_s", [0.7, 12.0])
def test_a_stopped_process(child: MakeChild, stopped_s: float) -> None:
    """For less than the time-out, nothing is lost. For more, it is taken for dead."""
    options = {
        "init_timeout": LIMIT,
        "settings": {"PS_HEARTBEAT_INTERVAL": "0.3", "PS_HEARTBEAT_TIMEOUT": "6", **QUIET},
    }
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False, **options)
    other = child(stopped_worker, server.scheduler, options)
    server.connect()
    assert other.get() == "connected"
    answers = in_thread(answer, server)
    assert other.get() == "running"
    other.freeze()
    time.sleep(stopped_s)
    before = server.describe()["requests"]
    os.kill(other.pid, signal.SIGCONT)
    if stopped_s < 6:
        eventually(lambda: server.describe()["requests"] > before + 100)
        other.kill()
    else:
        assert "it was taken for lost, and the others have gone on without it" in other.get()
        again = child(worker_process, server.scheduler, options, 10)
        assert [again.get(), again.get(), again.get()] == ["open", "connected", "done"]
    server.close()
    losses = answers.result(LIMIT)
    assert stopped_s < 6 or losses > 0
